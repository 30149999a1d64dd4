"""The ops that fxdp registers under `fxdp::`, each a composition of plain ops."""

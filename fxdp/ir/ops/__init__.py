"""Every op that is registered under `fxdp::`, each a composition of plain ops."""

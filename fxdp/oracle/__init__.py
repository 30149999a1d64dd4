"""All ranks of a program in one process, node by node beside one device: what `fxdp.verify` runs."""

"""Run all ranks of a program in one process and compare every node with one device, for `fxdp.verify`."""

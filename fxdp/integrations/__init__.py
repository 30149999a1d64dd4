"""The trainers that people use, each with fxdp in the place of `DistributedDataParallel`; one file each."""

"""Adapters that let popular trainers use fxdp instead of `DistributedDataParallel`; one file per trainer."""

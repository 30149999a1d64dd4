"""Sharded parameters, and optimizers that step on local shards."""

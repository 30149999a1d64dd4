"""Save and load checkpoints with `torch.distributed.checkpoint`, across different numbers of ranks."""

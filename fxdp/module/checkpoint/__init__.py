"""Checkpoints by `torch.distributed.checkpoint`: saved on some ranks, loaded on others."""

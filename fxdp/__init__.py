"""A torch.fx compiler for automatic data parallelism with single-device semantics."""

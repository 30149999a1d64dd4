"""Wing: Python semantics beyond those of `torch.export`. Without this room such models are refused."""

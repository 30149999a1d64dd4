"""Capture of graphs that torch.compile traced: each graph becomes part of a model to be captured."""

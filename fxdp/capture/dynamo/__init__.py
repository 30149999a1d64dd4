"""Graphs that torch.compile traced, as models to be captured."""

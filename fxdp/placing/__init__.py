"""Placing the values of a joint graph on the batch axis; `passes/batch_dim_analyzer.py` is the pass."""

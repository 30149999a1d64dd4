"""Sharding propagation: choose a placement for each value of a graph, by the cost of redistributions."""

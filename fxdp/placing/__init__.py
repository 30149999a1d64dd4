"""Sharding propagation: choose a placement for each value of a graph, by what redistributions cost."""

"""The walk that chooses a placement for each value of a whole graph, by what conversions cost."""

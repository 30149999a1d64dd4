"""From an emitted joint graph to a forward and a backward callable."""

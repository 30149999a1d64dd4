"""Lower an emitted joint graph to a forward callable and a backward callable."""

"""From an exported forward graph, wherever it comes from, to the joint forward and backward graph."""

"""From an exported forward graph, of any origin, to the joint forward and backward graph."""

"""The ranks of a mesh: start-up, connections, agreement, and the handling of failures."""

"""Repeated layers: trace and partition a few of them, and expand the graphs to all."""

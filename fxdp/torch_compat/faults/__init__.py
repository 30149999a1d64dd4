"""Faults of torch: each shown by a tiny program of plain torch, and corrected while fxdp traces."""

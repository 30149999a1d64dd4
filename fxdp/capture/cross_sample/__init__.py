"""Ops that couple the samples of a batch, spelled out as plain sums and global counts.

A mean over the batch is `sum / n` with the *global* `n`: its parts on the ranks then simply add up, and
placement on the joint graph is exact. Everything that does not reduce over the batch stays in one piece, for
Inductor to fuse.
"""

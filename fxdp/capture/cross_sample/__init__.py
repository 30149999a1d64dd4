"""Cross-sample decompositions: ops that combine the samples of a batch, as plain sums and global counts.

A mean over the batch becomes `sum / n` with the *global* `n`, so that the results of the ranks add up and
placement on the joint graph is exact. Ops that do not reduce over the batch are not decomposed, so that
Inductor can fuse them.
"""

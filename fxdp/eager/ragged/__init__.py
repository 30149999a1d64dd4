"""Ragged batches where they enter: several axes, each with its own sizes per rank, and values that point.

          rank 0          rank 1          the global batch
 x        a b c           d e             a b c d e             axis nodes: 3 + 2
 edges    0->1 1->2       0->1            0->1 1->2 3->4        axis edges: 2 + 1; into nodes: rank 1 adds 3
 graphs   0               0               0 1                   axis graphs: 1 + 1

    open_tree      structure.py   a batch as entries, each with its `fxdp.Rows`: by hand, or recognised
      recognised   kinds/         one file for each kind of structure, in one table
    enter          entering.py    one exchange of sizes, axes, and global tensors
      checks       faults.py      all faults at once, by path and rank, before anything is computed

From there on an op has one device's meaning: values that point are those of the global batch.
"""

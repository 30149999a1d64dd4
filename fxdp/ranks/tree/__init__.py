"""Many ranks joined as a tree, where connections all to all would be too many.

    up      each rank tells its parent what its subtree says, once: what all say alike is one value
    down    the root's answer, the same for all

Why not a part of torch: its store is one process that answers all ranks one after the other, and
`_StoreCollectives` has each of them read N values from it; gloo's all-gather passes three threads and joins
all to all; NCCL's needs the GPU to stop before each call. None of them can refuse one round and go on, and a
rank that dies ends each with "connection closed" at its neighbours, or with a timeout. Object collectives
unpickle. What torch does well, large sums, stays with gloo and NCCL.
"""

import fxdp.ranks.comms  # noqa: F401 - first, as it imports files of this room that import files of its own

"""A tree of ranks, for meshes with too many ranks to connect all to all.

    up      each rank sends the data of the subtree to its parent, once: equal values become one value
    down    the root's answer, equal for all ranks

Reasons not to use a part of torch: its store is one process that answers all ranks one after the other, and
`_StoreCollectives` lets each rank read N values from the store; gloo's all-gather passes three threads and
connects all to all; NCCL's needs the GPU to stop before each call. None can refuse one round and continue,
and a dead rank ends each with "connection closed" at the neighbors, or with a timeout. Object collectives
unpickle. Large sums, which torch does well, stay with gloo and NCCL.
"""

import fxdp.ranks.comms  # noqa: F401 - first, as it imports files of this room that import files of its own

"""Global tensors: eager ops on the global batch, of which each rank holds a part, by the sharding rules.

    x, y = fxdp.global_batch((x, y), mesh)      x.shape is global, x.local is this rank's part
    loss = F.cross_entropy(model(x), y)         each op: rule -> redistribution -> op on the local parts
    loss.item()                                 the loss of the global batch; sends nothing

    torch.Tensor methods, autograd            above: everything that torch does to tensors
    GlobalTensor              tensor.py       a wrapper with the global shape around the local part
    one op                    dispatch.py     finds the code of the op's plan by call_key.py, or makes it
      its plan                op_plan.py      the cheapest alternative of the op's rule, cached
        sizes in B            hypotheses.py   which sizes count the batch; proven on meta tensors
      its code                op_code.py      redistributes operands, runs the op on local parts
      writes, masks, reads    writes.py, data_sizes.py, host_reads.py
      counts in memory        strided.py

The compiler asks the same rules once per graph; this room asks once per kind of call. A rule, a
redistribution and a decomposition mean the same in both.
"""

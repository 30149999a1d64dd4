"""Global tensors: eager ops on the global batch, of which each rank holds a part, by the sharding rules.

    x, y = fxdp.global_batch((x, y), mesh)      x.shape is global, x.local is this rank's part
    loss = F.cross_entropy(model(x), y)         each op: rule -> redistribution -> op on the local parts
    loss.item()                                 the loss of the global batch; sends nothing

    torch.Tensor methods, autograd            above: everything that torch does to tensors
    GlobalTensor              tensor.py       a wrapper with the global shape around the local part
    one op                    dispatch.py     finds the code of the op's plan by its key, or makes it
      its plan                plans/          the cheapest alternative of the op's rule, cached
        sizes in B                            which sizes count the batch; proven on meta tensors
        its code                              redistributes operands, runs the op on local parts
      writes                  writes.py
    gradients                 autograd/       of parameters, reduced together at the end of a backward
    batches                   loader.py, ragged/, data/

The compiler asks the same rules once per graph; this room asks once per kind of call. A rule, a
redistribution and a decomposition mean the same in both.
"""

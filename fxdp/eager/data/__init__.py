"""Batches of one device's order, by seed and epoch alone, from a position that a checkpoint keeps.

    data_loader(dataset, batch_size=8, shuffle=True, seed=0)
      order of an epoch     sample_order.py      which samples in which batch, from (seed, epoch)
      draws of a sample     own_draws.py         its transforms draw from (seed, epoch, place in the epoch)
      batches of a rank     resumable_loader.py  its rows of each batch, as global tensors or as they are
      dead workers          loader_workers.py    told by the batch that they were to load

Neither the order nor what is drawn depends on the number of ranks, on where a run was resumed, or, but for
iterables, on the number of workers.
"""

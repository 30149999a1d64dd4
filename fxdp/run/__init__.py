"""`fxdp run`: a single-device script, unedited, on many ranks, of which each sees one device.

    fxdp run --nproc 4 train.py
      parent          ranks.py        forks the ranks, waits, ends all when one fails
      rank 0 ... 3    script.py       runs train.py as __main__, inside of what follows
        one device    hidden_ranks.py torch.distributed is not initialized, one GPU, no torchrun
                      process_groups.py, parallel_wrappers.py    a script's own ranks: one, or refused
        batches       loaders.py      DataLoaders give global tensors, each rank has loaded its rows
        draws         generators.py   all generators have rank 0's states
        files         files/          ranks above 0 write into a folder of their own, and read from it
        modules       calls/          outermost calls run compiled from some call on, or op by op
        processes     started_programs.py, children.py    programs run on rank 0, for all; children write once
        input         standard_input.py  rank 0 reads, all get the text

The numbers are one device's because every op on a global tensor has one device's meaning (`fxdp/eager`), and
a plain tensor is equal on all ranks, as all run the same lines. All replacements stand in `replacements.py`.
"""

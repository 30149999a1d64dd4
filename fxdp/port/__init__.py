"""`fxdp port`: the edits by which a script trains on many ranks without `fxdp run`, as a difference.

    train.py ── ast ──> port_edits.py     where the model is made, and where batches come from
                        ddp_remarks.py    lines written for DistributedDataParallel, which do not belong there
                        port_script.py    the command: prints both, changes no file

The script is read, never run; torch is not imported.
"""

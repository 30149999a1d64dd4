"""Print the edits by which a script trains on many ranks by hand, and name lines that need a look.

    train.py ── ast ──> port_edits.py     where the model is made, and where batches come from
                        port_remarks.py   lines written for DistributedDataParallel, draws of data sets
                        port_script.py    the command: prints both, changes no file

The script is read, never run; torch is not imported.
"""

from fxdp.cli.port.port_script import declare, run

__all__ = ["declare", "run"]

"""Train a small GPT on English text on several ranks, and compare with one device.

The files, in reading order:

    command        the options, and the start of the ranks if no launcher has started them
    data           the text and its batches, equal on every rank
    model          the GPT, in plain PyTorch
    training       the plain training loop of both runs
    demonstration  both runs, side by side, on the ranks
    show           the output
"""

from fxdp.cli.demo.command import declare, run

__all__ = ["declare", "run"]

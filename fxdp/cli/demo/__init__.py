"""`fxdp demo`: train a small GPT on English text on several ranks, and compare with one device.

The files, in reading order:

    options   the options of the command
    data      the text and its batches, equal on every rank
    model     the GPT, in plain PyTorch
    training  the plain training loop of both runs
    run       both runs, side by side, on the ranks
    launch    the local processes, if no launcher started the ranks
    show      the output
"""

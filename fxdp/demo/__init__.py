"""`fxdp demo`: a small GPT learns real English text on several ranks, beside one device.

The files, in reading order:

    options   what the user may ask for
    data      the text and its batches, the same on every rank
    model     the GPT, in plain PyTorch
    training  the plain training loop that both runs share
    run       the two runs, side by side, on the ranks
    launch    the local processes, when no launcher made them
    show      what the user sees
"""

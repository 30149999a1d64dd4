"""Train heads of transformers by Trainer, as on one device, and print every number that Trainer logs.

    python -m benchmarks.conformance.heads_script vit "seq2seq t5" [--casts] [--order 1] [--epsilon 1e-3]

A plain script for one device, by `fxdp run --nproc 2 -m benchmarks.conformance.heads_script`, too. Without
`--casts` the models' own casts to float32 keep float64. `--order` shuffles the samples within each batch, by
a seed: what then differs is rounding of one device itself. `--epsilon` is AdamW's, which makes steps out of
gradients that are rounding alone: by 1e-8 a bias that no loss sees (4e-17) is moved by 1e-11.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from tests.capture.zoo import keep_float64
from tests.integrations.head_runs import plain_trainer, rows_of
from tests.integrations.heads import HEADS


def _in_order(collate: Callable[[Any], Any] | None, seed: int) -> Callable[[Any], Any]:
    plain = collate or hf.default_data_collator
    return lambda samples: plain(random.Random(seed).sample(samples, len(samples)))


def main() -> None:
    """Train, and print a line for each row of the log, and one for the parameters."""
    parser = argparse.ArgumentParser()
    parser.add_argument("heads", nargs="*", default=list(HEADS))
    parser.add_argument("--casts", action="store_true")
    parser.add_argument("--order", type=int, metavar="SEED")
    parser.add_argument("--epsilon", type=float, default=1e-8)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    for name in asked.heads:
        with tempfile.TemporaryDirectory() as folder:
            trainer = plain_trainer(name, folder)
            trainer.args.adam_epsilon = asked.epsilon
            if asked.order is not None:
                trainer.data_collator = _in_order(HEADS[name].collate(trainer.model), asked.order)
            with contextlib.nullcontext() if asked.casts else keep_float64():
                trainer.train()
        for row in rows_of(trainer):
            print(f"{name}:", " ".join(f"{key} {value!r}" for key, value in row.items()), flush=True)
        norm = sum(x.detach().square().sum().item() for x in trainer.model.parameters()) ** 0.5
        print(f"{name}: parameters {norm!r}", flush=True)


if __name__ == "__main__":
    main()

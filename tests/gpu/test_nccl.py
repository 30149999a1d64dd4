"""Several ranks by NCCL equal one device on the global batch; one GPU is enough, which they share then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import ON_GPUS, run_ranks
from tests.gpu.training import train

pytestmark = ON_GPUS

EAGER: dict[str, Any] = {"backend": "eager"}
SMALL: dict[str, Any] = {"communication": {"bucket_cap_mb": 0.0005}}


@pytest.mark.parametrize(
    ("name", "axes", "split", "options"),
    [
        ("gpt", ("dp",), [3, 1], SMALL),
        ("gpt", ("dp",), [3, 1], {**EAGER, **SMALL}),
        ("gpt", ("dp",), [4, 2], {"pipeline": {"microbatches": 2}}),
        ("gpt", ("pp",), [4], {"pipeline": {"microbatches": 2, "schedule": "1f1b"}}),
        ("gpt", ("pp",), [4], {"pipeline": {"microbatches": 4, "schedule": "zero-bubble"}, **EAGER}),
        ("gpt", ("pp", "dp"), [3, 4], {"pipeline": {"microbatches": 2}, **EAGER}),
        ("gpt", ("dp_shard",), [3, 1], {"strategy": "shard", **SMALL}),
        ("convolutions", ("dp",), [3, 2], SMALL),
        ("convolutions", ("dp",), [3, 0, 1], EAGER),
        ("towers", ("dp",), [3, 2], {}),
        ("towers", ("dp",), [3, 0, 2], EAGER),
        ("words", ("dp",), [3, 1], {"strategy": "shard", **SMALL}),
        ("words", ("dp",), [3, 0, 2], {"strategy": "shard", **EAGER, **SMALL}),
        ("words", ("dp_replicate", "dp_shard"), [3, 0, 2, 1], {"strategy": "shard", **EAGER, **SMALL}),
        ("words", ("dp",), [3, 1], {"strategy": "optimizer", **SMALL}),
        (
            "words",
            ("pp", "dp_shard"),
            [3, 2],
            {"strategy": "shard", "pipeline": {"microbatches": 2}, **EAGER},
        ),
        ("dropping", ("dp",), [3, 2], {"rng": "single-device", **EAGER}),
        ("dropping", ("dp",), [3, 2], {"rng": "single-device"}),
    ],
)
def test_ranks_equal_one_device(
    name: str, axes: tuple[str, ...], split: list[int], options: dict[str, Any], tmp_path: Path
) -> None:
    count = len(split) * (2 if "pp" in axes else 1)
    for worst_loss, worst_other in run_ranks(count, tmp_path, train, name, axes, split, options):
        assert worst_loss <= 1e-9
        assert worst_other <= 1e-9

"""Scripts as people write them: on uneven ranks, and with empty ones, they print what one device prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.running import SCRIPTS, on_one_device, on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_plain_loop_saves_once(tmp_path: Path) -> None:
    """With loader workers; without them the demo's test runs such a loop."""
    arguments = ("--workers", "2", "--save")
    one = on_one_device(SCRIPTS / "plain.py", *arguments, str(tmp_path / "one.pt"))
    ranks = on_ranks(3, SCRIPTS / "plain.py", *arguments, str(tmp_path / "ranks.pt"))  # the last batch has 2
    assert one.code == 0, one.err
    assert (ranks.code, ranks.out) == (0, one.out), ranks.err
    assert sorted(found.name for found in tmp_path.iterdir()) == ["one.pt", "ranks.pt"]


GALLERY = [
    str(EXAMPLES / f"{name}.py")
    for name in ("resnet", "contrastive", "gan", "vae", "finetune_trainer", "lightning_digits")
]


def test_unedited_examples() -> None:
    """Data sets that draw, similarities of a batch, two networks, noise in a model, Trainer, Lightning."""
    pytest.importorskip("transformers")
    few = (*GALLERY, "--samples", "43", "--epochs", "2")
    one, ranks = on_one_device(SCRIPTS / "examples.py", *few), on_ranks(2, SCRIPTS / "examples.py", *few)
    assert one.code == 0, one.err
    assert one.out.count(".py") == len(GALLERY)
    assert (ranks.code, ranks.out) == (0, one.out), ranks.err

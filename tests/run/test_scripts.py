"""Scripts as people write them: on uneven ranks, and with empty ones, they print what one device prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.running import SCRIPTS, on_one_device, on_ranks


def test_a_plain_loop_saves_once(tmp_path: Path) -> None:
    """With loader workers; without them the demo's test runs such a loop."""
    arguments = ("--workers", "2", "--save")
    one = on_one_device(SCRIPTS / "plain.py", *arguments, str(tmp_path / "one.pt"))
    ranks = on_ranks(3, SCRIPTS / "plain.py", *arguments, str(tmp_path / "ranks.pt"))  # the last batch has 2
    assert one.code == 0, one.err
    assert (ranks.code, ranks.out) == (0, one.out), ranks.err
    assert sorted(found.name for found in tmp_path.iterdir()) == ["one.pt", "ranks.pt"]


def test_a_gan_whose_data_set_draws() -> None:
    one, ranks = on_one_device(SCRIPTS / "gan.py"), on_ranks(2, SCRIPTS / "gan.py")
    assert one.code == 0, one.err
    assert (ranks.code, ranks.out) == (0, one.out), ranks.err


def test_trainer_of_transformers() -> None:
    pytest.importorskip("transformers")
    one, ranks = on_one_device(SCRIPTS / "trainer.py"), on_ranks(2, SCRIPTS / "trainer.py")
    assert one.code == 0, one.err
    assert (ranks.code, ranks.out) == (0, one.out), ranks.err

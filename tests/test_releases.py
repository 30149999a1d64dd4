"""Which releases of torch are proven."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

from fxdp.releases import OLDEST, PROVEN, installed, is_proven, release


def test_the_table_is_in_order_and_each_line_is_a_release() -> None:
    numbers = [tuple(map(int, line.split("."))) for line in PROVEN]
    assert numbers == sorted(set(numbers))
    assert [release(line) for line in PROVEN] == list(PROVEN)
    assert min(PROVEN, key=lambda line: tuple(map(int, line.split(".")))) == OLDEST


def test_the_installed_torch_is_named_and_proven() -> None:
    assert installed() == torch.__version__
    assert is_proven()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.15.0", "2.15"),
        ("2.15.0+cu132", "2.15"),
        ("2.11.1+cpu", "2.11"),
        ("2.16.0.dev20261101+cpu", "2.16"),
        ("2.15.0a0+git1a2b3c4", "2.15"),
        ("3.0", "3.0"),
    ],
)
def test_a_version_belongs_to_a_release(version: str, expected: str) -> None:
    assert release(version) == expected


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(ValueError, match="no version of torch"):
        release("unknown")


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.15.0", "2.15.1+cpu"])
def test_versions_of_proven_releases_are_proven(version: str) -> None:
    assert is_proven(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0", "3.0.0", "2.1.0", "2.15.0rc1", "2.15.0.dev1+cpu"])
def test_others_and_previews_are_not(version: str) -> None:
    assert not is_proven(version)


ROOT = Path(__file__).parents[2]


def test_the_package_asks_for_the_proven_releases() -> None:
    """What pip installs is what was proven: up to the last release, with all its patches."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    major, minor = map(int, PROVEN[-1].split("."))
    assert [line for line in wanted if line.startswith("torch")] == [f"torch>={OLDEST},<{major}.{minor + 1}"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_pages_name_the_proven_releases(page: str) -> None:
    named = re.findall(r"torch (2\.\d+) to (2\.\d+)", (ROOT / page).read_text())
    assert named
    assert set(named) == {(OLDEST, PROVEN[-1])}

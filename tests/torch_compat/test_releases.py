"""Which releases of torch are proven."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

import fxdp
from fxdp.errors import UnsupportedTorchError, UntestedTorchWarning
from fxdp.torch_compat import releases
from fxdp.torch_compat.releases import OLDEST, PROVEN, installed, is_proven, release
from tests.compatibility import rows
from tests.project import project


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
    wanted = project()["dependencies"]
    major, minor = map(int, PROVEN[-1].split("."))
    assert [line for line in wanted if line.startswith("torch")] == [f"torch>={OLDEST},<{major}.{minor + 1}"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_pages_name_the_proven_releases(page: str) -> None:
    named = re.findall(r"torch (2\.\d+) to (2\.\d+)", (ROOT / page).read_text())
    assert named
    assert set(named) == {(OLDEST, PROVEN[-1])}


def test_each_release_and_python_has_run_without_a_fault() -> None:
    """The page's table, written from runs, and what the package says that it works with."""
    package = project()
    named = "\n".join(package["classifiers"])
    runs = rows()
    assert {release(torch) for _, torch, *_ in runs} == set(PROVEN)
    pythons = {python.rpartition(".")[0] for python, *_ in runs}
    assert pythons == set(re.findall(r"Python :: (3\.\d+)", named))
    assert package["requires-python"] == f">={min(pythons)}"  # of 3.11 and later, as text
    for *_, doctor, tests, _ in runs:
        assert doctor == "all is well"
        assert re.match(r"\d+ passed(, \d+ skipped)?$", tests)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has said nothing yet."""
    monkeypatch.delenv("FXDP_UNTESTED_TORCH", raising=False)
    releases._news.cache_clear()
    return monkeypatch


def _newer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(releases, "installed", lambda: "2.99.0+cpu")


def test_a_torch_that_is_not_proven_is_told_once(fresh: pytest.MonkeyPatch) -> None:
    """At the first compile, verify or plan, whichever it is."""
    _newer(fresh)
    model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fxdp.plan(model, (x,))
        fxdp.verify(model, (x,), mesh={"dp": 2})
        fxdp.compile(model)
    (told,) = [w for w in said if issubclass(w.category, UntestedTorchWarning)]
    assert "this is 2.99.0+cpu: `fxdp doctor` says in a minute" in str(told.message)
    assert told.filename == __file__


@pytest.mark.parametrize(("name", "value"), [("FXDP_UNTESTED_TORCH", "1"), ("RANK", "3")])
def test_nothing_is_said_to_who_knows_nor_by_other_ranks(
    fresh: pytest.MonkeyPatch, name: str, value: str
) -> None:
    _newer(fresh)
    fresh.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        releases.warn_untested(1)


def test_a_torch_that_is_too_old_is_refused(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(releases, "installed", lambda: "2.10.1+cpu")
    with pytest.raises(UnsupportedTorchError, match=r"torch 2\.10\.1\+cpu is installed; fxdp works with"):
        fxdp.compile(torch.nn.Linear(3, 2))
    with pytest.raises(UnsupportedTorchError, match=r"pip install -U 'torch>=2\.11,<2\.16'"):
        releases.check_torch()


def test_a_torch_without_ranks_is_refused(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(UnsupportedTorchError, match=r"built without torch\.distributed"):
        fxdp.compile(torch.nn.Linear(3, 2))


def test_a_version_that_nobody_can_read_is_refused(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(releases, "installed", lambda: "unknown")
    with pytest.raises(UnsupportedTorchError, match="'unknown' is no version of torch"):
        releases.check_torch()


def test_a_cache_that_is_no_folder_is_refused(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fresh.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UnsupportedTorchError, match=r"TORCHINDUCTOR_CACHE_DIR is '.*file'"):
        releases.check_torch()

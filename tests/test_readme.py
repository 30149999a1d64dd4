"""What the documents say is true: commands, code, paths."""

from __future__ import annotations

import csv
import re
import runpy
from pathlib import Path

import pytest
import torch

from fxdp.cli.demo.unedited import SCRIPT
from fxdp.torch_compat import releases
from tests.rank_pool import RankPool

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def _command(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n```bash\n(.*)\n```", README)
    assert found, f"README.md has no single-line command {name!r}"
    return found[1]


def test_the_test_command_is_what_ci_runs() -> None:
    assert _command("tests") in (ROOT / ".ci" / "run").read_text().splitlines()


def test_both_commands_set_up_by_themselves() -> None:
    for name in ("demo", "tests"):
        assert _command(name).startswith(
            "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e"
        )
    assert _command("demo").endswith("&& .venv/bin/fxdp demo")


FIGURES = README.partition("\n## Figures\n")[2].partition("\n## ")[0]
QUOTED = list(csv.DictReader((ROOT / "benchmarks" / "figures.csv").read_text().splitlines()))


def test_each_figure_is_one_that_a_suite_has_measured() -> None:
    """Ratios, errors and milliseconds of the section; other numbers say of what they are."""
    quoted = re.findall(r"(?<![\w.])(?<!torch\s)\d\.\d\d(?!\.?\w)|\d+e-\d+|\d+(?= ms\b)", FIGURES)
    measured = [value for row in QUOTED for value in row["values"].split()]
    assert sorted(quoted) == sorted(measured)


def test_each_figure_says_how_it_was_made() -> None:
    for row in QUOTED:
        assert all(row.values()), row
        assert re.fullmatch(r"2026-\d\d-\d\d", row["date"])
        for module in re.findall(r"python -m ([\w.]+)", row["command"]):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists()
            assert f"python -m {module}" in FIGURES
        assert row["commit"] in FIGURES, row


def test_figures_against_fxdp_are_measured_ones_too() -> None:
    """Those of docs/when-not.md: decimals, and counts of three digits."""
    pages = [ROOT / "README.md", *(ROOT / "benchmarks").glob("**/*.md")]
    known = {number for page in pages for number in re.findall(r"\d+(?:\.\d+)?", page.read_text())}
    text = (ROOT / "docs" / "when-not.md").read_text()
    told = re.findall(r"(?<!torch )(?<![\w.])(?:\d+\.\d+|\d{3})(?!\.?\w)", text)
    assert len(told) > 10
    assert set(told) <= known


def test_scripts_that_are_counted_are_in_their_table() -> None:
    table = (ROOT / "benchmarks" / "conformance" / "scripts.md").read_text()
    exact = {ranks: int(count) for ranks, count in re.findall(r"(\d ranks(?:, [\w:]+)?): (\d+) exact", table)}
    told = re.findall(r"\| (\d+) of (\d+) \|", README)
    assert sum(int(right) for right, _ in told) == sum(int(of) for _, of in told) == exact["3 ranks"]
    (uneven,) = re.findall(r"on two and on\nthree ranks, (\d+) of them on two uneven ones", README)
    assert exact["2 ranks"] == exact["3 ranks"]
    assert exact["2 ranks, 3:1"] == int(uneven)
    (compiled,) = re.findall(r"(\d+) of them compiled from the third call on, on two ranks", README)
    assert exact["2 ranks, compiled"] == int(compiled)


_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
UNEDITED, EXAMPLE = _CODE.findall(README)


def test_the_unedited_script_is_that_of_the_demo() -> None:
    """Which `tests/cli/demo` runs on one device and on ranks."""
    assert UNEDITED == _CODE.findall((ROOT / "docs" / "run.md").read_text())[0] == SCRIPT


def _run(program: Path) -> None:
    runpy.run_path(str(program), run_name="__main__")


def _printed(block: str, ranks: RankPool, world: int, folder: Path) -> str:
    """What rank 0 prints, alone or as torchrun starts it."""
    program = folder / "train.py"
    program.write_text(block)
    outcomes = ranks.spawn(world, _run, program, init=False, launched=world > 1)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.output
    return outcomes[0].output


@pytest.mark.parametrize("world", [1, 2])
def test_the_example_runs(world: int, ranks: RankPool, tmp_path: Path) -> None:
    assert ("all_reduce" in _printed(EXAMPLE, ranks, world, tmp_path)) == (world > 1)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_path_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    comms = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    named = re.findall(r"(?<![\w/.-])((?:fxdp|passes|tests|benchmarks|examples)/[\w/.-]*\w/?)", text)
    missing = [path for path in {*comms, *named} if not (ROOT / path).exists()]
    assert not missing


def test_the_pinned_torch_is_the_running_one() -> None:
    (pinned,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert releases.is_proven(pinned)
    running = torch.__version__.split("+")[0]
    if releases.is_proven(running) and releases.release(running) != releases.release(pinned):
        pytest.skip(f"constraints.txt pins torch {pinned}; this run asks another proven release, {running}")
    assert running == pinned

"""What the documents say is true: commands, code, paths."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fxdp.demo.launch import launch

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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_example_runs(block: str, ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "train.py"
    program.write_text(block)
    assert launch([sys.executable, str(program)], ranks, timeout=240) == 0
    assert ("all_reduce" in capfd.readouterr().out) == (ranks > 1)


def test_the_skips_run() -> None:
    (block,) = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    x = torch.randn(2, 8)
    assert torch.equal(names["model"](x), names["model"][1](x[:, ::2]).repeat_interleave(2, 1) + x)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_path_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    named = re.findall(r"(?<![\w/.-])((?:fxdp|passes|tests|benchmarks|examples)/[\w/.-]*\w/?)", text)
    missing = [path for path in {*links, *named} if not (ROOT / path).exists()]
    assert not missing


def test_the_pinned_torch_is_the_running_one() -> None:
    assert f"torch=={torch.__version__.split('+')[0]}" in (ROOT / "constraints.txt").read_text().splitlines()

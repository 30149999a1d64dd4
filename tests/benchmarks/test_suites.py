"""The suites in `benchmarks/`: each script is listed with its command, and only small results are kept."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
README = (FOLDER / "README.md").read_text()
FILES = sorted(FOLDER.rglob("*.py"))
PACKAGES = {file.parent for file in FILES if file.name == "__main__.py"}
"""The folders that are run as one: the other files in them are what is tried, not scripts of ours."""
RUN = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"): file.read_text()
    for file in FILES
    if 'if __name__ == "__main__"' in file.read_text()
    and (file.name == "__main__.py" or file.parent not in PACKAGES)
}
"""The text of each file that can be run, by its module."""
SCRIPTS = {name: text for name, text in RUN.items() if not name.endswith("_rank")}
COMMAND = re.compile(r"(?:python|--nproc-per-node \d+) -m (benchmarks[.\w]+)")
STARTED = re.compile(r'"-m", "(benchmarks[.\w]+)"')
MOST_BYTES = 50_000


def test_the_table_lists_every_script() -> None:
    """A row: question, command, time, where its results stand; a script may have more than one."""
    commands = re.findall(r"^\| .+\? \| `(.+)` \| .+ \| .+ \|$", README, re.MULTILINE)
    assert sorted({name for command in commands for name in COMMAND.findall(command)}) == sorted(SCRIPTS)


def test_every_script_says_its_own_command() -> None:
    assert [name for name, text in SCRIPTS.items() if name not in COMMAND.findall(text)] == []


def test_scripts_are_run_as_modules_alone() -> None:
    """Every module that a document names in a command, or that a script starts, can be run."""
    documents = [README, *((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))]
    documents += [file.read_text() for file in (ROOT / "docs").rglob("*.md")]
    texts = [file.read_text() for file in FILES]
    assert [text for text in documents + texts if "python benchmarks/" in text] == []
    assert [text for text in texts if "sys.path" in text] == []
    every = "\n".join(documents + texts)
    named = {*COMMAND.findall(every), *STARTED.findall(every)}
    assert named <= set(RUN)


def test_kept_results_are_small() -> None:
    kept = [file for kind in ("json", "jsonl", "csv") for file in FOLDER.rglob(f"*.{kind}")]
    assert len(kept) > 5
    assert [file.name for file in kept if file.stat().st_size > MOST_BYTES] == []


def test_a_script_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "benchmarks.chaos.faults", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "python -m benchmarks.chaos.faults" in shown.stdout


def test_a_script_reads_only_options_that_it_has() -> None:
    wrong = {}
    for file in FILES:
        tree = ast.parse(file.read_text())
        known = {_dest(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_option(node)}
        read = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "asked"
        }
        if known and read - known:
            wrong[file.name] = read - known
    assert wrong == {}


def _is_option(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"


def _dest(call: ast.Call) -> str:
    """The attribute of an option: its `dest`, its first long name, or its first name."""
    dest = [keyword.value for keyword in call.keywords if keyword.arg == "dest"]
    names = [ast.literal_eval(name) for name in dest or call.args]
    return next((name for name in names if name.startswith("--")), names[0]).lstrip("-").replace("-", "_")

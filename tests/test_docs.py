"""The pages of `docs/`: what is made is up to date, all code runs and prints what is said."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fxdp
from tests.documents import DOCS, GROUPS, MADE
from tests.integrations.frameworks import TinyLM, forget_accelerate, launched, lightning_module, sentences
from tests.rank_pool import RankPool

PAGES = sorted(page.name for page in DOCS.glob("*.md"))
RUN = [page for page in PAGES if page not in ("api.md", "trainers.md")]
_BLOCK = re.compile(
    r"(?:<!-- (?P<how>[\w ]+) -->\n)?```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<shown>.*?)```)?", re.S
)


@dataclass(frozen=True)
class Block:
    """Python code of a page: on how many ranks it runs, and what it prints, `...` for what is left out."""

    how: str
    code: str
    shown: tuple[str, ...]


def _blocks(page: str) -> list[Block]:
    found = _BLOCK.finditer((DOCS / page).read_text())
    return [Block(m["how"] or "", m["code"], tuple((m["shown"] or "").splitlines())) for m in found]


def _run(program: Path, names: dict[str, Any] | None = None) -> str:
    """What a program prints, run in its folder."""
    shown = io.StringIO()
    with contextlib.chdir(program.parent), contextlib.redirect_stdout(shown):
        exec(compile(program.read_text(), str(program), "exec"), {} if names is None else names)
    return shown.getvalue()


def _check(block: Block, printed: str) -> None:
    """Each line that the page shows is there, in this order."""
    place = 0
    for line in block.shown:
        if line not in ("...", ""):
            found = printed.find(line, place)
            assert found >= 0, f"{line!r} is not in what follows:\n{printed[place:]}"
            place = found + len(line)


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page: str, ranks: RankPool, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}  # blocks of a page go on from one another
    for number, block in enumerate(_blocks(page)):
        program = tmp_path / str(number) / "train.py"
        program.parent.mkdir()
        program.write_text(block.code)
        if block.how == "world 2":
            printed, _ = ranks.run(2, _run, program)
        elif block.how == "alone":  # it forks, which a process with threads should not
            (outcome,) = ranks.spawn(1, _run, program, init=False)
            assert outcome.status == 0, outcome.output
            printed = outcome.result
        else:
            printed = _run(program, names)
        _check(block, printed)


def test_every_page_with_code_is_run() -> None:
    assert {page for page in PAGES if "```python" in (DOCS / page).read_text()} <= {*RUN, "trainers.md"}


RECIPES = {block.how: block.code for block in _blocks("trainers.md")}
"""By trainer; what they name without making it is here."""
AFTERWARDS = {
    "trainer": ("trainer.state.global_step", 2),
    "accelerate": ("type(model)", fxdp.CompiledModule),
    "lightning": ("trainer.global_step", 2),
    "compile": ("'_fxdp_compiled' in vars(model.embed.weight)", True),
}
QUICKER = {
    '"communication": {"bucket_cap_mb": 25}': '"backend": "eager"',
    "data))": 'data), backend="eager")',
    "FxdpStrategy(), ": 'FxdpStrategy(backend="eager"), ',
}


def _recipe(name: str, folder: str) -> Any:
    """What a recipe leaves behind, run with a model and data of ours."""
    data = sentences(4)
    names: dict[str, Any] = {"model": TinyLM(), "data": data, "loader": DataLoader(data, 2)}
    import fxdp.dynamo.backend  # noqa: F401 (as pip does, which tells torch of its name)

    names["optimizer"] = torch.optim.SGD(names["model"].parameters())
    forget_accelerate()
    with launched():
        if name == "trainer":
            from transformers import TrainingArguments

            names["args"] = TrainingArguments(folder, max_steps=2, use_cpu=True, report_to=[])
        if name == "lightning":
            names["module"] = lightning_module()
        block = RECIPES[name]
        for written, quicker in QUICKER.items():
            block = block.replace(written, quicker)
        with contextlib.chdir(folder):  # where Lightning writes, unasked
            exec(block, names)
    forget_accelerate()
    return eval(AFTERWARDS[name][0], names)


@pytest.mark.parametrize("name", AFTERWARDS)
def test_a_recipe_for_a_trainer_runs(name: str, ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(1, _recipe, name, str(tmp_path)) == [AFTERWARDS[name][1]]


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == MADE[name](), "run `python -m tests.documents`"


def test_the_reference_has_every_public_name() -> None:
    there = {name for names in GROUPS.values() for name in names}
    assert set(fxdp.__all__) - {"skip"} <= there


def test_pictures_are_small_and_there() -> None:
    assert all(picture.stat().st_size < 100_000 for picture in (DOCS / "pictures").iterdir())
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        text = page.read_text()
        named = [*re.findall(r"\]\((?!http)([^)#]+)", text), *re.findall(r'src(?:set)?="([^"]+)"', text)]
        assert [name for name in named if not (page.parent / name).exists()] == [], page.name

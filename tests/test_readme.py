"""What the documents say is true: commands, code, paths."""

from __future__ import annotations

import contextlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fxdp
from tests.integrations.frameworks import TinyLM, forget_accelerate, launched, lightning_module, sentences
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


EXAMPLE, PIPELINE, GRAPH = re.findall(r"(?<!-->\n)```python\n(.*?)```", README, re.DOTALL)
RECIPES = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", README, re.DOTALL))
"""By trainer; what they name without making it is in the tests."""
SHARDED = RECIPES.pop("sharded")


def _run(program: Path) -> None:
    runpy.run_path(str(program), run_name="__main__")


def _printed(block: str, ranks: RankPool, world: int, folder: Path) -> str:
    """What rank 0 prints, alone or as torchrun starts it."""
    program = folder / "train.py"
    program.write_text(block)
    outcomes = ranks.spawn(world, _run, program, timeout=240, init=False, launched=world > 1)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.output
    return outcomes[0].output


@pytest.mark.parametrize("world", [1, 2])
def test_the_example_runs(world: int, ranks: RankPool, tmp_path: Path) -> None:
    assert ("all_reduce" in _printed(EXAMPLE, ranks, world, tmp_path)) == (world > 1)


def test_the_pipeline_runs(ranks: RankPool, tmp_path: Path) -> None:
    block = PIPELINE.replace('schedule="1f1b"', 'schedule="1f1b", compute="eager"')  # quicker to compile
    assert block != PIPELINE
    shown = _printed(block, ranks, 2, tmp_path)
    assert "rank 1: .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3" in shown
    assert "forward   send              x4" in shown
    assert "forward_0_mb3 = self.forward_0(microbatch_3)" in shown
    assert "self.wait_event('p2p_forward', after_forward_0_mb3)" in shown


def test_the_sharded_model_runs(ranks: RankPool, tmp_path: Path) -> None:
    block = SHARDED.replace('strategy="shard"', 'strategy="shard", compute="eager"')
    assert block != SHARDED
    assert _printed(block, ranks, 2, tmp_path).strip().endswith("torch.Size([17, 8])")


def test_the_graph_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    exec(GRAPH, {})
    shown = capsys.readouterr().out
    assert 'addmm: "f32[64, 32]" = torch.ops.aten.addmm.default(_0_bias, input_1, t)' in shown
    assert "(Replicate(), Replicate()) for gradient of 0.weight" in shown


def test_the_skips_run() -> None:
    block, _ = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    x = torch.randn(2, 8)
    assert torch.equal(names["model"](x), names["model"][1](x[:, ::2]).repeat_interleave(2, 1) + x)


def test_the_plan_is_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, block = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
    model, x = torch.nn.Linear(4, 2), torch.randn(2, 4)
    names = {"fxdp": fxdp, "model": model, "x": x, "other": fxdp.plan(model, (x,), mesh={"dp": 2})}
    exec(block.replace("models.py:12", "weight"), names)
    shown = capsys.readouterr().out
    assert "gradient of bias needs it as R: a result of the step" in shown
    assert "mesh: dp=64 here, dp=2 there" in shown
    assert names["again"] == names["plan"]
    assert "<h1>Linear on mesh(dp=64)" in (tmp_path / "plan.html").read_text()


AFTERWARDS = {
    "trainer": ("trainer.state.global_step", 2),
    "accelerate": ("type(model)", fxdp.CompiledModule),
    "lightning": ("trainer.global_step", 2),
}
QUICKER = {"data))": 'data), compute="eager")', "FxdpStrategy(), ": 'FxdpStrategy(compute="eager"), '}


def _recipe(name: str, folder: str) -> Any:
    """What a recipe leaves behind, run with a model and data of ours."""
    data = sentences(4)
    names: dict[str, Any] = {"model": TinyLM(), "data": data, "loader": DataLoader(data, 2)}
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


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_for_a_trainer_runs(name: str, ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(1, _recipe, name, str(tmp_path)) == [AFTERWARDS[name][1]]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_path_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    named = re.findall(r"(?<![\w/.-])((?:fxdp|passes|tests|benchmarks|examples)/[\w/.-]*\w/?)", text)
    missing = [path for path in {*links, *named} if not (ROOT / path).exists()]
    assert not missing


def test_the_pinned_torch_is_the_running_one() -> None:
    assert f"torch=={torch.__version__.split('+')[0]}" in (ROOT / "constraints.txt").read_text().splitlines()

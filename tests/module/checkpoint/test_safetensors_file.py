"""One entire file of a sharded model, as the library of its format reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import fxdp
from fxdp.errors import InputError, StateError
from tests.held_memory import peak_of
from tests.rank_pool import RankPool


class _Tied(nn.Module):
    """Tied, without dims, without elements, fewer rows than ranks, of other dtypes, and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 9, bias=False)
        self.table = nn.Embedding(9, 6)
        self.head.weight = self.table.weight
        self.large = nn.Linear(128, 257)
        self.short = nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([True, False]))


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return _Tied()


def _written(path: Path) -> tuple[int, int]:
    compiled = fxdp.compile(_model(dist.get_rank()), strategy="shard")
    before = compiled.large.weight.to_local().clone()
    peak = peak_of(lambda: fxdp.save_safetensors(path, compiled))
    assert torch.equal(before, compiled.large.weight.to_local())
    values = load_file(path)
    doubled = {name: 2 * v if v.is_floating_point() else v for name, v in values.items()}
    compiled.load_state_dict(doubled, strict=False)
    fxdp.save_safetensors(path, compiled)  # in the place of the one before
    return peak, compiled.large.weight.numel() * 4


def test_a_file_of_sharded_parameters_is_one_devices_state(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for peak, largest in ranks.run(3, _written, path):
        assert peak < 0.5 * largest  # a third of its rows on rank 0
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    found, state = load_file(path), _model(0).state_dict()
    assert found.keys() == state.keys() - {"table.weight"}
    for name, value in found.items():
        expected = 2 * state[name] if value.is_floating_point() else state[name]
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "table.weight": "head.weight"}
    other = _model(7)
    assert load_model(other, path) == (set(), [])
    assert torch.equal(other.table.weight, 2 * state["table.weight"])


def test_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=11, tie_word_embeddings=True, **sizes)
    model: Any = LlamaForCausalLM(config)
    config.save_pretrained(tmp_path)
    fxdp.save_safetensors(tmp_path / "model.safetensors", fxdp.compile(model))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(v, loaded.state_dict()[name]) for name, v in model.state_dict().items())


class _More(nn.Linear):
    def get_extra_state(self) -> Any:
        return json.dumps([1])


@pytest.mark.parametrize(
    ("model", "place", "words"),
    [
        (_More(2, 2), "m", "_extra_state: a str"),
        (nn.ParameterDict({"w": torch.zeros(2, dtype=torch.complex128)}), "m", r"w: torch\.complex128"),
        (nn.Linear(2, 2), "none/m", "not writable"),
        (nn.Linear(2, 2), "", "is a folder; expected the name of a file"),
    ],
)
def test_what_cannot_be_written(model: nn.Module, place: str, words: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, StateError), match=words):
        fxdp.save_safetensors(tmp_path / "in" / place if place else tmp_path, fxdp.compile(model))


def test_a_full_disk_leaves_the_file_that_was_there_and_no_other(tmp_path: Path) -> None:
    file, part = tmp_path / "m", tmp_path / "m.new"
    file.write_text("before")
    part.symlink_to("/dev/full")
    with pytest.raises(StateError, match="could not be written; what was there is as it was"):
        fxdp.save_safetensors(file, fxdp.compile(nn.Linear(2, 2)))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert file.read_text() == "before"


@pytest.mark.parametrize("path", [None, 3, "", "a\0b"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    compiled = fxdp.compile(nn.Linear(2, 2))
    for use in (lambda: fxdp.save(path, compiled), lambda: fxdp.load(path, compiled)):
        with pytest.raises(InputError, match="the path of a checkpoint is "):
            use()
    with pytest.raises(InputError, match="the path of a checkpoint is "):
        fxdp.save_safetensors(path, compiled)


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.SGD, 3])
def test_what_is_no_optimizer_is_refused(optimizer: Any, tmp_path: Path) -> None:
    compiled = fxdp.compile(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"the optimizer is an? (str|type|int), expected the torch\.optim"):
        fxdp.save(tmp_path / "run", compiled, optimizer)
    with pytest.raises(InputError, match=r"the optimizer is an? "):
        fxdp.load(tmp_path / "run", compiled, optimizer)

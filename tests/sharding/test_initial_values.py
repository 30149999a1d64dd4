"""Models of the meta device: the values of one device, drawn with room for one initialiser's tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import fxdp
from fxdp.errors import InputError, StateError
from fxdp.sharding.initial_values import initialise
from tests.rank_pool import RankPool


class Parts(nn.Module):
    """Initialisers that write own tensors, those of a child, buffers; tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6, padding_idx=2)
        self.attention = nn.MultiheadAttention(6, 2)
        self.norm = nn.BatchNorm1d(6)
        self.recurrent = nn.GRU(6, 6)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.table.weight
        self.last = nn.Linear(7, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.head(self.norm(self.table(words)))).sum()


class Applied(nn.Module):
    """Draws twice, as many models on GitHub do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)


def _transformer() -> nn.Module:
    return nn.Transformer(8, 2, 1, 1, 8, batch_first=True)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=11, pad_token_id=0, **sizes))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes))


def _equal_to_one_device(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    expected = make()
    drawn = torch.rand(())
    with torch.device("meta"):
        model = make()
    torch.manual_seed(3 + (dist.get_rank() if dist.is_initialized() else 0))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)) if dist.is_initialized() else None
    compiled = fxdp.compile(model, mesh, strategy="shard", backend="eager")
    if mesh is None:
        assert torch.equal(torch.rand(()), drawn)
    found = {**dict(compiled.named_parameters()), **dict(compiled.named_buffers())}
    for name, value in (*expected.named_parameters(), *expected.named_buffers()):
        own = found[name]
        assert torch.equal(own.full_tensor() if isinstance(own, DTensor) else own, value), name


@pytest.mark.parametrize("make", [Parts, Applied, _transformer, _bert, _llama])
def test_values_are_those_of_one_device(make: Callable[[], nn.Module]) -> None:
    if make in (_bert, _llama):
        pytest.importorskip("transformers")
    _equal_to_one_device(make)


def _on_ranks() -> None:
    for make in (Parts, _transformer):
        _equal_to_one_device(make)
    with torch.device("meta"):
        model = Parts()
    torch.manual_seed(0)
    compiled = fxdp.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy="shard")
    assert not any(p.is_meta for p in compiled.parameters())
    assert isinstance(compiled.head.weight, DTensor)
    assert compiled.head.weight is compiled.table.weight


def test_ranks_have_rows_of_the_values_of_rank_0(ranks: RankPool) -> None:
    ranks.run(2, _on_ranks)


class Bare(nn.Module):
    """Has values that nobody draws."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale).sum()


def test_what_nobody_draws_must_be_loaded() -> None:
    with torch.device("meta"):
        model = Bare()
    with pytest.raises(InputError, match="on the meta device and has no values"):
        fxdp.compile(model)
    compiled = fxdp.compile(model, strategy="shard", backend="eager")
    x = torch.randn(2, 3)
    with pytest.raises(StateError, match=r"nothing gave values to scale; expected .*reset_parameters"):
        compiled(x)
    plain = Bare()
    compiled.load_state_dict(plain.state_dict())
    assert torch.equal(compiled(x), plain(x))


def test_tensors_are_whole_a_module_at_a_time() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    seen: list[StorageWeakRef] = []
    alive = []

    def keep(_: Tensor, full: Tensor) -> None:
        seen.append(StorageWeakRef(full.untyped_storage()))
        alive.append(sum(not storage.expired() for storage in seen))

    assert initialise(model, {p: torch.zeros(p.shape) for p in model.parameters()}, keep) == []
    assert len(alive) == 10
    assert max(alive) == 2

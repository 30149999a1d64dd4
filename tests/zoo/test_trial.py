"""Forty models on which a new user's trial failed: each is exact now, or refused in words that help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.errors import FxdpError
from tests.lockstep import check
from tests.zoo import trial_others as others
from tests.zoo import trial_pictures as pictures

SPLIT = (5, 2, 0, 1)
N = sum(SPLIT)

Made = tuple[nn.Module, tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _images(channels: int = 2, side: int = 4) -> Tensor:
    return torch.randn(N, channels, side, side)


def _rows(*sizes: int) -> Tensor:
    return torch.randn(N, *(sizes or (6,)))


def _classes(count: int = 3) -> Tensor:
    return torch.randint(0, count, (N,))


def _denoiser(**parts: Any) -> Made:
    extra = [_rows(3, 5)] if "context" in parts else [_classes()] if "kinds" in parts else []
    return pictures.Denoiser(**parts), (_images(), _images(), _classes(10), *extra)


EXACT: dict[str, Callable[[], Made]] = {
    "unet2d": lambda: _denoiser(attention=True),
    "unet2d, scale and shift": lambda: _denoiser(scales=True),
    "unet2d, a condition": lambda: _denoiser(context=5),
    "unet2d, classes": lambda: _denoiser(kinds=3),
    "vq_model": lambda: (pictures.Codebook(), (_images(),)),
    "autoencoder_kl": lambda: (pictures.Gaussian(), (_images(),)),
    "autoencoder_tiny": lambda: (pictures.Tiny(), (_images(),)),
    "raft_small": lambda: (pictures.Flow(), (_images(), _images(), _images())),
    "swin_v2": lambda: (pictures.Regions(), (_rows(4, 4, 4),)),
    "zeroed slice of a copy": lambda: (pictures.PartlyZero(), (_rows(),)),
    "vgg_bn": lambda: (pictures.Deep(), (_images(), _classes())),
    "res2net": lambda: (pictures.Scales(), (_images(6), _classes())),
    "loha": lambda: (others.Adapter(kronecker=False, drop=None), (_rows(),)),
    "lokr": lambda: (others.Adapter(kronecker=True, drop=None), (_rows(),)),
    "loha that is never left out": lambda: (others.Adapter(kronecker=False, drop=0.0), (_rows(),)),
    "a batch that is an object": lambda: (others.Stored(), ({"graph": others.Batch(_rows())},)),
    "wgan_gp": lambda: (others.Critic(), (_rows(),)),
    "forces of a potential": lambda: (others.Potential(), (_rows(3, 3), _rows(1)[:, 0], _rows(3, 3))),
    "moco of buffers": lambda: (others.Momentum(buffers=True), (_rows(), _rows())),
    "loop over samples": lambda: (others.Samples(), (_rows(),)),
    "moco of parameters": lambda: (others.Momentum(buffers=False), (_rows(), _rows())),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    torch.manual_seed(0)
    model, args = EXACT[name]()
    check(model, args, splits=(SPLIT,), rng="single-device")


def test_grpo_is_exact_where_rows_are_said_to_belong_together() -> None:
    args = (torch.randn(4 * N, 6), torch.randn(4 * N))
    check(others.Answers(), args, splits=(SPLIT,), batch_dims=fxdp.RowsPerSample(4))


def _graphs(pooled: str) -> Made:
    nodes, edges = 11, 17
    batch = torch.randint(0, N, (nodes,)).sort().values
    edge_index = torch.randint(0, nodes, (2, edges))
    return others.Graphs(pooled), (torch.randn(nodes, 6), edge_index, batch, _classes())


def _boxes(model: nn.Module) -> Made:
    return model, (_images(), [{"boxes": torch.rand(1 + i % 3, 4)} for i in range(N)])


def _jagged() -> Made:
    rows = [torch.randn(2 + i, 6) for i in range(N)]
    return others.Plain(), (torch.nested.nested_tensor(rows, layout=torch.jagged),)


REFUSED: dict[str, tuple[Callable[[], Made], str]] = {
    "graphs, sums": (lambda: _graphs("sum"), r"x: 11 .*edge_index.*the batch is ragged.*pad each sample"),
    "graphs, means": (lambda: _graphs("mean"), "the batch is ragged"),
    "graphs, maxima": (lambda: _graphs("amax"), "the batch is ragged"),
    "graphs as many as a value says": (
        lambda: (others.Readout(), (_rows(), torch.arange(N) // 2)), r"int\(index.max\(\)\)",
    ),
    "nested": (_jagged, "nested tensor .*to_padded_tensor"),
    "bags": (
        lambda: (others.Bags(), (torch.randint(0, 9, (19,)), torch.arange(N) * 2)), "ragged.*without offsets",
    ),
    "detection": (
        lambda: _boxes(pictures.Detector()),
        r"a list with a dict of each sample.*fallback='eager'.*targets\[0\]\['boxes'\]: 1",
    ),
    "mixup": (lambda: (others.Mixup(), (_rows(),)), r"np.random.beta.*random number in Python"),
    "stochastic layers": (lambda: (others.Stochastic(), (_rows(),)), r"random.random\(\)"),
    "loha with a draw": (
        lambda: (others.Adapter(kronecker=False, drop=0.2), (_rows(),)),
        r"torch.rand\(1\) > self.drop.*decides by a random number",
    ),
    "layerdrop": (lambda: (others.LayerDrop(), (_rows(),)), "Switch off what draws it"),
    "specaugment": (lambda: (others.Masked(), (_rows(),)), r"np.random.randint.*mask_time_prob=0"),
    "branch": (lambda: (others.Branch(), (_rows(),)), r"if x.sum\(\) > 0.*torch.where"),
    "while": (lambda: (others.Pondering(), (_rows(),)), r"while halted.min\(\) < 1.*data-dependent"),
    "matching": (lambda: (others.Matching(), (_rows(),)), r"numpy\(\)"),
    "grpo": (lambda: (others.Answers(), (_rows(), _rows(1)[:, 0])), r"RowsPerSample\(4\)"),
    "three views": (lambda: (pictures.Augmented(), (_rows(), _classes())), r"trial_pictures.py:\d+"),
    "packed": (lambda: (others.Packed(), (_rows(), torch.arange(N) % 6 + 1)), "packed sequence is ragged"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, words = REFUSED[name]
    model, args = make()
    with pytest.raises(FxdpError, match=f"(?s){words}"):
        check(model, args, splits=(SPLIT,))


def test_there_are_forty() -> None:
    assert len(EXACT) + 1 + len(REFUSED) == 40

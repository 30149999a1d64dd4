"""A few models of the catalogue, one per mechanism; `benchmarks/conformance/zoo.py` measures all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from tests.zoo.catalogue import CATALOGUE, KINDS
from tests.zoo.entry import Entry
from tests.zoo.measure import measure

SPLITS = ((4, 3), (5, 2, 0, 1))

MECHANISMS = {
    "xlnet": "the batch on dim 1, relative positions, dropout of a table expanded over the batch",
    "wav2vec2": "CTC, weight normalization, a check of the labels",
    "poolformer": "stochastic depth: random numbers per sample",
    "vit_mae": "patches sorted by noise, gathered by index",
    "patchtst": "statistics of each sample, distributions",
}


LAYERS = {
    "xlnet": "transformer.layer",
    "wav2vec2": "wav2vec2.encoder.layers",
    "vit_mae": "vit.layers",
    "ibert": "ibert.encoder.layer",
    "longformer": "longformer.encoder.layer",
}
"""Where a model has several layers that do the same."""


QUIET = ("xlnet",)
"""What sends gradients and a few numbers, no activation; more of them in exactness/test_models_traffic.py."""


def _short(name: str) -> Entry:
    """A model of the catalogue with one layer of a kind: a second takes as long and shows nothing new."""
    entry = CATALOGUE[name]
    if name not in LAYERS:
        return entry

    def build() -> nn.Module:
        model = entry.build()
        layers = model.get_submodule(LAYERS[name])
        assert isinstance(layers, nn.ModuleList)
        del layers[1:]
        return model

    return replace(entry, build=build)


@pytest.mark.parametrize("name", MECHANISMS)
def test_training_equals_one_device(name: str) -> None:
    measured = measure(_short(name), "train", SPLITS)
    assert set(measured.errors) == {str(split) for split in SPLITS}
    if name in QUIET:
        assert not measured.gathers
        assert not measured.growing


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_evaluation_equals_one_device(mode: str) -> None:
    measured = measure(CATALOGUE["poolformer"], mode, SPLITS[1:])
    assert not measured.fallbacks
    assert measured.collectives > 1 or mode == "no_grad"


def test_a_branch_on_an_extreme_of_the_data() -> None:
    """Its averages begin at their first batch, if all that they have seen is zero."""
    assert measure(_short("ibert"), "train", SPLITS[-1:]).errors


def test_a_branch_on_a_flag_of_the_batch() -> None:
    """Longformer asks whether any token attends to all."""
    assert not measure(_short("longformer"), "train", SPLITS[1:]).fallbacks


def test_a_mixture_of_those_experts_that_the_batch_chose() -> None:
    # both layers: the second chooses by what the first has computed
    assert measure(CATALOGUE["mixtral_eager"], "train", SPLITS[-1:]).errors


def test_names_are_unique() -> None:
    assert len(CATALOGUE) == sum(len(kind) for kind in KINDS.values())

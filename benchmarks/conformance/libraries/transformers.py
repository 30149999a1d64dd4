"""A family of transformers is a folder of its models: as the catalogue has it, or made small by names."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from benchmarks.conformance.libraries.entries import (
    SAMPLES,
    EagerError,
    Families,
    Member,
    check_runs,
    parameters,
)
from benchmarks.conformance.libraries.tiny_configs import tiny
from benchmarks.conformance.libraries.tiny_inputs import Call, calls
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.entry import Entry

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
_PYRAMID = {
    "backbone_config": {"out_indices": [2, 3, 4]}, "encoder_in_channels": [8, 8, 12],
    "decoder_in_channels": [32, 32, 32],
}  # fmt: skip
_OF_LAYERS = ("kv_source_layers", "no_rope_layers", "indexer_types", "mlp_layer_types")
OWN: dict[str, dict[str, Any]] = {
    "cohere_compass": {
        "text_config": {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}}
    },
    "deimv2": _PYRAMID,
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "donut": {"image_size": 64},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "glm4v_moe": {"text_config": {"head_dim": 16}},
    "mistral_large4": {"text_config": dict.fromkeys(_OF_LAYERS)},
    "paddleocr_vl": {"text_config": {"rope_parameters": _ROPE}},
    "pp_doclayout_v2": _PYRAMID,
    "timm_backbone": {"backbone": "test_resnet"},
    "timm_wrapper": {"architecture": "test_resnet"},
}
"""What the configuration of a family cannot do without, where the names of its sizes do not say."""
LARGEST = 10_000_000
"""Parameters of a model that counts as small."""


def families() -> Families:
    """All folders with a model."""
    names = sorted({path.parent.name for path in _root().glob("*/modeling_*.py")} - {"auto"})
    known = _catalogued()
    return {name: partial(_smallest, name, known.get(name, [])) for name in names}


def _root() -> Path:
    return Path(inspect.getfile(transformers)).parent / "models"


def _smallest(name: str, known: Sequence[tuple[str, Entry]]) -> Member:
    """The first model that eager runs, in the catalogue or of those that the family defines.

    Raises
    ------
    EagerError : none does, with what the last one says.
    """
    said: list[str] = []
    for model, entry in known:
        try:
            return check_runs(Member(model, _with_loss(entry)), wide=True)
        except Exception as error:
            said.append(f"{model}: {type(error).__name__}: {error}")
    for made in _classes(name):
        try:
            return _first_call(made, OWN.get(name, {}))
        except Exception as error:
            said.append(f"{made.__name__}: {type(error).__name__}: {error}")
    raise EagerError("; ".join(said[:3]) or "the family has no model")


def _with_loss(entry: Entry) -> Entry:
    return Entry(lambda: OwnLoss(entry.build()), entry.inputs, entry.batch_dims)


def _catalogued() -> dict[str, list[tuple[str, Entry]]]:
    """The models of the catalogue by the family whose folder has their class."""
    found: dict[str, list[tuple[str, Entry]]] = {}
    for name, entry in CATALOGUE.items():
        for module in entry.build().modules():
            folder = re.match(r"transformers\.models\.(\w+)\.", type(module).__module__)
            if folder:
                found.setdefault(folder[1], []).append((f"{type(module).__name__} ({name})", entry))
                break
    return found


def _classes(name: str) -> list[Any]:
    """The family's models, those with a task of their own first."""
    found: dict[str, Any] = {}
    for path in sorted((_root() / name).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{name}.{path.stem}")
        found |= {key: value for key, value in vars(module).items() if _is_model(value, module.__name__)}
    return sorted(found.values(), key=lambda model: [word not in model.__name__ for word in ("For", "Model")])


def _is_model(value: Any, module: str) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module
        and value.config_class is not None
        and not value.__name__.endswith("PreTrainedModel")
    )


def _first_call(model: Any, own: dict[str, Any]) -> Member:
    """The model with the first inputs that it accepts."""
    build = partial(_build, model, own)
    if (size := parameters(build)) > LARGEST:
        raise EagerError(f"{size} parameters are not small")
    said: Exception | None = None
    for call in calls(build().model):
        try:
            return _accepted(build, call)
        except Exception as error:
            said = said or error
    raise said or EagerError("nothing here has the names of its arguments")


def _accepted(build: Any, call: Call) -> Member:
    """A model that counts the tokens of an image says how many it wants; one for larger inputs says so."""
    try:
        return check_runs(Member(f"{call.kind}({call})", Entry(build, call)))
    except Exception as error:
        wanted = re.search(r"tokens:? ?(\d+),? (?:and )?features:? ?(\d+)", str(error))
        if call.media and wanted and not call.marks:
            return _accepted(build, call.with_marks(int(wanted[2]) // SAMPLES))
        if call.media and _TOO_SMALL.search(str(error)) and call.times < 4:
            return _accepted(build, call.larger())
        raise


_TOO_SMALL = re.compile("size is too small|can't be greater than actual input size")


def _build(model: Any, own: dict[str, Any]) -> OwnLoss:
    return OwnLoss(model(tiny(model.config_class, own)))


class OwnLoss(nn.Module):
    """The model's own loss; a mean square of what it returns if it has none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        out = self.model(**inputs)
        loss: Tensor | None = getattr(out, "loss", None)
        if loss is not None:
            return loss.mean()
        leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
        return torch.stack([x.square().mean() for x in leaves if x.requires_grad]).sum()

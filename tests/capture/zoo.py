"""Tiny transformers models with random weights, a U-Net by hand, and float64 all the way down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf
from torch import nn

from .unet import UNet, unet_inputs

TOKENS = 40


@contextlib.contextmanager
def keep_float64(*, integers: bool = False) -> Iterator[None]:
    """transformers casts losses and norms to float32; keep float64 tensors as they are.

    `integers`: `positions.float()` and `.to(torch.float32)` of anything are float64, too, where a model
    multiplies it with its parameters; so are ranges that it asks for in float32.
    """
    to, as_float, softmax = torch.Tensor.to, torch.Tensor.float, nn.functional.softmax
    log_softmax, as_type = nn.functional.log_softmax, torch.Tensor.type
    norm, meshgrid, arange = torch.linalg.vector_norm, torch.meshgrid, torch.arange
    total = torch.Tensor.sum

    def patched_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked = (*args, kwargs.get("dtype"))
        if any(dtype is torch.float32 for dtype in asked) and (integers or self.dtype == torch.float64):
            return self.double()
        return to(self, *args, **kwargs)

    def patched_softmax(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype == torch.float64:
            kwargs.pop("dtype", None)
        return softmax(x, *args, **kwargs)

    def patched_log_softmax(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype == torch.float64:
            kwargs.pop("dtype", None)
        return log_softmax(x, *args, **kwargs)

    def patched_norm(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype == torch.float64:
            kwargs.pop("dtype", None)
        return norm(x, *args, **kwargs)

    def patched_meshgrid(*axes: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        listed = axes if isinstance(axes[0], torch.Tensor) else axes[0]
        wide = any(axis.dtype == torch.float64 for axis in listed)
        return meshgrid(*(axis.double() if wide else axis for axis in listed), **kwargs)

    def patched_arange(*args: Any, **kwargs: Any) -> torch.Tensor:
        narrow = kwargs.get("dtype") is torch.float32
        return arange(*args, **kwargs | ({"dtype": torch.float64} if narrow and integers else {}))

    def patched_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args[:1] == (torch.float32,) and self.dtype == torch.float64:
            return self
        return as_type(self, *args, **kwargs)

    def patched_sum(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.dtype == torch.float64:  # Trainer's label smoothing asks for float32
            kwargs.pop("dtype", None)
        return total(self, *args, **kwargs)

    torch.Tensor.to, torch.Tensor.type, torch.Tensor.sum = patched_to, patched_type, patched_sum
    torch.linalg.vector_norm, torch.meshgrid, torch.arange = patched_norm, patched_meshgrid, patched_arange
    wide = {torch.float64, *((torch.int64, torch.int32, torch.bool) if integers else ())}
    torch.Tensor.float = lambda self: self.double() if self.dtype in wide else as_float(self)
    nn.functional.softmax, nn.functional.log_softmax = patched_softmax, patched_log_softmax
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.float, torch.Tensor.type = to, as_float, as_type
        torch.Tensor.sum = total
        nn.functional.softmax, nn.functional.log_softmax = softmax, log_softmax
        torch.linalg.vector_norm, torch.meshgrid, torch.arange = norm, meshgrid, arange


def _tokens(batch: int, length: int = 6) -> torch.Tensor:
    return torch.randint(1, TOKENS, (batch, length))


def _labels(batch: int, length: int = 6) -> torch.Tensor:
    labels = _tokens(batch, length)
    labels[torch.rand(labels.shape) < 0.4] = -100
    labels[-1, 2:] = -100
    return labels


def _causal(batch: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(batch), "labels": _labels(batch)}


def _masked(batch: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, 6, dtype=torch.long)
    mask[0, 4:] = 0
    return {"input_ids": _tokens(batch), "attention_mask": mask, "labels": _labels(batch)}


def _images(batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 2, (batch,))}


def _pairs(batch: int) -> dict[str, Any]:
    return {"input_ids": _tokens(batch), "pixel_values": torch.randn(batch, 3, 16, 16), "return_loss": True}


# One layer each: a second takes as long to trace and is the first's like.


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )


_LLAMA = {
    "vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
_BERT = {
    "vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
_VIT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA))


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        **_LLAMA, num_local_experts=4, output_router_logits=True, experts_implementation="batched_mm"
    )
    return hf.MixtralForCausalLM(config)


def _bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**_BERT))


def _t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=TOKENS, decoder_start_token_id=0, **sizes))


def _vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**_VIT))


def _resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes))


def _clip() -> nn.Module:
    text = {**_BERT, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=_VIT, projection_dim=8))


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]], bool]] = {
    "gpt2": (_gpt2, _causal, False),
    "llama": (_llama, _causal, False),
    "bert": (_bert, _masked, False),
    "t5": (_t5, _masked, False),
    "vit": (_vit, _images, False),
    "resnet": (_resnet, _images, True),
    "mixtral": (_mixtral, _causal, False),
    "clip": (_clip, _pairs, False),
    "unet": (UNet, unet_inputs, True),
}
"""Model, inputs of a batch size, whether it is captured in training mode."""


def make(name: str) -> nn.Module:
    """A model of the zoo in float64."""
    torch.manual_seed(0)
    build, _, training = ZOO[name]
    return build().double().train(training)

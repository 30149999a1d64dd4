"""What real models send: gradients and a few numbers, no bytes that grow with the batch.

tests/capture/test_zoo.py asserts the same of the visible zoo, tests/zoo/test_zoo.py of the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers as hf
from torch import nn

from fxdp.module.dry_run import _local_program
from fxdp.options import Options
from fxdp.reports.plan_data.collective_rows import communication
from tests.capture.zoo import _BERT, _LLAMA, TOKENS, _causal, _masked, keep_float64

LLAMA = {**_LLAMA, "head_dim": 8, "sliding_window": 4}
BERT = {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
MAMBA = {"vocab_size": TOKENS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]] = {
    "gemma2": (lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**LLAMA)), _causal),
    "mamba": (lambda: hf.MambaForCausalLM(hf.MambaConfig(**MAMBA)), _causal),
    "deberta": (lambda: hf.DebertaForMaskedLM(hf.DebertaConfig(**BERT)), _masked),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_activation_travels(name: str) -> None:
    build, inputs = MODELS[name]
    with keep_float64():
        local, _ = _local_program(build().double().eval(), (), inputs(4), {"dp": 4}, Options())
    sent = communication(local.causes, {"B": 8})
    assert {row.op for row in sent} == {"all_reduce"}
    assert sent == communication(local.causes, {"B": 8000})
    assert sum(row.phase == "forward" for row in sent) == 2, "a loss and its count"

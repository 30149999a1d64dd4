"""A sharded parameter that meets a plain tensor outside of the compiled module: what to do about it.

model[0](x)             an uncompiled layer of a model that is sharded: torch refuses in DTensor's words
model[0].weight         the same, where a parametrization (spectral norm) computes it with its buffers
"""

from __future__ import annotations

from fxdp.errors import add_note

_OF_DTENSOR = "mixed torch.Tensor and DTensor"
_REMEDY = (
    "(fxdp: here a parameter that is sharded, as by strategy='shard', meets a plain tensor outside of the "
    "compiled module. Expected a call of the compiled module itself on all ranks, in evaluation, too; or "
    "full values, gathered on all ranks, with which one rank may go on alone:\n"
    "  full = {name: p.full_tensor() for name, p in layer.named_parameters()}  # on all ranks\n"
    "  torch.func.functional_call(layer, full, x)\n"
    "where a parametrization such as spectral_norm computes layer.weight, full is of "
    "layer.parametrizations.weight, which is called without x)"
)


def explain_mixed_operands(error: BaseException) -> None:
    """Add the remedy to the error by which torch refuses an op on both."""
    if isinstance(error, RuntimeError) and _OF_DTENSOR in str(error):
        add_note(error, _REMEDY)

"""Trace a joint graph with predicted forward metadata, which saves the run that torch makes for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from fxdp.capture.export.exported import Exported
from fxdp.capture.joint.raw_joint import Decompositions, Differentiated, JointOptions, Traced, traced
from fxdp.startup.memoized.predicted_forward import (
    ForwardMetadata,
    PredictedForward,
    WrongPredictionError,
    forward_metadata,
    predicted_forward,
)
from fxdp.torch_compat import is_on, is_traced

_log = logging.getLogger("fxdp")


def predicted_trace(
    own: Callable[[Exported, JointOptions, Decompositions], Traced],
    exported: Exported,
    options: JointOptions,
    table: Decompositions,
) -> Traced:
    """Extend `differentiated`: trace once, with predicted metadata; the own way where a prediction fails."""
    if is_on("predicted_forward") and (told := predicted_forward(exported.gm)) is not None:
        wrapper = _Predicted(exported.gm, options.differentiable, exported.loss, told)
        try:
            return traced(wrapper, exported, table)
        except Exception as error:  # whatever it is, the prediction may be its cause
            _log.debug("the forward runs before it is traced: %r", error)
    return own(exported, options, table)


class _Predicted(Differentiated):
    """A module whose first run, before the trace, gives what is predicted of it."""

    def __init__(
        self, exported: fx.GraphModule, differentiable: str, loss: int | None, told: PredictedForward
    ) -> None:
        super().__init__(exported, differentiable, loss)
        self.told = told
        self.forward_metadata: ForwardMetadata = ()

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        """Return the outputs, and compare both runs.

        Raises
        ------
        WrongPredictionError : the traced outputs differ from the predicted ones.
        """
        outputs = super().forward(*tensors)
        found = forward_metadata(outputs, (*tensors, *self._tensors()))
        if is_traced() and found != self.forward_metadata:
            raise WrongPredictionError(f"expected {self.forward_metadata}, got {found}")
        self.forward_metadata = found
        return outputs

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Run the exported program under a trace; before one, give the predicted outputs."""
        return super().run(tensors) if is_traced() else self.told.run(self.exported, tensors)

    def _tensors(self) -> Iterator[Tensor]:
        """All parameters and buffers, a tied one by each of its names."""
        for named in (self.named_parameters, self.named_buffers):
            yield from (tensor for _, tensor in named(remove_duplicate=False))

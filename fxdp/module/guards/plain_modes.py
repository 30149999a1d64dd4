"""The modes of torch in which programs are compiled, independent of the caller's modes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from fxdp.torch_compat import compile_lock


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """Compile outside of inference mode, with the caller's gradient mode, one thread at a time.

    Inductor warns about itself (deprecations, tunables); these warnings must not end a run with `-W error`.
    """
    enabled = torch.is_grad_enabled()
    with (
        compile_lock,
        torch.inference_mode(False),
        torch.set_grad_enabled(enabled),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield

"""Faults of torch with empty batches and with stacked recurrent layers, shown by tiny plain programs."""

from __future__ import annotations

import signal
import subprocess
import sys

import torch
from torch import nn

from fxdp.torch_compat import aten


def fourier_of_nothing() -> bool:
    """Return whether Fourier transforms of empty tensors raise."""
    wave, spectrum = torch.empty(0, 4), torch.empty(0, 3, dtype=torch.complex64)
    try:
        aten._fft_r2c.default(wave, [1], 0, True)
        aten._fft_c2c.default(spectrum, [1], 0, True)
        aten._fft_c2r.default(spectrum, [1], 0, 4)
    except RuntimeError:
        return True
    return False


def pixels_of_nothing() -> bool:
    """Return whether `pixel_unshuffle` of an empty tensor has a wrong shape."""
    shape = tuple(aten.pixel_unshuffle.default(torch.empty(0, 2, 4, 4), 2).shape)
    return shape != (0, 8, 2, 2)


def margins_of_nothing() -> bool:
    """Return whether summed margin losses of no samples leave the output unwritten."""
    x, sevens = torch.empty(0, 3), [torch.full((), 7.0) for _ in range(2)]
    one, several = torch.empty(0, dtype=torch.long), torch.empty(0, 3, dtype=torch.long)
    aten.multi_margin_loss.out(x, one, 1, 1.0, None, 2, out=sevens[0])
    aten.multilabel_margin_loss_forward.output(
        x, several, 2, output=sevens[1], is_target=torch.empty(0, 3)
    )  # fmt: skip
    return any(value.item() != 0.0 for value in sevens)


_NORM = """
import torch
from torch import ops
x, ones = torch.empty(0, 3, 4, 4), torch.ones(3)
ops.aten.native_batch_norm_backward.default(
    x, x, ones, ones, ones, None, None, False, 1e-5, [True, True, True])
"""


_ATTENTION = """
import torch
x = torch.empty(1, 2, 0, 4)
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(x, x, x)
"""


def attention_of_nothing() -> bool:
    """Return whether attention between no rows kills its process."""
    return _divides_by_zero(_ATTENTION)


def norm_of_nothing() -> bool:
    """Return whether the backward of BatchNorm in evaluation kills its process if there are no samples."""
    return _divides_by_zero(_NORM)


def _divides_by_zero(code: str) -> bool:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return ran.returncode == -signal.SIGFPE


def lstm_dropout() -> bool:
    """Return whether the decomposition of two layers omits the dropout between the layers."""
    from torch._decomp.decompositions import lstm_impl

    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        layers = nn.LSTM(3, 4, 2, dropout=1.0)
        state = [torch.zeros(2, 2, 4)] * 2
        given = (torch.randn(5, 2, 3), state, layers._flat_weights, True, 2, 1.0, True, False, False)
        taken_apart = lstm_impl(*given)[0]
        return not torch.allclose(taken_apart, aten.lstm.input(*given)[0])


def lstm_states() -> bool:
    """Return whether the decomposition of an LSTM returns states of a wrong shape."""
    from torch._decomp import decomposition_table

    layer = nn.LSTM(3, 4, 2, device="meta")
    x, state = torch.empty(5, 2, 3, device="meta"), torch.empty(2, 2, 4, device="meta")
    given = list(layer.parameters())
    made = decomposition_table[aten.lstm.input](x, [state, state], given, True, 2, 0.0, False, False, False)
    return bool(made[1].shape != state.shape)

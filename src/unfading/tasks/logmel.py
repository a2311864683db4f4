"""Log-mel filter bank: the energy of a one-second clip in 32 overlapping frequency bands, every 10 ms.

    s'_n = s_n - 0.97 s_{n-1}                                  pre-emphasis, on samples as stored (int16, not scaled to 1)
    frame_t = s'[160 t : 160 t + 400] * hamming                25 ms every 10 ms; the last frame is padded with zeros
    P_t[k] = |sum_n frame_t[n] exp(-2 pi i n k / 512)|^2 / 512
    out_t[j] = log(sum_k F[j, k] P_t[k] + 1e-10)

F[j] is a triangle over the bins b_j, b_{j+1}, b_{j+2}, with the lower corner included and the upper excluded. The b are the
integer parts of 513 f / 16000 at 34 frequencies f, evenly spaced on the mel scale 2595 log10(1 + f / 700) from 0 to 8 kHz.

This equals `python_speech_features.fbank` with `winfunc=numpy.hamming` followed by log(x + 1e-10), as in the script behind the
Google sets of the incremental RNN and FastGRNN: 16,000 samples give 99 steps.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

RATE = 16_000  # samples per second, and the length of a clip
FILTERS = 32
STEPS = 99
_WINDOW, _STRIDE, _FOURIER = 400, 160, 512


def mel_filters() -> Tensor:
    """F, float64 [32, 257]: one triangle per row, over the bins of the Fourier transform."""
    mel = torch.linspace(0.0, 2595 * math.log10(1 + RATE / 2 / 700), FILTERS + 2, dtype=torch.float64)
    hertz = 700 * (10 ** (mel / 2595) - 1)
    corner = torch.floor((_FOURIER + 1) * hertz / RATE)
    left, top, right = corner[:-2, None], corner[1:-1, None], corner[2:, None]
    bins = torch.arange(_FOURIER // 2 + 1, dtype=torch.float64)
    rising = (bins - left) / (top - left)
    falling = (right - bins) / (right - top)
    return torch.where((bins >= left) & (bins < top), rising, 0.0) + torch.where((bins >= top) & (bins < right), falling, 0.0)


def log_mel(clips: Tensor) -> Tensor:
    """Features [N, 99, 32] of clips [N, 16000], in the dtype of the clips (floating point, sample values as stored)."""
    if clips.dim() != 2 or clips.shape[1] != RATE:
        raise ValueError(
            f"log_mel takes clips of shape [N, {RATE}]; got {list(clips.shape)}. Pad them with zeros, or cut them."
        )
    if not clips.dtype.is_floating_point:
        raise TypeError(f"log_mel takes floating-point clips; got {clips.dtype}. Convert them with clips.float().")
    emphasised = torch.cat([clips[:, :1], clips[:, 1:] - 0.97 * clips[:, :-1]], dim=1)
    padded = functional.pad(emphasised, (0, _WINDOW + (STEPS - 1) * _STRIDE - RATE))
    window = torch.hamming_window(_WINDOW, periodic=False, dtype=clips.dtype, device=clips.device)
    frames = padded.unfold(1, _WINDOW, _STRIDE) * window  # [N, 99, 400]
    power = torch.fft.rfft(frames, n=_FOURIER).abs().square() / _FOURIER
    return torch.log(power @ mel_filters().to(power).T + 1e-10)

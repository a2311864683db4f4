"""Log-mel features against an independent formula: sums written out in NumPy, no Fourier transform, no matrix of filters."""

import numpy as np
import pytest
import torch

from unfading.tasks.logmel import FILTERS, STEPS, log_mel, mel_filters


def triangle(j, k):
    """Height of filter j at bin k, from the definition: zero, up to one, down to zero, between three corners."""
    top_of_scale = 2595 * np.log10(1 + 8000 / 700)
    corner = [int(513 * 700 * (10 ** (top_of_scale * i / 33 / 2595) - 1) / 16000) for i in (j, j + 1, j + 2)]
    if corner[0] <= k < corner[1]:
        return (k - corner[0]) / (corner[1] - corner[0])
    if corner[1] <= k < corner[2]:
        return (corner[2] - k) / (corner[2] - corner[1])
    return 0.0


def features_of_frame(clip, t):
    """The 32 features of step t, each sum written out."""
    emphasised = [clip[n] - (0.97 * clip[n - 1] if n else 0.0) for n in range(len(clip))] + [0.0] * 80
    n = np.arange(400)
    frame = np.array(emphasised[160 * t : 160 * t + 400]) * (0.54 - 0.46 * np.cos(2 * np.pi * n / 399))
    power = [abs(np.sum(frame * np.exp(-2j * np.pi * n * k / 512))) ** 2 / 512 for k in range(257)]
    return [np.log(sum(triangle(j, k) * power[k] for k in range(257)) + 1e-10) for j in range(32)]


@pytest.mark.parametrize("t", [0, 1, 50, 97, 98])
def test_log_mel_is_its_formula(t):
    clip = np.random.default_rng(t).integers(-3000, 3000, 16000).astype(float)
    got = log_mel(torch.from_numpy(clip)[None])
    assert got.shape == (1, STEPS, FILTERS)
    np.testing.assert_allclose(got[0, t].numpy(), features_of_frame(clip, t), rtol=1e-9, atol=1e-9)


def test_filters_are_triangles_between_mel_corners():
    want = [[triangle(j, k) for k in range(257)] for j in range(32)]
    np.testing.assert_allclose(mel_filters().numpy(), want, atol=1e-12)
    # Neighbours overlap so that between the first top and the last every bin has weight one in all.
    first, last = int(mel_filters()[0].argmax()), int(mel_filters()[-1].argmax())
    torch.testing.assert_close(mel_filters()[:, first : last + 1].sum(0), torch.ones(last + 1 - first, dtype=torch.float64))


def test_a_tone_is_loudest_in_its_own_band():
    time = torch.arange(16000, dtype=torch.float64) / 16000
    for hertz in (300.0, 1000.0, 4000.0):
        loudest = log_mel(10_000 * torch.sin(2 * torch.pi * hertz * time)[None])[0, 40].argmax()
        assert loudest == mel_filters()[:, round(hertz / 16000 * 512)].argmax()


def test_silence_has_a_finite_logarithm():
    torch.testing.assert_close(log_mel(torch.zeros(2, 16000)), torch.full((2, 99, 32), float(np.log(1e-10))))


def test_single_precision_is_enough():
    clips = torch.randint(-30_000, 30_000, (4, 16000))
    assert (log_mel(clips.float()).double() - log_mel(clips.double())).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("clips", "sentence"),
    [
        (torch.zeros(3, 8000), r"log_mel takes clips of shape \[N, 16000\]; got \[3, 8000\]"),
        (torch.zeros(16000), r"got \[16000\]"),
        (torch.zeros(3, 16000, dtype=torch.int16), "log_mel takes floating-point clips; got torch.int16"),
    ],
)
def test_clips_of_a_wrong_kind_are_refused(clips, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        log_mel(clips)

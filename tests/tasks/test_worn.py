"""Random rotations and speeds of worn sensors: rigid, bounded, one for each recording, and in training alone."""

import numpy as np
import pytest
import scipy.linalg
import torch

from unfading.tasks import DSA19, HAR2
from unfading.tasks.worn import at_another_speed, check_rotation, check_stretch, worn_differently


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def matrices(x, y):
    """The least-squares matrix from the vectors of x to those of y, [N, devices, 3, 3], by NumPy; x and y [N, T, d, s, 3]."""
    N, T, d, s, _ = x.shape
    rows = [(x[n, :, k].reshape(T * s, 3), y[n, :, k].reshape(T * s, 3)) for n in range(N) for k in range(d)]
    return np.stack([np.linalg.lstsq(a, b, rcond=None)[0].T for a, b in rows]).reshape(N, d, 3, 3)


@pytest.mark.parametrize("devices", [1, 5])
def test_every_device_of_a_recording_is_rotated_as_a_whole(devices):
    x = torch.randn(200, 7, devices * 9, dtype=torch.float64)
    y = worn_differently(x, 30.0, devices, generator())
    a, b = (each.view(200, 7, devices, 3, 3).numpy() for each in (x, y))
    R = matrices(a, b)
    # One matrix explains all sensors and steps of a device, and it is a rotation.
    np.testing.assert_allclose(np.einsum("ndij,ntdsj->ntdsi", R, a), b, atol=1e-12)
    np.testing.assert_allclose(R @ R.swapaxes(2, 3), np.broadcast_to(np.eye(3), R.shape), atol=1e-6)  # axes are float32
    np.testing.assert_allclose(np.linalg.det(R), 1, atol=1e-6)
    # R - R' is 2 sin(a) times the cross product with the axis.
    R = R.reshape(-1, 3, 3)
    K = (R - R.swapaxes(1, 2)) / 2
    sines = np.sqrt((K**2).sum(axis=(1, 2)) / 2)
    angles = np.degrees(np.arcsin(sines))
    assert angles.max() <= 30
    assert angles.max() > 29
    assert abs(angles.mean() - 15) < 1.5 / np.sqrt(devices)  # uniform
    axes = np.stack([K[:, 2, 1], K[:, 0, 2], K[:, 1, 0]], axis=1) / sines[:, None]
    assert np.abs(axes.mean(0)).max() < 0.2  # no direction is preferred
    if devices > 1:
        assert not np.allclose(R[0::devices], R[1::devices])


def test_the_same_generator_rotates_in_the_same_way():
    x = torch.randn(4, 5, 9)
    assert torch.equal(worn_differently(x, 20.0, 1, generator()), worn_differently(x, 20.0, 1, generator()))
    assert not torch.equal(worn_differently(x, 20.0, 1, generator()), worn_differently(x, 20.0, 1, generator(1)))


def test_the_formula_of_the_docstring():
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    y = worn_differently(x, 90.0, 1, generator(3))
    draw = generator(3)
    axes = torch.randn(6, 1, 1, 1, 3, generator=draw)
    shares = torch.rand(6, 1, 1, 1, 1, generator=draw)
    for v, turned, k, share in zip(x.numpy(), y.numpy(), axes.view(6, 3).numpy(), shares.flatten().tolist(), strict=True):
        unit = k / np.linalg.norm(k)
        cross = np.array([[0, -unit[2], unit[1]], [unit[2], 0, -unit[0]], [-unit[1], unit[0], 0]])
        R = scipy.linalg.expm(np.radians(90 * (2 * share - 1)) * cross)
        np.testing.assert_allclose(turned, v @ R.T, atol=1e-6)  # axes and angles are drawn in float32


def test_a_recording_at_another_speed_is_that_of_numpy():
    x = torch.randn(300, 11, 2, dtype=torch.float64)
    y = at_another_speed(x, 0.5, generator(3))
    speeds = 1 + 0.5 * (2 * torch.rand(300, 1, generator=generator(3)).flatten() - 1).double()
    for recording, result, f in zip(x.numpy(), y.numpy(), speeds.tolist(), strict=True):
        places = 5 + (np.arange(11) - 5) * f
        expected = np.stack([np.interp(places, np.arange(11), channel) for channel in recording.T], axis=1)
        np.testing.assert_allclose(result, expected, atol=1e-5)  # speeds are drawn in float32
    assert speeds.min() < 0.51
    assert speeds.max() > 1.49


def test_a_distortion_of_size_zero_changes_no_bit():
    x = torch.randn(4, 6, 9)
    assert torch.equal(worn_differently(x, 0.0, 1, generator()), x)
    assert torch.equal(at_another_speed(x, 0.0, generator()), x)
    assert torch.equal(at_another_speed(x[:, :1], 0.3, generator()), x[:, :1])  # a single step


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("task", [HAR2, DSA19])
@pytest.mark.parametrize("option", [{"rotate": 20.0}, {"stretch": 0.2}], ids=str)
def test_training_windows_alone_are_distorted(task, option):
    plain, distorted = task(), task(**option)
    for split in ("train", "full", "valid", "test"):
        one, other = (each.batch(0, 4, split=split, seed=0, device="cpu").x for each in (plain, distorted))
        assert torch.equal(one, other) == (split in ("valid", "test"))


@pytest.mark.parametrize("degrees", [-1.0, 181.0, float("nan"), "20"])
def test_a_wrong_angle_is_refused(degrees):
    with pytest.raises((ValueError, TypeError), match="rotate"):
        check_rotation(degrees)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan"), "x"])
def test_a_wrong_change_of_speed_is_refused(share):
    with pytest.raises((ValueError, TypeError), match="stretch"):
        check_stretch(share)

"""Random rotations of worn sensors: rigid, bounded, one for each device and recording, and in training alone."""

import numpy as np
import pytest
import scipy.linalg
import torch

from unfading.tasks import DSA19, HAR2
from unfading.tasks.worn import check_rotation, worn_differently


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


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("task", [HAR2, DSA19])
def test_training_windows_alone_are_rotated(task):
    plain, rotated = task(), task(rotate=20.0)
    for split in ("train", "full", "valid", "test"):
        one, other = (each.batch(0, 4, split=split, seed=0, device="cpu").x for each in (plain, rotated))
        assert torch.equal(one, other) == (split in ("valid", "test"))


@pytest.mark.parametrize("degrees", [-1.0, 181.0, float("nan"), "20"])
def test_a_wrong_angle_is_refused(degrees):
    with pytest.raises((ValueError, TypeError), match="rotate"):
        check_rotation(degrees)

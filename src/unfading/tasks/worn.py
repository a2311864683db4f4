"""Random distortions of recordings from worn sensors: another orientation of each device, and another speed.

    v' = v + sin(a) (k x v) + (1 - cos(a)) k x (k x v)
    x'_t = x_{c + (t - c) f}

for every vector v that a device measures in a recording (acceleration, rotation rate, magnetic field), with one axis k, uniform
on the sphere, and one angle a from U(-rotate, rotate) for each device and recording; and with one speed f from
U(1 - stretch, 1 + stretch) for each recording and its middle c. Between steps x is interpolated linearly, and before the first
and after the last step it stays as it is there.
"""

import math

import torch
from torch import Generator, Tensor

from unfading.errors import check_number, check_share


def check_rotation(degrees: float) -> None:
    """Raise unless an angle is in [0, 180] degrees."""
    check_number("rotate", degrees)
    if not 0 <= degrees <= 180:
        raise ValueError(f"rotate must be between 0 and 180 degrees; got {degrees}.")


def check_stretch(share: float) -> None:
    """Raise unless a share is in [0, 1)."""
    check_share("stretch", share)
    if share == 1:
        raise ValueError("stretch must be below 1, because at 1 a recording may stand still; got 1.")


def worn_differently(x: Tensor, rotate: float, devices: int, generator: Generator) -> Tensor:
    """Recordings [N, T, devices * sensors * 3], each device in each of them rotated by an angle of its own."""
    vectors = x.unflatten(2, (devices, -1, 3))
    N, device = len(x), x.device
    axes = torch.randn(N, 1, devices, 1, 3, generator=generator, device=device, dtype=torch.float32)
    share = torch.rand(N, 1, devices, 1, 1, generator=generator, device=device, dtype=torch.float32)
    k = (axes / axes.norm(dim=-1, keepdim=True)).to(x).expand_as(vectors)
    a = ((2 * share - 1) * math.radians(rotate)).to(x)
    once = torch.linalg.cross(k, vectors)
    return (vectors + torch.sin(a) * once + (1 - torch.cos(a)) * torch.linalg.cross(k, once)).flatten(2)


def at_another_speed(x: Tensor, stretch: float, generator: Generator) -> Tensor:
    """Recordings [N, T, I], each at a speed of its own."""
    N, T, I = x.shape
    f = 1 + stretch * (2 * torch.rand(N, 1, generator=generator, device=x.device, dtype=torch.float32) - 1)
    middle = (T - 1) / 2
    place = (middle + (torch.arange(T, device=x.device) - middle) * f.to(x)).clamp(0, T - 1)
    before = place.long().clamp(max=max(T - 2, 0))
    share = (place - before).unsqueeze(2)
    first, second = (x.gather(1, at.unsqueeze(2).expand(N, T, I)) for at in (before, (before + 1).clamp(max=T - 1)))
    return first * (1 - share) + second * share

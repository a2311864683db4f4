"""Random rotations of recordings from worn sensors, as if each device had been worn in another orientation.

    v' = v + sin(a) (k x v) + (1 - cos(a)) k x (k x v)

for every vector v that a device measures in a recording (acceleration, rotation rate, magnetic field), with one axis k, uniform
on the sphere, and one angle a from U(-rotate, rotate) for each device and recording.
"""

import math

import torch
from torch import Generator, Tensor

from unfading.errors import check_number


def check_rotation(degrees: float) -> None:
    """Raise unless an angle is in [0, 180] degrees."""
    check_number("rotate", degrees)
    if not 0 <= degrees <= 180:
        raise ValueError(f"rotate must be between 0 and 180 degrees; got {degrees}.")


def worn_differently(x: Tensor, rotate: float, devices: int, generator: Generator) -> Tensor:
    """Recordings [N, T, devices * sensors * 3], each device in each of them rotated by an angle of its own."""
    vectors = x.unflatten(2, (devices, -1, 3))
    N, device = len(x), x.device
    axes = torch.randn(N, 1, devices, 1, 3, generator=generator, device=device)
    share = torch.rand(N, 1, devices, 1, 1, generator=generator, device=device)
    k = (axes / axes.norm(dim=-1, keepdim=True)).to(x).expand_as(vectors)
    a = ((2 * share - 1) * math.radians(rotate)).to(x)
    once = torch.linalg.cross(k, vectors)
    return (vectors + torch.sin(a) * once + (1 - torch.cos(a)) * torch.linalg.cross(k, once)).flatten(2)

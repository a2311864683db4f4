"""Random distortions of training images: shifts, rotations, changes of size, and mirror images.

    pixel q of the result shows the point    c + R(a) (q - c) / z + d    of the image with centre c

Points are (right, down) in pixels, and R(a) = [[cos a, -sin a], [sin a, cos a]]. For each image are drawn an angle a from
U(-rotate, rotate) in degrees, a size z from U(1 - zoom, 1 + zoom), and both entries of d from U(-shift, shift). Between pixels
the image is interpolated bilinearly, and outside it has the values of its edge. With `flip`, half of the results are mirrored
left to right.
"""

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional

from unfading.errors import check_flag, check_number, check_share


@dataclass(frozen=True)
class Augmentation:
    """Which distortions are drawn, and how large they are at most. Without any, images stay as they are.

    Args:
        shift: largest shift, in pixels along each axis.
        rotate: largest rotation, in degrees.
        zoom: largest change of the size, as a share of the size, below 1.
        flip: mirror half of the images left to right.
    """

    _: KW_ONLY
    shift: float = 0.0
    rotate: float = 0.0
    zoom: float = 0.0
    flip: bool = False

    def __post_init__(self) -> None:
        for name in ("shift", "rotate"):
            check_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}.")
        check_share("zoom", self.zoom)
        if self.zoom == 1:
            raise ValueError("zoom must be below 1, because at 1 an image may vanish; got 1.")
        check_flag("flip", self.flip)

    @property
    def active(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.shift or self.rotate or self.zoom or self.flip)

    def __call__(self, images: Tensor, generator: Generator) -> Tensor:
        """Images [B, C, height, width] of any dtype, distorted, in float32. The generator is one of their device."""

        def share() -> Tensor:
            return torch.rand(len(images), generator=generator, device=images.device, dtype=torch.float32)

        def uniform(bound: float) -> Tensor:
            return (2 * share() - 1) * bound

        # Always the same draws, so that a distortion does not depend on which others there are.
        angle, zoom = uniform(math.radians(self.rotate)), 1 + uniform(self.zoom)
        down, right = uniform(self.shift), uniform(self.shift)
        mirrored = share() < 0.5
        images = images.float()
        if self.shift or self.rotate or self.zoom:  # sampling rounds even where nothing moves
            images = resampled(images, angle, zoom, right, down)
        return torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images) if self.flip else images


def resampled(images: Tensor, angle: Tensor, zoom: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Images [B, C, height, width] in float32, with a, z and both entries of d, [B] each, as in the equation."""
    height, width = images.shape[2:]
    # q - c. Not functional.affine_grid: it is a matrix product, which a GPU may round to three digits.
    x = torch.arange(width, device=images.device, dtype=torch.float32) - (width - 1) / 2
    y = torch.arange(height, device=images.device, dtype=torch.float32).unsqueeze(1) - (height - 1) / 2
    angle, zoom, right, down = (each.view(-1, 1, 1) for each in (angle, zoom, right, down))
    cos, sin = torch.cos(angle) / zoom, torch.sin(angle) / zoom
    # grid_sample measures from the centre, in half widths and half heights.
    grid = torch.stack([(cos * x - sin * y + right) * (2 / width), (sin * x + cos * y + down) * (2 / height)], dim=3)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)

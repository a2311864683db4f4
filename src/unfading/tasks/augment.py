"""Random distortions of training images: shifts, rotations, changes of size, and mirror images.

    pixel q of the result shows the point    c + R(a) (q - c) / z + d

of the image with centre c, with an angle a from U(-rotate, rotate) in degrees, a size z from U(1 - zoom, 1 + zoom), and both
entries of d from U(-shift, shift) in pixels, drawn for each image. Between pixels the image is interpolated bilinearly, and
outside it has the values of its edge. With `flip`, half of the images are mirrored left to right.
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
        shift: in pixels, along both axes.
        rotate: in degrees.
        zoom: as a share of the size, below 1.
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
        """Images [B, C, height, width] of any dtype, distorted, in float32."""
        B, _, height, width = images.shape
        device = images.device

        def uniform(bound: float) -> Tensor:
            return (2 * torch.rand(B, generator=generator, device=device) - 1) * bound

        # Always the same draws, so that a distortion does not depend on which others there are.
        angle, zoom = uniform(math.radians(self.rotate)), 1 + uniform(self.zoom)
        down, right = uniform(self.shift), uniform(self.shift)
        mirrored = torch.rand(B, generator=generator, device=device) < (0.5 if self.flip else 0.0)
        cos, sin = torch.cos(angle) / zoom, torch.sin(angle) / zoom
        sign = torch.where(mirrored, -1.0, 1.0)
        # affine_grid measures in half widths and half heights from the centre.
        first = torch.stack([cos * sign, -sin * height / width, 2 * right / width], dim=1)
        second = torch.stack([sin * sign * width / height, cos, 2 * down / height], dim=1)
        grid = functional.affine_grid(torch.stack([first, second], dim=1), list(images.shape), align_corners=False)
        return functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)

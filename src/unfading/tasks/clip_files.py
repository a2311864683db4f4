"""Reader of video clips that are folders of JPEG frames, 00001.jpg, 00002.jpg and so on.

Frames are decoded with Pillow, which is loaded only here. All frames of a clip have one size; those of different clips may
differ, as the cameras did.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfading.files.checked_json import sentence

# Pillow decodes outside of Python's lock, so that threads share the work.
THREADS = 8
# A larger frame is a damaged file, or not one of a webcam.
LARGEST_SIDE = 4096


def frame_count(folder: Path) -> int:
    """The number of frames of a clip, after a check that they are numbered from 1 without a gap."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the clip {folder} does not exist, and the label files list it. Unpack all parts of the archive."
        )
    numbers = sorted(int(path.stem) for path in folder.glob("*.jpg") if path.stem.isdecimal())
    if not numbers:
        raise FileNotFoundError(f"the clip {folder} has no frames: wanted 00001.jpg and so on. Unpack the archive again.")
    for wanted, number in enumerate(numbers, start=1):
        if number != wanted:
            raise FileNotFoundError(
                f"the clip {folder} has {len(numbers)} frames, and {wanted:05d}.jpg is missing. Unpack the archive again."
            )
    return len(numbers)


def read_clips(folders: Sequence[Path], steps: int, size: int) -> Tensor:
    """The frames in the middle of clips as bytes, [steps, clips, 3, size, size], red, green and blue.

    Args:
        folders: of the clips.
        steps: number of frames. A clip with fewer shows its last one for the remaining steps.
        size: height and width to which frames are scaled, whatever their shape.
    """
    image = _pillow()
    with ThreadPoolExecutor(min(THREADS, len(folders))) as pool:
        clips = pool.map(lambda folder: _read_clip(image, folder, steps, size), folders)
        return torch.from_numpy(np.ascontiguousarray(np.stack(list(clips), axis=1)))


def _read_clip(image: ModuleType, folder: Path, steps: int, size: int) -> NDArray[np.uint8]:
    """[steps, 3, size, size]"""
    last = frame_count(folder)
    first = 1 + max(0, (last - steps) // 2)
    paths = [folder / f"{min(first + step, last):05d}.jpg" for step in range(steps)]
    frames: dict[Path, NDArray[np.uint8]] = {}
    shapes: dict[Path, tuple[int, int]] = {}
    for path in dict.fromkeys(paths):
        frames[path], shapes[path] = read_frame(image, path, size)
        if shapes[path] != shapes[paths[0]]:
            own, others = (" x ".join(map(str, shapes[each])) for each in (path, paths[0]))
            raise ValueError(
                f"{path} has {own} pixels, and {paths[0].name} of the same clip {others}; all frames of a clip must have one "
                "size. Unpack the archive again."
            )
    return np.stack([frames[path] for path in paths])


def read_frame(image: ModuleType, path: Path, size: int) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """One frame, [3, size, size], and the width and height that it has in its file.

    Args:
        image: Pillow's module PIL.Image.
        path: of the JPEG file.
        size: height and width to which it is scaled.
    """
    try:
        with image.open(path, formats=["JPEG"]) as file:
            shape = file.size
            if max(shape) > LARGEST_SIDE:
                raise ValueError(f"it would have {shape[0]} x {shape[1]} pixels")
            pixels = np.asarray(file.convert("RGB").resize((size, size), image.Resampling.BILINEAR))
    except FileNotFoundError:
        raise
    except Exception as error:  # damaged bytes raise errors of many kinds
        reason = "it is no JPEG" if isinstance(error, image.UnidentifiedImageError) else sentence(error)
        raise ValueError(f"{path} is damaged ({reason}). Unpack the archive again.") from None
    return pixels.transpose(2, 0, 1), shape


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(
            "reading video needs Pillow, which is not installed. Get it with: pip install 'unfading[video]'"
        ) from None
    return Image

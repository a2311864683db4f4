"""Readers of NumPy's and gzip's files that compare sizes before they allocate. Nothing is unpickled.

The header of an .npy file states the shape, and NumPy allocates it before it reads. Here the shape must fit the bytes that
follow, so that a damaged header cannot claim more memory than the file has.
"""

import gzip
import zipfile
import zlib
from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from unfading.files.checked_json import sentence

# The largest ratio that deflate reaches is 1,032.
MOST_COMPRESSED = 1100


class PickledArray(ValueError):
    """An array of Python objects, which are stored as pickles."""


def read_npy(path: Path, *, text: bool = False) -> NDArray[Any]:
    """The array of an .npy file; what is not an array of numbers, or of text if that is allowed, raises a ValueError."""
    with path.open("rb") as stream:
        return _read(stream, path.stat().st_size, text)


def read_npz(path: Path, names: Collection[str], *, text: bool = False) -> dict[str, NDArray[Any]]:
    """Those of the named arrays that an .npz file has; a damaged file raises a ValueError. `text` allows arrays of text."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            arrays = {}
            for name in names:
                if name in entries:
                    entry = entries[name]
                    if entry.file_size > MOST_COMPRESSED * max(entry.compress_size, 1):
                        raise ValueError(f"array {name!r} claims {entry.file_size} bytes")
                    with archive.open(entry) as stream:
                        arrays[name] = _read(stream, entry.file_size, text)
            return arrays
    except ValueError:
        raise
    except Exception as error:  # zipfile, zlib and struct raise errors of many kinds for damaged bytes
        raise ValueError(sentence(error)) from None


def _read(stream: IO[bytes], size: int, text: bool) -> NDArray[Any]:
    try:
        version = npy.read_magic(stream)
        header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, fortran, dtype = header(stream)
    except Exception as error:  # the parser of the header raises errors of many kinds for damaged bytes
        raise ValueError(f"its header cannot be read: {sentence(error)}") from None
    if dtype.hasobject:
        raise PickledArray("it holds Python objects")
    if not (text and dtype.kind == "U") and (dtype.kind not in "biuf" or dtype.itemsize > 8):
        raise ValueError(f"its entries are {str(dtype)[:40]}, no numbers of at most 64 bits")
    left = size - stream.tell()
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != left:
        raise ValueError(f"its header says {str(list(shape))[:60]} of {dtype}, and {left} bytes follow")
    content = stream.read(left)
    if len(content) != left:
        raise ValueError(f"it ends after {len(content)} of {left} bytes")
    array = np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")
    return array.astype(dtype.newbyteorder("="), order="C")


def gunzip(path: Path, largest: int) -> bytes:
    """The content of a gzip file; a damaged one, and one of more than `largest` bytes, raise a ValueError."""
    try:
        with gzip.open(path) as stream:
            content = stream.read(largest + 1)
    except FileNotFoundError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, OverflowError) as error:
        raise ValueError(f"it is not a complete gzip file ({sentence(error)})") from None
    if len(content) > largest:
        raise ValueError(f"it unpacks to more than {largest} bytes")
    return content

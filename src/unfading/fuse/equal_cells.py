"""Results that equal cells share: what is known about one layer of a deep stack holds for the others.

A plan does not depend on the values of tensors (`contents.py`), so two cells with equal contents and with parameters of equal
shapes have the same one. This is used for cells that hold nothing of the users: their objects would stay alive as long as the
result, and they may hold things that are left out of the contents.
"""

from collections import deque
from types import FunctionType
from typing import Any, Generic, TypeVar

from unfading.fuse.contents import Contents, is_standard, package_of
from unfading.torch_state import traced

Result = TypeVar("Result")

MOST = 64  # results that are stored


class EqualCells(Generic[Result]):
    """The last results, each with the contents of the cell that it was found for."""

    def __init__(self) -> None:
        self.entries: deque[tuple[Any, list[Any], Result]] = deque(maxlen=MOST)

    def find(self, contents: Contents) -> list[Result]:
        """The results for cells that are equal to this one."""
        tensors = _tensors(contents)
        entries = list(self.entries)  # at once: another thread may add to them
        return [result for known, values, result in entries if tensors and known == tensors and values == contents.values]

    def add(self, contents: Contents, result: Result) -> None:
        """Store a result, unless the cell holds something of the users, or writes what a step would read."""
        tensors = _tensors(contents)
        if tensors:
            self.entries.append((tensors, contents.values, result))


def _tensors(contents: Contents) -> list[Any]:
    """Types and sizes of the tensors of a cell, and which of them are one; empty if its results are not shared."""
    if traced() or contents.hidden or not _is_ours(contents):
        return []
    cell = contents.of()
    tensors = [*cell.named_parameters(remove_duplicate=False), *cell.named_buffers(remove_duplicate=False)]
    numbers: dict[int, int] = {}
    return [
        (name, numbers.setdefault(id(t), len(numbers)), tuple(t.shape), t.dtype, t.device, t.requires_grad)
        for name, t in tensors
    ]


def _is_ours(contents: Contents) -> bool:
    """Whether everything that a cell holds is of this library, of torch or of Python."""
    held = [value for part in contents.parts if part.copied for value in (part.value, *part.entries)]
    return all(_is_of_a_library(value) for value in held)


def _is_of_a_library(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return package_of(value) in ("unfading", "torch")
    kind = value if isinstance(value, type) else type(value)
    return package_of(kind) == "unfading" or is_standard(kind)

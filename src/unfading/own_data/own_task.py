"""The base class of tasks over a user's own data.

The fields of such a task describe the model and identify the data by their SHA-256. They are JSON values, so a run can be
stored, and its model built again, without the data. The data themselves are attached to the task in memory.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from unfading.tasks.base import Split
from unfading.tasks.resident import CPU, Examples, Part, Resident, rows_of


class AttachedData(Protocol):
    """What a task needs of its data."""

    @property
    def content(self) -> str:
        """The SHA-256 of the data and of their split."""

    @property
    def held_out(self) -> NDArray[Any]:
        """Training rows that are used for validation."""


class SourceError(OSError):
    """The file of a run's data is missing on this machine, or has changed. The settings of the run are not at fault."""


@dataclass(frozen=True, kw_only=True)
class OwnTask(Resident):
    """A task over the data of a user.

    Args:
        content: SHA-256 of the data and of their split.
        source: the file that holds the data, and how it is read and split; empty for arrays in memory.
    """

    paper: ClassVar[str] = "own data"

    content: str
    source: dict[str, Any] = field(default_factory=dict, hash=False)

    # Not fields: the data are no JSON values, and `content` stands for them. Copies per device are kept with them.
    _data: ClassVar[Any] = None
    _parts: ClassVar[dict[Any, Examples]]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):  # JSON has no tuples
                object.__setattr__(self, name, _tuples(value))

    def with_data(self, data: AttachedData) -> Self:
        """The same task with its data attached."""
        if data.content != self.content:
            raise ValueError(
                f"these data are not those of the run: their SHA-256 is {data.content[:12]}..., and the run's is "
                f"{self.content[:12]}.... Give the same data, or fit a new model."
            )
        object.__setattr__(self, "_data", data)
        object.__setattr__(self, "_parts", {})
        return self

    @property
    def data(self) -> Any:
        """The data that were attached, or else those of the file, which must be the same as before."""
        if self._data is None and self.source:
            self._attach_source()
        if self._data is None:
            raise ValueError(
                f"the data of this run (SHA-256 {self.content[:12]}...) were arrays in memory, which its files do not hold. "
                "Fit with the same arrays again."
            )
        return self._data

    def _attach_source(self) -> None:
        file = Path(self.source["file"])
        if not file.is_file():
            raise SourceError(f"{file}, which holds the data of this run, does not exist here. Put the same file there.")
        data = self.read_source()
        try:
            self.with_data(data)
        except ValueError as error:
            raise SourceError(f"{file}: {error}") from None

    @abstractmethod
    def read_source(self) -> AttachedData:
        """The data of the file again."""

    def part_on(self, part: Part, device: torch.device) -> Examples:
        self.data  # noqa: B018, raises where there are none
        if (part, device) not in self._parts:
            self._parts[part, device] = self.examples(part) if device == CPU else self.part_on(part, CPU).to(device)
        return self._parts[part, device]

    def split_rows(self, split: Split, device: torch.device) -> Tensor:
        n = len(self.part_on("test" if split == "test" else "train", CPU).target)
        return rows_of(split, n, torch.from_numpy(self.data.held_out)).to(device)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value

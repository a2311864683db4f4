"""The index of a first step that records what it is compared with, so that tests can try the numbers at which code branches."""

from typing import Any, Self


class RecordedStart(int):
    """An integer, in `project(x, start)`; `numbers` are those at which a comparison of it may turn out otherwise.

    Sums and differences are recorded too: `start + T > 80` is a comparison of start with 80 - T.
    """

    numbers: set[int]
    offset: int  # to the index of the first step

    def __new__(cls, value: int, numbers: set[int], offset: int = 0) -> Self:
        index = super().__new__(cls, value)
        index.numbers, index.offset = numbers, offset
        return index

    def _record(self, other: Any) -> None:
        if isinstance(other, int | float) and abs(other) < 1 << 31:
            self.numbers.add(round(other) - self.offset)

    def __eq__(self, other: object) -> bool:
        self._record(other)
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        self._record(other)
        return int(self) != other

    def __lt__(self, other: Any) -> bool:
        self._record(other)
        return int(self) < other

    def __le__(self, other: Any) -> bool:
        self._record(other)
        return int(self) <= other

    def __gt__(self, other: Any) -> bool:
        self._record(other)
        return int(self) > other

    def __ge__(self, other: Any) -> bool:
        self._record(other)
        return int(self) >= other

    def __bool__(self) -> bool:
        self._record(0)
        return int(self) != 0

    def __hash__(self) -> int:
        return hash(int(self))

    def __floordiv__(self, other: Any) -> Any:
        self._record(other)
        return int(self) // other

    def __mod__(self, other: Any) -> Any:
        self._record(other)
        return int(self) % other

    def __add__(self, other: Any) -> Any:
        return RecordedStart(int(self) + other, self.numbers, self.offset + other) if type(other) is int else int(self) + other

    def __sub__(self, other: Any) -> Any:
        return RecordedStart(int(self) - other, self.numbers, self.offset - other) if type(other) is int else int(self) - other

    __radd__ = __add__

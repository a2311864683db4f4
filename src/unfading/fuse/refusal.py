"""Why a step is not compiled: a reason, and the line of the user's file that it is about."""

from typing import NamedTuple

from unfading.source_lines import SourceLine


class Refusal(NamedTuple):
    """The answer of the compiler to a cell that it does not take. Its text is the reason with the line."""

    reason: str
    line: SourceLine | None = None

    def __str__(self) -> str:
        return self.reason if self.line is None else f"{self.reason} ({self.line})"


class NotFusable(Exception):
    """Raised where a step cannot be compiled."""

    def __init__(self, reason: str, line: SourceLine | None = None):
        self.refusal = Refusal(reason, line)
        super().__init__(str(self.refusal))

"""Long steps as calls of functions, so that the C compiler's time does not grow with the length of a step.

A step with many inner steps repeats the same loops on other buffers. Each loop becomes a function of the buffers and offsets
that it names, and loops that are equal but for these share one function. What is left of the step is a list of calls.
"""

import re

from unfading.fuse.ir.program import TensorKind

LONG = 1500  # lines of a step from which its loops become functions; below, the compiler takes a second or two
FRAME = ("int m", "int64_t s", "int64_t B", *(f"const int64_t* {name}" for name in ("row", "place", "before", "line")))

_BUFFERS = re.compile(rf"\b(?:s|now|new|held|sum|{'|'.join(TensorKind)})\d+\b")
_OFFSETS = re.compile(r"(?<=\[)\d+(?= \+ |\])")
_LOCALS = re.compile(r"\bv\d+\b")


class Outline:
    """The functions of a step: their C source, each once."""

    def __init__(self, name: str):
        self.name = name
        self.numbers: dict[str, int] = {}  # of each function, by its text
        self.source: list[str] = []

    def call(self, lines: list[str]) -> str:
        """A call of the function that does what these lines do."""
        text = "\n".join(lines)
        buffers: dict[str, str] = {}
        offsets: list[str] = []
        values: dict[str, str] = {}

        def offset(match: re.Match[str]) -> str:
            offsets.append(match[0])
            return f"at{len(offsets) - 1}"

        text = _OFFSETS.sub(offset, text)
        text = _BUFFERS.sub(lambda match: buffers.setdefault(match[0], f"p{len(buffers)}"), text)
        text = _LOCALS.sub(lambda match: values.setdefault(match[0], f"v{len(values)}"), text)
        parameters = [f"{'double' if buffer.startswith('sum') else 'real'}* {name}" for buffer, name in buffers.items()]
        parameters += [f"int at{i}" for i in range(len(offsets))]
        text = f"({', '.join([*FRAME, *parameters])}) {{\n{text}\n}}\n"
        number = self.numbers.setdefault(text, len(self.numbers))
        if number == len(self.source):
            self.source.append(f"static __attribute__((noinline)) void {self.name}_{number}{text}")
        arguments = [*(parameter.split()[-1] for parameter in FRAME), *buffers, *offsets]
        return f"{self.name}_{number}({', '.join(arguments)});"

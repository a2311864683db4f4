"""Constant arrays of C. Arrays with the same content are written once."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZES = {"float": 4, "int8_t": 1, "uint8_t": 1, "int16_t": 2, "int32_t": 4}


class Arrays:
    """The constant arrays of a model, by name."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, bytes], str] = {}
        self.source: list[str] = []
        self.bytes = 0

    @staticmethod
    def _content(entries: NDArray[np.floating | np.integer], kind: str) -> NDArray[np.floating | np.integer]:
        return np.ascontiguousarray(entries).astype(np.float32 if kind == "float" else np.int64)

    def add(self, name: str, entries: NDArray[np.floating | np.integer], kind: str) -> str:
        """The name of an array with these entries, which may have been added under another name."""
        content = self._content(entries, kind)
        key = (kind, content.tobytes())
        if key not in self._names:
            taken = set(self._names.values())
            while name in taken:
                name += "_"
            self._names[key] = name
            self.bytes += SIZES[kind] * content.size
            self.source.append(_array(name, content.reshape(-1), kind))
        return self._names[key]

    def add_matrix(self, name: str, entries: NDArray[np.floating | np.integer], kind: str) -> tuple[str, bool]:
        """The name of an array with the entries of a matrix, and whether it holds its transpose."""
        turned = (kind, self._content(entries.T, kind).tobytes())
        if turned in self._names and (kind, self._content(entries, kind).tobytes()) not in self._names:
            return self._names[turned], True
        return self.add(name, entries, kind), False


def _array(name: str, entries: NDArray[Any], kind: str) -> str:
    texts = [f"{x:.9g}f" if any(c in f"{x:.9g}" for c in ".e") else f"{x:.9g}.0f" for x in entries.tolist()]
    if kind != "float":
        texts = [str(x) for x in entries.tolist()]
    lines, line = [], ""
    for text in texts:
        if len(line) + len(text) + 2 > 118:
            lines.append(line)
            line = ""
        line += f"{text}, " if line else f"  {text}, "
    lines.append(line)
    return f"static const {kind} {name}[{len(texts)}] = {{\n" + "\n".join(each.rstrip() for each in lines) + "\n};\n"

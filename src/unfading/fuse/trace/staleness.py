"""What a compiled step depends on beside its arguments, and whether that has changed since it was compiled."""

from typing import Any

from torch import nn

from unfading.cells.base import Cell
from unfading.fuse.devices import place_of


class Options:
    """Everything that a step may read beside its arguments: the attributes of a cell and of the modules in it.

    Plain attributes are compared by value, and so are the entries of lists, sets and dictionaries. Others, as functions, are
    compared by identity.
    """

    PLAIN = (bool, int, float, str, tuple, frozenset, type(None))
    OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}

    def __init__(self, cell: Cell):
        self.attributes = []
        for module in cell.modules():
            own = [(name, value) for name, value in module.__dict__.items() if name not in self.OF_TORCH]
            plain = [(name, value) for name, value in own if isinstance(value, self.PLAIN)]
            others = [(name, value, _entries(value)) for name, value in own if not isinstance(value, self.PLAIN)]
            # The dictionary itself is held, so that a comparison takes microseconds; a module never replaces its own.
            self.attributes.append((module.__dict__, len(module.__dict__), plain, others))
        self.absent = [(m._parameters, _absent(m._parameters)) for m in cell.modules() if m._parameters]
        self.parts = [(module._modules, tuple(module._modules.values())) for module in cell.modules() if module._modules]
        self.parameter = next(
            ((m._parameters, name) for m in cell.modules() for name, p in m._parameters.items() if p is not None), None
        )
        self.kind = self._kind()

    def _kind(self) -> Any:
        """The precision of the parameters, and where they are."""
        if self.parameter is None:
            return None
        parameter = self.parameter[0].get(self.parameter[1])
        return None if parameter is None else (parameter.dtype, parameter.device.type, place_of(parameter.device))

    def still_holds(self) -> bool:
        """Whether nothing has changed."""
        for now, size, plain, others in self.attributes:
            if len(now) != size:
                return False
            for name, value in plain:
                if now.get(name) != value:
                    return False
            for name, value, entries in others:
                if now.get(name) is not value or not self._same(_entries(value), entries):
                    return False
        same_parts = all(tuple(now.values()) == then for now, then in self.parts)
        same_parameters = all(_absent(now) == then for now, then in self.absent)
        return same_parts and same_parameters and self._kind() == self.kind

    def _same(self, now: list[Any], then: list[Any]) -> bool:
        pairs = zip(now, then, strict=False)
        return len(now) == len(then) and all(a is b or (isinstance(b, self.PLAIN) and a == b) for a, b in pairs)


def _absent(parameters: dict[str, Any]) -> list[str]:
    """The names of parameters that are None."""
    return [name for name, parameter in parameters.items() if parameter is None]


def _entries(value: Any) -> list[Any]:
    """The entries of a container; nothing for other values."""
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    return list(value) if isinstance(value, list | set) else []

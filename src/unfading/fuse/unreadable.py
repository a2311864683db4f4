"""A stand-in for something that a compiled step must not depend on: every use of it is refused."""

from typing import Any, NoReturn

from unfading.fuse.refusal import NotFusable


class Unreadable:
    """Stands in a copy for something that a compiled step must not depend on. Every use of it is refused."""

    def __init__(self, reason: str):
        object.__setattr__(self, "reason", reason)


def _refuse_use(self: Unreadable, *arguments: Any) -> NoReturn:
    raise NotFusable(object.__getattribute__(self, "reason"))


# Python looks most of these up in the class, past __getattribute__.
_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor"
_USES = "lt le gt ge eq ne neg abs bool len iter next getitem setitem contains call float int index enter exit hash str format"
_REVERSED = [f"r{name}" for name in _OPERATORS.split()]
for _name in (*_OPERATORS.split(), *_REVERSED, *_USES.split(), "getattribute", "setattr", "delattr", "array", "torch_function"):
    setattr(Unreadable, f"__{_name}__", _refuse_use)

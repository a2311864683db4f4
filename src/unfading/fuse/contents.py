"""Everything that a step may read beside its arguments: the contents of a cell, and whether they have changed.

The contents are the attributes of a cell at any depth (submodules, objects, containers, small arrays, closures), the
attributes of its classes, and the globals that its functions name. `Contents.unchanged` compares them before each call, in a
few microseconds.

What cannot be compared cheaply is left out: files, locks, large arrays, long lists, the values of tensors. `cell_copy.py`
makes these unreadable while a step is traced, so no plan depends on them.
"""

import copyreg
import dis
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from functools import cached_property, lru_cache, partial
from operator import is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from torch import Tensor, nn

from unfading.cells.base import Cell
from unfading.fuse.unreadable import Unreadable

ENTRIES = 1_000  # of a container, above which it is left out
TOTAL = 10_000  # entries of all containers together
BYTES = 4_096  # of an array, above which it is left out

# Of what torch stores in a module, a call of the module reads the training flag, its tensors, its submodules and its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TENSORS = ("_parameters", "_buffers")
OF_TORCH = frozenset(nn.Module().__dict__) - {"training", "_modules", *HOOKS}

PLAIN = (bool, int, str, bytes, type(None))
MUTABLE = (dict, list, set, deque)
CACHE = type(lru_cache(abs))  # of a function with functools.lru_cache or cache
# Types of what wraps a function, and the attribute that it is in.
WRAPPERS: dict[type, str] = {
    MethodType: "__func__",
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    cached_property: "func",
    CACHE: "__wrapped__",
}
HEAP_TYPE = 1 << 9  # in the flags of a class: it was created by a class statement

# Methods that are called without being named in a step, and special methods that never run in one.
ENTRY_POINTS = frozenset(("step", "project", "shared", "constant", "forward"))
NOT_IN_A_STEP = frozenset(("__init__", "__new__", "__init_subclass__", "__repr__", "__del__"))
# Attributes of a class that Python adds by itself.
OF_PYTHON = frozenset(("__annotations__", "__abstractmethods__", "__doc__", "_abc_impl"))

# Code that does not change while a program runs: classes by their module, functions by their folder.
STANDARD = sys.stdlib_module_names | {"torch", "numpy", "typing_extensions"}
INSTALLED = (os.path.dirname(os.path.dirname(__file__)), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
NAMESPACES = ("SimpleNamespace", "Namespace")  # classes of the standard library that hold the user's attributes


class Part(NamedTuple):
    """A container among the contents of a cell, with its entries at the time of the walk."""

    value: Any
    names: list[Any]  # of the entries
    entries: list[Any]
    copied: bool  # False for what is reached through a class or a global, which all cells share


class Globals:
    """The globals that a function names, or the attributes of a module that it names."""

    def __init__(self, variables: dict[str, Any], names: Iterable[str]):
        self.variables = variables
        self.names = [name for name in names if name in variables]

    def now(self) -> Iterator[Any]:
        return map(self.variables.get, self.names)


# Objects that are not taken apart into attributes.
NO_OBJECTS = (type, Tensor, np.ndarray, FunctionType, ModuleType, partial, Enum, Globals, tuple, frozenset, *MUTABLE, *WRAPPERS)


class Same:
    """Equal to the same object only."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


class Contents:
    """The contents of a cell at one moment.

    Args:
        cell: the cell.
        hidden: attributes to leave out, as pairs of an object's id and the name; the name is None for the whole object.
    """

    def __init__(self, cell: Cell, hidden: frozenset[tuple[int, Any]] = frozenset()):
        self.cell, self.hidden = ref(cell), hidden
        self.parts = Walk(cell, hidden).parts
        self.numbers = {id(part.value): i for i, part in enumerate(self.parts)}
        self.values = [self._values(part) for part in self.parts]
        # For the fast comparison: containers that are empty, how to read the others, what was read, and arrays.
        self.empty = [part.value for part in self.parts if isinstance(part.value, MUTABLE) and not part.value]
        self.reads = [read for part in self.parts for read in self._reads(part)]
        self.entries = [entry for read in self.reads for entry in read()]
        self.arrays = [(array, array.tobytes()) for array, *_ in self.parts if isinstance(array, np.ndarray)]

    def __contains__(self, value: Any) -> bool:
        """Whether a container is compared."""
        return id(value) in self.numbers

    def of(self) -> Cell:
        """The cell."""
        cell = self.cell()
        assert cell is not None  # whoever asks holds it
        return cell

    def unchanged(self) -> bool:
        """Whether the contents are as they were. Entries are compared by identity; where that fails, by value."""
        if not any(self.empty):
            now: list[Any] = []
            for read in self.reads:
                now += read()
            same = len(now) == len(self.entries) and all(map(is_, now, self.entries))
            if same and all(array.tobytes() == bytes_ for array, bytes_ in self.arrays):
                return True
        cell = self.cell()
        fresh = None if cell is None else Contents(cell, self.hidden)
        if fresh is None or fresh.values != self.values:
            return False
        # Other objects of equal value; the next comparison is by identity again.
        if self.parts:
            self.__dict__.update(fresh.__dict__)
        else:
            self.__dict__.update(fresh.for_comparison().__dict__)
        return True

    def for_comparison(self) -> "Contents":
        """The contents without the parts themselves, which would hold the cell for ever if a weak dictionary stores them."""
        self.parts, self.numbers = [], {}
        return self

    def written(self) -> list[tuple[Part, Any]]:
        """The parts that have changed, each with the name of the attribute; None for an entry of another container."""
        written = []
        for part in self.parts:
            names, entries = entries_of(part.value) or ([], [])
            before, now = dict(zip(part.names, part.entries, strict=True)), dict(zip(names, entries, strict=True))
            for name in [*before, *(name for name in now if name not in before)]:
                different = name not in before or name not in now or self._token(before[name]) != self._token(now[name])
                if different and name not in OF_PYTHON and (key_of(part.value), name) not in self.hidden:
                    written.append((part, name if has_names(part.value) else None))
        return written

    def settled(self) -> "Contents":
        """The same without the globals, closures and class attributes that have changed since.

        After the methods of a cell have run on copies of it, these are what the methods themselves change at every call.
        """
        if self.unchanged():
            return self
        shared = {(key_of(part.value), name) for part, name in self.written() if not part.copied}
        return Contents(self.of(), self.hidden | shared) if shared else self

    def _values(self, part: Part) -> Any:
        """What is compared of a part that is another object now."""
        if isinstance(part.value, np.ndarray):
            return part.value.dtype, part.value.shape, part.value.tobytes()
        tokens = [self._token(entry) for entry in part.entries]
        if isinstance(part.value, FunctionType):  # another function is another one, also where it holds the same
            return part.value.__code__, tokens
        if isinstance(part.value, set | frozenset):
            return type(part.value), sorted(tokens, key=repr)
        own = Same(part.value) if isinstance(part.value, type) else None
        named = [(name, token) for name, token in zip(part.names, tokens, strict=True) if name not in OF_PYTHON]
        return type(part.value), own, named

    def _token(self, entry: Any) -> Any:
        """Equal for two entries that a trace cannot tell apart."""
        number = self.numbers.get(id(entry))
        if number is not None:
            return "part", number
        if type(entry) is Unreadable:
            return Same(entry)
        if isinstance(entry, Tensor):
            return "tensor", tuple(entry.shape), entry.dtype, entry.device
        if isinstance(entry, float | complex | np.generic):
            return type(entry), repr(entry)  # -0.0 is not 0.0, and NaN is NaN
        return (type(entry), entry) if isinstance(entry, PLAIN) else Same(entry)

    def _reads(self, part: Part) -> list[Callable[[], Iterable[Any]]]:
        """How to read the entries of a part quickly; none where they cannot change."""
        value = part.value
        if isinstance(value, Globals):
            return [value.now]
        if any(owner == key_of(value) for owner, _ in self.hidden):
            return [partial(_shown, value, self.hidden)]
        if isinstance(value, type):
            return [vars(value).values]
        if isinstance(value, MUTABLE) and value:
            return [value.__iter__, partial(dict.values, value)] if isinstance(value, dict) else [value.__iter__]
        if not has_attributes(value):
            return [partial(_closure, value)] if isinstance(value, FunctionType) and value.__closure__ else []
        if slots_of(type(value)):
            return [partial(_shown, value, self.hidden)]
        tensors = [vars(value)[kind] for kind in TENSORS] if isinstance(value, nn.Module) else []
        return [vars(value).values, *(partial(map, type, each.values()) for each in tensors if each)]


class Walk:
    """Collects the parts of a cell: what it holds, nearest first, then the classes and the functions that a step may enter."""

    def __init__(self, cell: Cell, hidden: Collection[tuple[int, Any]]):
        self.hidden = hidden
        self.parts: list[Part] = []
        self.left = TOTAL
        self.visited: dict[int, Any] = {}  # by id; the value is held, so that no other gets its id
        self.names = set(ENTRY_POINTS)  # of attributes that code uses
        self.entered: set[tuple[int, str]] = set()  # attributes of classes
        # Packages whose functions may change, although they are installed.
        self.packages = {package_of(cls) for cls in type(cell).__mro__} - STANDARD - {"unfading"}
        self.queue: deque[tuple[Any, bool]] = deque([(cell, True)])
        while self.queue:
            self.visit(*self.queue.popleft())
            if not self.queue:
                self.enter_classes()

    def visit(self, value: Any, copied: bool) -> None:
        if type(value) is Unreadable:
            return
        key = key_of(value)
        if id(value) in self.visited or (key, None) in self.hidden:
            return
        self.visited[id(value)] = value
        inside = self.function(value) if isinstance(value, FunctionType) else entries_of(value)
        if inside is None or len(inside[0]) > min(ENTRIES, self.left):
            return
        shown = [(name, entry) for name, entry in zip(*inside, strict=True) if (key, name) not in self.hidden]
        part = Part(value, [name for name, _ in shown], [entry for _, entry in shown], copied)
        if isinstance(value, Globals):
            value.names = part.names
        self.left -= len(part.names)
        self.parts.append(part)
        if not isinstance(value, type):  # the attributes of a class are followed where code uses them
            self.queue.extend((entry, copied) for entry in part.entries)
            if has_attributes(value) or isinstance(value, MUTABLE):
                self.queue.extend((cls, False) for cls in type(value).__mro__)

    def enter_classes(self) -> None:
        """Go on with the attributes of classes that code uses."""
        for value, names, entries, _ in self.parts:
            if isinstance(value, type):
                for name, entry in zip(names, entries, strict=True):
                    special = name.startswith("__") and isinstance(entry, FunctionType) and name not in NOT_IN_A_STEP
                    if (name in self.names or special) and (id(value), name) not in self.entered:
                        self.entered.add((id(value), name))
                        self.queue.append((entry, False))

    def function(self, function: FunctionType) -> tuple[list[Any], list[Any]] | None:
        """The contents of a function. What it names is followed."""
        if function.__code__.co_filename.startswith(INSTALLED) and package_of(function) not in self.packages:
            return None
        variables, attributes = names_in(function.__code__)
        self.names |= attributes
        known = Globals(function.__globals__, variables)
        modules = [value for value in known.now() if isinstance(value, ModuleType) and package_of(value) not in STANDARD]
        named = [known, *(Globals(vars(module), sorted(attributes)) for module in modules)]
        self.queue.extend((value, False) for value in (*named, function.__defaults__, function.__kwdefaults__))
        return entries_of(function)


# -- one value ----------------------------------------------------------------------------------------------------------------


def entries_of(value: Any) -> tuple[list[Any], list[Any]] | None:
    """Names and entries of a container; None for anything else."""
    if isinstance(value, np.ndarray):
        return ([], []) if value.nbytes <= BYTES and not value.dtype.hasobject else None
    if isinstance(value, type):
        return None if is_standard(value) else (list(vars(value)), list(vars(value).values()))
    if isinstance(value, Globals):
        return value.names, list(value.now())
    if type(value) in WRAPPERS:
        return ["function", "object"], [getattr(value, WRAPPERS[type(value)]), getattr(value, "__self__", None)]
    if isinstance(value, partial):
        return ["function", "arguments", "keywords"], [value.func, value.args, value.keywords]
    if isinstance(value, FunctionType):
        return list(value.__code__.co_freevars), _closure(value)
    if has_attributes(value):
        attributes = _attributes(value)
        return list(attributes), list(attributes.values())
    if isinstance(value, dict):
        return list(value), list(value.values())
    if isinstance(value, tuple | frozenset | list | set | deque):
        return list(range(len(value))), list(value)
    return None


def has_attributes(value: Any) -> bool:
    """Whether a value is a module, or another object of a user's class with attributes of its own."""
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, NO_OBJECTS) or not (type(value).__name__ in NAMESPACES or not is_standard(type(value))):
        return False
    return hasattr(value, "__dict__") or bool(slots_of(type(value)))


def has_names(value: Any) -> bool:
    """Whether the entries of a container are attributes or variables, so that one can be left out by its name."""
    return isinstance(value, type | Globals | FunctionType) or has_attributes(value)


def key_of(value: Any) -> int:
    """The id under which a container is hidden. `Globals` stand for a dictionary that exists longer than they do."""
    return id(value.variables) if isinstance(value, Globals) else id(value)


def is_standard(cls: type) -> bool:
    """Whether a class belongs to Python, torch or NumPy. Code without a module, as in exec, says that it is in builtins."""
    return package_of(cls) in STANDARD and not (cls.__module__ == "builtins" and cls.__flags__ & HEAP_TYPE)


def package_of(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


@lru_cache(maxsize=1024)
def names_in(code: CodeType) -> tuple[list[str], frozenset[str]]:
    """The globals and the attributes that code names, with the functions inside it."""
    variables, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            attributes.add(instruction.argval)
        elif isinstance(instruction.argval, CodeType):
            inner = names_in(instruction.argval)
            variables.update(inner[0])
            attributes.update(inner[1])
    return sorted(variables), frozenset(attributes)


def slots_of(cls: type) -> list[str]:
    return [name for name in copyreg._slotnames(cls) if name not in ("__dict__", "__weakref__")]  # type: ignore[attr-defined]


def _attributes(value: Any) -> dict[Any, Any]:
    """The attributes of an object. A tensor of a module counts by its type only."""
    attributes: dict[Any, Any] = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    attributes.update((name, entry) for name, entry in list(getattr(value, "__dict__", {}).items()))
    if isinstance(value, nn.Module):
        attributes = {name: entry for name, entry in attributes.items() if name not in OF_TORCH}
        for kind in TENSORS:
            attributes.update(((kind, name), type(tensor)) for name, tensor in list(vars(value)[kind].items()))
    return attributes


def _shown(value: Any, hidden: Collection[tuple[int, Any]]) -> list[Any]:
    names, entries = entries_of(value) or ([], [])
    return [entry for name, entry in zip(names, entries, strict=True) if (id(value), name) not in hidden]


def _closure(function: FunctionType) -> list[Any]:
    """What a function has from the functions around it; None for a variable that is not assigned yet."""
    return [getattr(cell, "cell_contents", None) for cell in function.__closure__ or ()]

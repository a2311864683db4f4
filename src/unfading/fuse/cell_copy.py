"""Copies of a cell, on which the compiler tries its methods. Nothing that is done to a copy reaches the cell.

Tensors are replaced by stand-ins. Modules, objects and containers are copied. What can neither be copied nor compared at every
call is `Unreadable` in a copy: a step that reads it is refused. Functions, classes and modules are shared; a function is
copied where its closure holds something that is copied.
"""

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from itertools import count
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from unfading.cells.base import Cell
from unfading.fuse.contents import (
    HOOKS,
    MUTABLE,
    OF_TORCH,
    TENSORS,
    Contents,
    has_attributes,
    is_standard,
    package_of,
    slots_of,
)
from unfading.fuse.isolation import numbers
from unfading.fuse.refusal import NotFusable
from unfading.fuse.unreadable import Unreadable
from unfading.source_lines import definition_line

# Values that never change, and modules of the standard library all of whose objects are of this kind.
ATOMS = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice, np.generic, np.dtype, np.ufunc, Enum)
CODE = (type, FunctionType, BuiltinFunctionType, ModuleType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)
VALUE_MODULES = frozenset(("torch", "fractions", "decimal", "datetime", "pathlib", "re", "uuid", "operator"))
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
PERIOD = 10_007  # of the numbers by which a large tensor is varied: a prime, so that the rows of a matrix differ


class CellCopy:
    """A copy of a cell: of its contents at one moment.

    Args:
        contents: the contents of the cell.
        stand_in: returns the tensor that replaces a tensor of the cell.
        example: make everything readable that can be copied, also where it could not be compared at every call.
    """

    def __init__(self, contents: Contents, stand_in: Callable[[Tensor], Tensor], *, example: bool = False):
        self.contents, self.stand_in, self.example = contents, stand_in, example
        self.twins: dict[int, tuple[Any, Any]] = {}  # original and copy, by the id of the original
        original = contents.cell()
        with _disable_current_modes():
            self.cell: Cell = self._twin(original)
        self.before = Contents(self.cell)

    def written(self) -> list[tuple[int, Any]]:
        """What a method of the copy has written, as `Contents` takes what is hidden. Raises NotFusable for a global."""
        originals = {id(twin): key for key, (_, twin) in self.twins.items()}
        written = []
        for part, name in [] if self.before.unchanged() else self.before.written():
            if not part.copied or id(part.value) not in originals:
                raise NotFusable("a method of the cell changes a global, a closure or its class; a compiled loop would not")
            written.append((originals[id(part.value)], name))
        return written

    def refuse_writes(self, method: str) -> None:
        """Raise NotFusable if a method of the copy has written an attribute: a compiled loop would not."""
        names = [name for _, name in self.written()]
        if names:
            attribute = f"the attribute {names[0]}" if isinstance(names[0], str) else "a container of the cell"
            raise NotFusable(
                f"{method} writes {attribute}, which a compiled loop would not do", definition_line(getattr(self.cell, method))
            )

    def _twin(self, value: Any) -> Any:
        if isinstance(value, ATOMS):
            return value
        if id(value) not in self.twins:
            self.twins[id(value)] = (value, None)
            self._store(value, self._leaf(value) if value not in self.contents else self._container(value))
        return self.twins[id(value)][1]

    def _store(self, value: Any, twin: Any) -> Any:
        self.twins[id(value)] = (value, twin)
        return twin

    def _container(self, value: Any) -> Any:
        """The copy of something that contains other things."""
        if has_attributes(value):
            return self._with_attributes(value)
        if isinstance(value, MUTABLE):
            return self._mutable(value)
        if isinstance(value, np.ndarray):
            return _read_only(value)
        if isinstance(value, tuple):
            entries = [self._twin(entry) for entry in value]
            unchanged = all(a is b for a, b in zip(entries, value, strict=True))
            return value if unchanged else tuple.__new__(type(value), entries)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._twin(value.__self__))
        if isinstance(value, partial):
            keywords = {name: self._twin(entry) for name, entry in value.keywords.items()}
            return partial(self._twin(value.func), *map(self._twin, value.args), **keywords)
        if isinstance(value, FunctionType) and value.__closure__:
            return self._function(value, value.__closure__)
        return value

    def _with_attributes(self, value: Any) -> Any:
        kind = type(value)
        try:
            twin = object.__new__(kind)
        except TypeError:  # a class that is written in C, such as SimpleNamespace
            twin = kind.__new__(kind)  # type: ignore[call-overload]
        self._store(value, twin)
        for name in slots_of(kind):
            if hasattr(value, name):
                object.__setattr__(twin, name, self._twin(getattr(value, name)))
        attributes = getattr(twin, "__dict__", {})
        for name, entry in list(getattr(value, "__dict__", {}).items()):
            if isinstance(value, nn.Module) and name in TENSORS:
                attributes[name] = {key: None if tensor is None else self._twin(tensor) for key, tensor in entry.items()}
            else:
                attributes[name] = entry if isinstance(value, nn.Module) and name in OF_TORCH else self._twin(entry)
        for owner, name in self.contents.hidden:
            if owner == id(value) and isinstance(name, str):
                attributes[name] = Unreadable(f"the step reads {name}, which project, weights or initial_state writes")
        if isinstance(value, nn.Module):
            _guard_hooks(value, twin)
        return twin

    def _mutable(self, value: Any) -> Any:
        twin = self._store(value, copy.copy(value))
        if isinstance(value, dict):
            for name, entry in list(value.items()):
                dict.__setitem__(twin, name, self._twin(entry))
        elif isinstance(value, set):
            entries = [self._twin(entry) for entry in value]
            twin.clear()
            twin.update(entries)
        else:
            for i, entry in enumerate(list(value)):
                twin[i] = self._twin(entry)
        return twin

    def _function(self, value: FunctionType, closure: tuple[CellType, ...]) -> Any:
        cells = tuple(CellType() for _ in closure)
        twin = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        twin.__kwdefaults__ = value.__kwdefaults__
        twin.__dict__.update(value.__dict__)
        self._store(value, twin)
        for new, old in zip(cells, closure, strict=True):
            try:
                contents = old.cell_contents
            except ValueError:  # a variable that is not assigned yet
                continue
            new.cell_contents = self._twin(contents)
        return twin

    def _leaf(self, value: Any) -> Any:
        """The copy of something that contains nothing, or nothing that is compared."""
        if isinstance(value, Tensor):
            return self.stand_in(value)
        if isinstance(value, GENERATORS) and self.example:
            return value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)
        if isinstance(value, np.ndarray) and self.example:
            return _read_only(value)
        kind = type(value)
        if isinstance(value, CODE) or (package_of(kind) in VALUE_MODULES and not isinstance(value, torch.Generator)):
            return value
        if kind is object or not (is_standard(kind) or has_attributes(value)):
            return value  # without any state
        return Unreadable(f"the step reads a {kind.__name__}, which a compiled loop could not follow when it changes")


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory; writing into it is an error."""
    view = array.view()
    view.flags.writeable = False
    return view


def _guard_hooks(module: nn.Module, twin: nn.Module) -> None:
    """Refuse calls of a module with hooks of the user. Hooks of torch, as in weight_norm, belong to the arithmetic."""
    hooks = [
        hook
        for kind in HOOKS
        for hook in vars(module)[kind].values()
        if package_of(hook) != "torch" and package_of(type(hook)) != "torch"
    ]
    if not hooks:
        return
    for kind in HOOKS:
        vars(twin)[kind] = OrderedDict()

    def refuse(called: nn.Module, arguments: Any) -> NoReturn:
        reason = f"a hook is registered on the {type(module).__name__} of the cell, and a compiled loop would not call it"
        raise NotFusable(reason, definition_line(hooks[0]))

    twin.register_forward_pre_hook(refuse)


# -- stand-ins for tensors ----------------------------------------------------------------------------------------------------


def without_data(tensors: Mapping[int, Tensor]) -> Callable[[Tensor], Tensor]:
    """Stand-ins for tracing: these tensors, by the id of what they replace; else a tensor of the same shape without data."""

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) in tensors:
            return tensors[id(tensor)]
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")

    return stand_in


def with_data(tensor: Tensor) -> Tensor:
    """A stand-in for the example: a copy. Inside a transform or an export, where there are no values, it has others."""
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) or is_traceable_wrapper_subclass(tensor)
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)
    if plain and not wrapped:
        twin = tensor.detach().clone()
    elif not tensor.dtype.is_floating_point:
        twin = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)
    else:
        entries = torch.arange(1, tensor.numel() + 1, device=tensor.device).sin()
        twin = entries.reshape(tuple(tensor.shape)).to(tensor.dtype)
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def varied(dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """Stand-ins for tests: copies with other numbers, since training will change them.

    A weight that is 0 or 1, or two that are equal, may hide a branch until then. Numbers change by up to a twentieth, so that
    products keep their size. What is positive stays so, and zeros become positive: a method may take roots and logarithms.

    Args:
        dtype: of real numbers; None for that of each tensor.
    """
    tensors = count()

    def stand_in(tensor: Tensor) -> Tensor:
        twin = with_data(tensor)
        if twin.is_floating_point():
            data = twin.data if dtype is None else twin.data.to(dtype)
            some = numbers(torch.zeros(1), next(tensors), min(data.numel(), PERIOD)).flatten().to(data)
            share = some.repeat(data.numel() // PERIOD + 1)[: data.numel()].reshape(data.shape)
            summed = data[0].numel() if data.dim() > 1 and len(data) else 1  # by a product with a matrix
            twin.data = torch.where(data == 0, (0.5 + share) / summed, data * (0.95 + 0.1 * share))
        return twin

    return stand_in

"""States inside torch.export: named while a model is traced, plain tuples in the file.

A file that held the cell's NamedTuple could be loaded only where that class is defined and registered with torch. Inside
torch.export a layer therefore returns an instance of a subclass that torch does not take for a NamedTuple, and that is
registered as a container which a file names "builtins.tuple". The model that is exported can still read `state.h`; whoever
loads the file gets `(h,)`, without the class and without this library.
"""

from typing import Any

from torch.utils import _pytree

_TUPLE = _pytree.SUPPORTED_SERIALIZED_TYPES[tuple].serialized_type_name
_classes: dict[type[Any], type[Any]] = {}


def exported_class(state: type[Any]) -> type[Any]:
    """The subclass of a NamedTuple that torch.export saves as a plain tuple."""
    if state not in _classes:
        _classes[state] = _registered(state)
    return _classes[state]


def _registered(state: type[Any]) -> type[Any]:
    # Without `_make` it is no NamedTuple to torch, whatever it inherits.
    plain = type(state.__name__, (state,), {"_make": None, "_replace": _replace, "__module__": state.__module__})
    _pytree.register_pytree_node(
        plain,
        lambda parts: (list(parts), None),
        lambda parts, _: plain(*parts),
        serialized_type_name=_TUPLE,
        flatten_with_keys_fn=lambda parts: ([(_pytree.SequenceKey(i), part) for i, part in enumerate(parts)], None),
    )
    # The registration also maps the name to the class; files with plain tuples are to be read as before.
    _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[_TUPLE] = tuple
    return plain


def _replace(self: Any, **changes: Any) -> Any:
    return type(self)(**{**dict(zip(self._fields, self, strict=True)), **changes})

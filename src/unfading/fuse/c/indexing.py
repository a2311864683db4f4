"""Entries of values in C: an index per axis, the place in a buffer, and the way through views to the buffer."""

from unfading.fuse.ir.program import VIEWS, Op, Shape, Value


def indices(shape: Shape) -> list[str]:
    """The loop variables of the axes."""
    return [f"i{axis}" for axis in range(len(shape))]


def plus(start: int, index: str) -> str:
    """start + index."""
    return index if start == 0 else f"{start} + {index}" if index != "0" else str(start)


def flatten_index(shape: Shape, index: list[str]) -> str:
    """The place of an entry in a buffer in the order of rows."""
    terms, stride = [], 1
    for size, at in zip(reversed(shape), reversed(index), strict=True):
        if at != "0" and size != 1:
            terms.append(f"({at})" if stride == 1 and " " in at else at if stride == 1 else f"{stride} * ({at})")
        stride *= size
    return " + ".join(reversed(terms)) or "0"


def entry_of(value: Value, index: list[str]) -> tuple[Value, str]:
    """The value behind all views, and the place in its buffer of the entry with this index."""
    while value.op in VIEWS:
        inner = value.args[0]
        if value.op is Op.EXPAND:
            own = index[len(value.shape) - len(inner.shape) :]
            index = ["0" if size == 1 else at for size, at in zip(inner.shape, own, strict=True)]
        elif value.op is Op.PERMUTE:
            turned = dict(zip(value.axes, index, strict=True))
            index = [turned[axis] for axis in range(len(index))]
        elif value.op is Op.SLICE:
            axis, start, _ = value.slice
            index = [plus(start, at) if k == axis else at for k, at in enumerate(index)]
        else:
            flat = flatten_index(value.shape, index)
            while inner.op is Op.RESHAPE:
                inner = inner.args[0]
            if inner.op not in VIEWS:  # stored in this order: no division, which keeps the compiler from whole vectors
                return inner, flat
            index = _unflatten(inner.shape, flat)
        value = inner
    return value, flatten_index(value.shape, index)


def _unflatten(shape: Shape, flat: str) -> list[str]:
    if len(shape) == 1:
        return [flat]
    out, stride = [], 1
    for size in reversed(shape):
        out.append("0" if size == 1 else f"({flat}) / {stride} % {size}" if stride > 1 else f"({flat}) % {size}")
        stride *= size
    return out[::-1]

"""What the autograd graph of a traced step tells: gradients of the user's own, and what was made from what."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from unfading.fuse.ir.program import NotFusable
from unfading.source_lines import defined


def refuse_own_gradients(outputs: Sequence[Any]) -> None:
    """A torch.autograd.Function of the user's has a gradient of its own, which the program would not have."""
    for node in _nodes([output for output in outputs if isinstance(output, Tensor)]):
        if isinstance(node, BackwardCFunction):
            own = getattr(type(node), "_forward_cls", type(node))
            raise NotFusable(f"the step uses an autograd.Function with a gradient of its own, {own.__name__}{defined(own)}")


def made_from(tensor: Tensor, x: Tensor) -> bool:
    """Whether a gradient of the tensor would reach x."""
    return any(getattr(node, "variable", None) is x for node in _nodes([tensor]))


def _nodes(tensors: Sequence[Tensor]) -> Iterator[Any]:
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(before for before, _ in node.next_functions if before is not None)

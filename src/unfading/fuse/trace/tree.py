"""Nested tuples of tensors as flat lists, and back: the results of `project` and `weights`, as a program numbers them.

Every call of a fused layer flattens two such trees and compares their structure with the compiled one. This takes 2 to 3
microseconds here and 12 to 24 with torch's `_pytree`, for the same leaves in the same order; a short call takes about 100.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree

from unfading.cells.convolution import Convolution
from unfading.cells.matrix import BlockDiagonal, LowRank
from unfading.fuse.refusal import NotFusable

Structure = Any  # nested tuples of types


def flatten(tree: Any, leaves: list[Tensor]) -> Structure:
    """Append the tensors of nested tuples to `leaves`; return the types around them."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return None
    if isinstance(tree, tuple):
        return (type(tree), *[flatten(part, leaves) for part in tree])
    if isinstance(tree, LowRank):
        leaves += (tree.left, tree.right)
        return (LowRank, tree.identity)
    if isinstance(tree, BlockDiagonal):
        leaves.append(tree.blocks)
        return (BlockDiagonal, tree.heads)
    if isinstance(tree, Convolution):
        leaves.append(tree.weight)
        return (Convolution, tree.dilation, tree.groups)
    raise NotFusable(
        "project and weights must return tensors, LowRank and BlockDiagonal matrices, Convolutions, and tuples of them; got "
        f"{type(tree).__name__}"
    )


def unflatten(structure: Structure, leaves: list[Tensor]) -> Any:
    """The tree of this structure; its tensors are taken from the front of `leaves`."""
    if structure is None:
        return leaves.pop(0)
    kind, *parts = structure
    if kind is LowRank:
        return LowRank(leaves.pop(0), leaves.pop(0), *parts)
    if kind is BlockDiagonal:
        return BlockDiagonal(leaves.pop(0), *parts)
    if kind is Convolution:
        return Convolution(leaves.pop(0), *parts)
    members = [unflatten(part, leaves) for part in parts]
    return kind(*members) if hasattr(kind, "_fields") else tuple(members)


def as_matrix(weight: Tensor) -> Tensor:
    """A weight of more than two axes, a stack of matrices, as one matrix that has all their rows."""
    return weight.flatten(0, -2) if weight.dim() > 2 else weight


def with_dense(weights: Any, dense: Sequence[bool]) -> Any:
    """The weights with those LowRank matrices multiplied out for which one product is cheaper than two."""
    if not any(dense):
        return weights
    choices = iter(dense)
    return _pytree.tree_map(
        lambda node: node.dense() if is_low_rank(node) and next(choices) else node, weights, is_leaf=is_low_rank
    )


def is_low_rank(node: Any) -> bool:
    return isinstance(node, LowRank)


def weight_names(tree: Any, name: str = "") -> list[str]:
    """The names that the cell has for the tensors of its weights, in the order of `flatten`."""
    if isinstance(tree, LowRank):
        return [f"{name}_left", f"{name}_right"]
    if isinstance(tree, Tensor | BlockDiagonal | Convolution):
        return [name]
    fields = getattr(tree, "_fields", [f"weight{i}" for i in range(len(tree))])
    return [
        leaf for field, part in zip(fields, tree, strict=True) for leaf in weight_names(part, f"{name}_{field}".lstrip("_"))
    ]

"""The matrices of a step: low-rank and masked forms beside dense tensors, and `linear`, the product with any of them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree


@dataclass(frozen=True)
class LowRank:
    """The matrix identity * I + left @ right, stored as its factors.

    Args:
        left: [n, r].
        right: [r, m], with m = n unless identity is 0.
        identity: the multiple of the identity matrix; 0 for a plain product.
    """

    left: Tensor
    right: Tensor
    identity: float = 1.0

    def dense(self) -> Tensor:
        """The matrix as one tensor, [n, m]."""
        if self.identity == 0.0:
            return self.left @ self.right
        eye = torch.eye(self.right.shape[-1], dtype=self.right.dtype, device=self.right.device)
        return torch.addmm(eye, self.left, self.right, beta=self.identity)


# A pytree node whose leaves are the two factors, so that torch.func, compile and export see only tensors.
_pytree.register_pytree_node(
    LowRank,
    lambda matrix: ([matrix.left, matrix.right], matrix.identity),
    lambda factors, identity: LowRank(*factors, identity),  # type: ignore[call-arg]
    serialized_type_name="unfading.LowRank",
)


@dataclass(frozen=True)
class Masked:
    """The matrix W diag(mask), with a separate mask for each row of the batch: used by recurrent dropout.

    Args:
        matrix: W, [n, m].
        mask: [B, m].
    """

    matrix: "Tensor | LowRank | Masked"
    mask: Tensor

    def __getitem__(self, rows: slice) -> "Masked":
        if isinstance(self.matrix, LowRank):
            raise TypeError("rows of a LowRank matrix cannot be selected; store each matrix of a step in its own field.")
        return Masked(self.matrix[rows], self.mask)


def linear(v: Tensor, W: Tensor | LowRank | Masked) -> Tensor:
    """v W^T over the last axis: one product, or two thin ones for a LowRank matrix."""
    if not isinstance(v, Tensor):
        raise TypeError(f"linear takes a Tensor v; got {type(v).__name__}.")
    if isinstance(W, Masked):
        return linear(v * W.mask, W.matrix)
    if isinstance(W, Tensor):
        if W.dim() != 2 or v.dim() == 0 or v.shape[-1] != W.shape[1]:
            raise ValueError(f"linear takes v [..., m] and W [n, m]; got v {list(v.shape)} and W {list(W.shape)}.")
        if v.dtype != W.dtype and not torch.is_autocast_enabled(v.device.type):
            raise TypeError(f"linear takes v and W of one dtype; got {v.dtype} and {W.dtype}.")
        return functional.linear(v, W)
    if not isinstance(W, LowRank):
        raise TypeError(f"linear takes a matrix W, a Tensor or a LowRank; got {type(W).__name__}.")
    product = linear(linear(v, W.right), W.left)
    return product if W.identity == 0.0 else W.identity * v + product


class Matrix(nn.Module):
    """A learned matrix identity * I + N, with N dense or, given a rank, a product of two factors. Its cell initialises it."""

    def __init__(self, rows: int, columns: int, *, rank: int | None = None, identity: float = 0.0):
        super().__init__()
        self.identity = identity
        shapes = [(rows, columns)] if rank is None else [(rows, rank), (rank, columns)]
        self.factors = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)

    def forward(self) -> Tensor | LowRank:
        if len(self.factors) == 2:
            return LowRank(self.factors[0], self.factors[1], self.identity)
        N: Tensor = self.factors[0]
        if self.identity == 0.0:
            return N
        return self.identity * torch.eye(N.shape[0], dtype=N.dtype, device=N.device) + N

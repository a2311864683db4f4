"""The matrices of a step: low-rank, block-diagonal and masked forms beside dense tensors, and `linear`, their product."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree

from unfading.errors import check_count, check_heads, check_type

if TYPE_CHECKING:
    from unfading.cells.convolution import Convolution


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

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)"""
        return self.left.shape[0], self.right.shape[1]

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
class BlockDiagonal:
    """Square block-diagonal matrices of m rows, stacked along the rows, stored without the zeros.

    The m entries of a vector are cut into `heads` groups of D = m / heads entries. Row i of each matrix reads only the group
    that entry i belongs to, and its weights on that group are one row of `blocks`.

    Args:
        blocks: [n, D], with n a multiple of m: matrix by matrix, in each of them block by block.
        heads: number of blocks on a diagonal.
    """

    blocks: Tensor
    heads: int

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)"""
        return self.blocks.shape[0], self.heads * self.blocks.shape[1]

    def dense(self) -> Tensor:
        """The matrix as one tensor, [n, m]."""
        D = self.blocks.shape[1]
        return torch.cat([torch.block_diag(*blocks.split(D)) for blocks in self.blocks.split(self.heads * D)])


# The only leaf is the tensor of blocks.
_pytree.register_pytree_node(
    BlockDiagonal,
    lambda matrix: ([matrix.blocks], matrix.heads),
    lambda blocks, heads: BlockDiagonal(*blocks, heads),  # type: ignore[call-arg]
    serialized_type_name="unfading.BlockDiagonal",
)


@dataclass(frozen=True)
class Masked:
    """The matrix W diag(mask), with a separate mask for each row of the batch: used by recurrent dropout.

    Args:
        matrix: W, [n, m], or a convolution of m channels.
        mask: [B, m], or [B, m, 1, 1] for a convolution.
    """

    matrix: "Tensor | LowRank | BlockDiagonal | Convolution | Masked"
    mask: Tensor

    def __getitem__(self, rows: slice) -> "Masked":
        if not isinstance(self.matrix, Tensor | Masked):
            name = type(self.matrix).__name__
            raise TypeError(f"rows of a {name} matrix cannot be selected; store each matrix of a step in its own field.")
        return Masked(self.matrix[rows], self.mask)


def linear(v: Tensor, W: Tensor | LowRank | BlockDiagonal | Masked) -> Tensor:
    """v W^T over the last axis: one product, two thin ones for a LowRank matrix, one per block for a BlockDiagonal one."""
    if not isinstance(v, Tensor):
        raise TypeError(f"linear takes a Tensor v; got {type(v).__name__}.")
    if isinstance(W, Masked):
        return linear(v * W.mask, W.matrix)  # type: ignore[arg-type]  # a convolution is refused below
    if isinstance(W, Tensor):
        if W.dim() != 2 or v.dim() == 0 or v.shape[-1] != W.shape[1]:
            raise _mismatch(v, W)
        if v.dtype != W.dtype and not torch.is_autocast_enabled(v.device.type):
            raise TypeError(f"linear takes v and W of one dtype; got {v.dtype} and {W.dtype}.")
        return functional.linear(v, W)
    if isinstance(W, BlockDiagonal):
        _check_blocks(v, W)
        D = W.blocks.shape[1]
        groups = v.split(D, dim=-1)
        return torch.cat([linear(groups[i % W.heads], block) for i, block in enumerate(W.blocks.split(D))], dim=-1)
    if not isinstance(W, LowRank):
        raise TypeError(f"linear takes a matrix W, a Tensor, a LowRank or a BlockDiagonal; got {type(W).__name__}.")
    product = linear(linear(v, W.right), W.left)
    return product if W.identity == 0.0 else W.identity * v + product


def _check_blocks(v: Tensor, W: BlockDiagonal) -> None:
    check_type("blocks", W.blocks, Tensor)
    check_count("heads", W.heads)
    if W.blocks.dim() != 2 or W.blocks.numel() == 0 or W.shape[0] % W.shape[1]:
        raise ValueError(
            f"a BlockDiagonal of {W.heads} heads takes blocks [n, D], with n a multiple of {W.heads} D; got "
            f"{list(W.blocks.shape)}."
        )
    if v.dim() == 0 or v.shape[-1] != W.shape[1]:
        raise _mismatch(v, W)


def _mismatch(v: Tensor, W: Tensor | BlockDiagonal) -> ValueError:
    return ValueError(f"linear takes v [..., m] and W [n, m]; got v {list(v.shape)} and W {list(W.shape)}.")


def recurrent_parameter(gates: int, hidden_size: int, heads: int) -> nn.Parameter:
    """The recurrent matrices of all gates, stacked: [gates H, H]; with heads, their diagonal blocks, [gates H, H / heads].

    The cell initialises it; its `weights` pass it to `block_diagonal`.
    """
    check_heads(heads, hidden_size)
    return nn.Parameter(torch.empty(gates * hidden_size, hidden_size // heads))


def block_diagonal(W: Tensor, hidden_size: int) -> Tensor | BlockDiagonal:
    """The matrices of a `recurrent_parameter` as a step reads them: a plain tensor for one head."""
    heads = hidden_size // W.shape[1]
    return W if heads == 1 else BlockDiagonal(W, heads)


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

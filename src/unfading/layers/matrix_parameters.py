"""Which parameters of a model are matrices: those whose entries are the entries of a matrix that multiplies vectors.

Names and shapes do not decide it: a bias may have two axes, with a row for each gate, and a skew-symmetric matrix is stored as
the list of its entries above the diagonal. So a copy of the model with random parameters runs twice on noise, and the operands
of its products are compared. One that is the same for both inputs, while the other operand differs, is a matrix. A parameter
is a matrix if most of its entries, up to their sign, are entries of such an operand. That leaves out what a matrix is only
computed from, such as the angles of a rotation.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unfading.layers.model import Model

aten = torch.ops.aten
# Products, each with the position of its first operand; the second follows it.
PRODUCTS: dict[Any, int] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot, aten.convolution), 0),
    **dict.fromkeys((aten.addmm, aten.baddbmm, aten.addbmm, aten.addmv), 1),
}
# The share of a parameter's entries above which it is a matrix. An identity matrix that is added to it changes its diagonal.
MOST = 0.4
STEPS, ROWS = 2, 2


class _Operands(TorchDispatchMode):
    """Collects the two operands of every product."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in PRODUCTS:
            first = PRODUCTS[func.overloadpacket]
            self.pairs.append((args[first].clone(), args[first + 1].clone()))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def matrices(model: Model, x: Tensor) -> list[str]:
    """The names of the trained parameters of layers and head that are matrices.

    Args:
        model: the model, which is not changed.
        x: inputs of its task, [T, B, ...].
    """
    twin = copy.deepcopy(model).cpu().double().eval()
    twin.rnn.backend = "reference"
    generator = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = x[:STEPS, :ROWS].cpu()
    shape = twin.encoder(x.double() if x.is_floating_point() else x).shape
    runs = []
    for _ in range(2):
        with _Operands() as operands:
            output, _ = twin.rnn(torch.randn(shape, generator=generator, dtype=torch.float64))
            twin.head(output, None)
        runs.append(operands.pairs)
    entries = [torch.empty(0, dtype=torch.float64)]
    for (a, b), (c, d) in zip(*runs, strict=True):
        entries += [own for own, same, other in ((a, c, (b, d)), (b, d, (a, c))) if _equal(own, same) and not _equal(*other)]
    together = torch.cat([part.abs().double().reshape(-1) for part in entries])
    parameters = dict(twin.named_parameters())
    return [name for name in model.trainable if torch.isin(parameters[name].abs(), together).double().mean() > MOST]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)

"""One point of the lattice: a step of one cell, and how large the gradient of the parameters is that this step alone used.

With theta the parameters, u_t what the layer reads, s_t its state and y_t its output, the point (l, t) is the function

    (s_t, y_t) = f(theta, u_t, s_{t-1})            project, step and output, at one time

Beside s_t and y_t, `LatticeStep.forward` returns the way back: from the cotangents of s_t and y_t to ||d theta||, over all
parameters, and to the cotangents of u_t and s_{t-1}.

Most parameters are matrices W that a step uses in one product a = v W^T alone. The gradient of such a copy is the outer product
of da and v, and its Frobenius norm is the product of theirs:

    dW = da^T v,   ||dW|| = ||da|| ||v||

exactly. So dW is not written out, which would take most of the time. With more rows, or more products with one W, dW is the sum
of outer products, and is written out. Which parameters are used so is found by looking, at a first step that is thrown away;
all others (biases, angles, parts of matrices) get their gradient from autograd.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from unfading.cells.base import Cell

Parameters = Mapping[str, Tensor]
# From the cotangents of a step's new state and output: ||d theta||, and the cotangents of what it read and of the state before.
Back = Callable[[Any, Tensor], tuple[Tensor, Tensor, Any]]


class StepModule(nn.Module):
    """f of one cell, as a module whose parameters `functional_call` can set."""

    def __init__(self, cell: Cell):
        super().__init__()
        self.cell = cell

    def forward(self, u: Tensor, state: Any, t: int, going: Tensor | None) -> tuple[Any, Tensor]:
        """The state and the output after step t; u [B, I]; `going` [B, 1] says which rows have not ended, None: all."""
        cell = self.cell
        inputs = cell.project(u.unsqueeze(0), t)
        leaves, tree = _pytree.tree_flatten(inputs)
        now = _pytree.tree_unflatten([leaf.squeeze(0) for leaf in leaves], tree)
        new = cell.step(now, state, cell.weights())
        if going is None:
            return new, cell.output(new)
        new = type(state)(*(torch.where(going, n, old) for n, old in zip(new, state, strict=True)))
        return new, torch.where(going, cell.output(new), 0.0)


class _Tapped(TorchFunctionMode):
    """Every product with one of these matrices, a = v W^T, becomes a constant in W, plus a tap: its gradient is that of a.

    Args:
        matrices: by name; told by identity.
        taps: zeros, one for each product, in the order in which they come; None adds none.
    """

    def __init__(self, matrices: Parameters, taps: list[Tensor] | None = None):
        super().__init__()
        self.names = {id(W): name for name, W in matrices.items()}
        self.taps = None if taps is None else iter(taps)
        self.read: list[tuple[str, Tensor]] = []  # which matrix, and v
        self.shapes: list[torch.Size] = []  # of a

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if function is not functional.linear or len(arguments) < 2 or id(arguments[1]) not in self.names:
            return function(*arguments, **(options or {}))
        v, W, *bias = arguments
        a: Tensor = function(v, W.detach(), *bias, **(options or {}))
        self.read.append((self.names[id(W)], v.detach()))
        self.shapes.append(a.shape)
        return a if self.taps is None else a + next(self.taps)


class LatticeStep:
    """All points of one layer: they differ in what flows through them.

    Args:
        cell: of the layer.
        batch: rows.
    """

    def __init__(self, cell: Cell, batch: int):
        self.step = StepModule(cell)
        own: dict[str, Tensor] = dict(self.step.named_parameters())
        matrices = {name: W for name, W in own.items() if W.dim() == 2}
        like = next(iter(own.values()))
        u = torch.zeros(batch, cell.input_size, dtype=like.dtype, device=like.device)
        with torch.enable_grad(), _Tapped(matrices) as looked:
            state, y = functional_call(self.step, own, (u, cell.initial_state(batch), 0, None))
            total = y.sum() + sum(part.sum() for part in state)
            left = torch.autograd.grad(total, list(matrices.values()), allow_unused=True)
        # A matrix that some gradient still reaches is used in another way too.
        alone = {name for name, gradient in zip(matrices, left, strict=True) if gradient is None}
        seen = [(name, shape) for (name, _), shape in zip(looked.read, looked.shapes, strict=True) if name in alone]
        self.products = [name for name, _ in seen]  # the matrix of each product, in the order in which they come
        self.shapes = [shape for _, shape in seen]
        self.others = [name for name in own if name not in self.products]

    def theta(self) -> Parameters:
        """The parameters of the cell as they are, under the names that `forward` knows them by."""
        return {name: value.detach() for name, value in self.step.named_parameters()}

    def forward(
        self, theta: Parameters, u: Tensor, state: Any, t: int, going: Tensor | None = None
    ) -> tuple[Any, Tensor, Back]:
        """The new state, the output, and the way back from there."""
        matrices = {name: theta[name] for name in self.products}
        taps = [torch.zeros(shape, dtype=u.dtype, device=u.device) for shape in self.shapes]

        def f(others: Parameters, taps: list[Tensor], u: Tensor, state: Any) -> tuple[Any, Any]:
            with _Tapped(matrices, taps) as tapped:
                made = functional_call(self.step, {**theta, **others}, (u, state, t, going))
            return made, [v for _, v in tapped.read]

        others = {name: theta[name] for name in self.others}
        (new, y), pull, read = vjp(f, others, taps, u, state, has_aux=True)  # type: ignore[misc]  # three, with aux

        def back(s_bar: Any, y_bar: Tensor) -> tuple[Tensor, Tensor, Any]:
            d_others, d_taps, u_bar, s_bar = pull((s_bar, y_bar))
            return self._magnitude(d_others, d_taps, read), u_bar, s_bar

        return new, y, back

    def _magnitude(self, d_others: Parameters, d_taps: list[Tensor], read: list[Tensor]) -> Tensor:
        norms = [_norm(gradient) for gradient in d_others.values()]
        for name in dict.fromkeys(self.products):
            uses = [i for i, other in enumerate(self.products) if other == name]
            d_a = torch.cat([d_taps[i].flatten(0, -2) for i in uses])
            v = torch.cat([read[i].flatten(0, -2) for i in uses])
            norms.append(_norm(d_a) * _norm(v) if len(v) == 1 else _norm(d_a.T @ v))
        return _norm(torch.stack(norms))


def _norm(tensor: Tensor) -> Tensor:
    """In float64: squares of what has all but vanished are zeros in float32."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)

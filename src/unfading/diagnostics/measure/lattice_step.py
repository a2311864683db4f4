"""One point of the lattice: a step of one layer, with the norm of the gradient of the parameters used in this step alone.

With theta the parameters, u_t the input of the layer, s_t its state and y_t its output, the point (l, t) is the function

    (s_t, y_t) = f(theta, u_t, s_{t-1})            project, step and output, of one time step

`LatticeStep.forward` returns s_t, y_t and the backward pass: a function from the cotangents of s_t and y_t to ||d theta|| over
all parameters and to the cotangents of u_t and s_{t-1}.

Most parameters are matrices W that a step uses in a single product a = v W^T. The gradient with respect to that copy of W is
the outer product of da and v, and its Frobenius norm is the product of their norms:

    dW = da^T v,   ||dW|| = ||da|| ||v||

This is exact, so dW is not computed, which would take most of the time. With several rows, or several products with one W, dW
is a sum of outer products and is computed. A trial step at construction finds which parameters are used in this way. All others
(biases, angles, parts of matrices) get their gradient from autograd.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from unfading.cells.base import Cell, in_frame
from unfading.diagnostics.measure.single_steps import check_single_steps

Parameters = Mapping[str, Tensor]
# From the cotangents of a step's new state and output to ||d theta|| and the cotangents of its input and of its old state.
BackwardStep = Callable[[Any, Tensor], tuple[Tensor, Tensor, Any]]


class StepModule(nn.Module):
    """The function f of one cell, as a module whose parameters `functional_call` can replace."""

    def __init__(self, cell: Cell):
        super().__init__()
        self.cell = cell

    def forward(self, u: Tensor, state: Any, t: int, running: Tensor | None) -> tuple[Any, Tensor]:
        """The state and the output after step t.

        Args:
            u: [B, I].
            state: before the step.
            t: index of the step.
            running: [B, 1] bool, the rows that have not ended, with further axes of size 1 for frames; None for all.
        """
        cell = self.cell
        inputs = cell.project(u.unsqueeze(0), t)
        leaves, tree = _pytree.tree_flatten(inputs)
        now = _pytree.tree_unflatten([leaf.squeeze(0) for leaf in leaves], tree)
        new = cell.step(now, state, cell.weights())
        if running is None:
            return new, cell.output(new)
        new = type(state)(*(torch.where(running, n, old) for n, old in zip(new, state, strict=True)))
        return new, torch.where(running, cell.output(new), 0.0)


class _ProductTaps(TorchFunctionMode):
    """Makes every product a = v W^T with one of the matrices constant in W, and adds a zero whose gradient is that of a.

    Args:
        matrices: by name; they are recognised by identity.
        taps: the zeros, one for each product, in the order of the products; None adds none.
    """

    def __init__(self, matrices: Parameters, taps: list[Tensor] | None = None):
        super().__init__()
        self.names = {id(W): name for name, W in matrices.items()}
        self.taps = None if taps is None else iter(taps)
        self.factors: list[tuple[str, Tensor]] = []  # the name of the matrix, and v
        self.shapes: list[torch.Size] = []  # of a

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if function is not functional.linear or len(arguments) < 2 or id(arguments[1]) not in self.names:
            return function(*arguments, **(options or {}))
        v, W, *bias = arguments
        a: Tensor = function(v, W.detach(), *bias, **(options or {}))
        self.factors.append((self.names[id(W)], v.detach()))
        self.shapes.append(a.shape)
        return a if self.taps is None else a + next(self.taps)


class LatticeStep:
    """A step of one layer for any time step, with the gradient norm of its parameters.

    Args:
        cell: of the layer.
        batch: number of rows.
        steps: number of steps of the sequence.
        reverse: whether it is run from its last step to its first.
        frame: height and width of the layer's input; empty where it reads vectors.
    """

    def __init__(self, cell: Cell, batch: int, steps: int, *, reverse: bool = False, frame: tuple[int, ...] = ()):
        check_single_steps(cell, steps, reverse=reverse)
        self.step = StepModule(cell)
        own: dict[str, Tensor] = dict(self.step.named_parameters())
        matrices = {name: W for name, W in own.items() if W.dim() == 2}
        like = next(iter(own.values()))
        u = torch.zeros(batch, cell.input_size, *frame, dtype=like.dtype, device=like.device)
        initial = in_frame(cell.initial_state(batch), cell.state_frame(frame))
        with torch.enable_grad(), _ProductTaps(matrices) as trial:
            state, y = functional_call(self.step, own, (u, initial, 0, None))
            total = y.sum() + sum(part.sum() for part in state)
            # A convolutional cell has no matrices.
            other_uses = torch.autograd.grad(total, list(matrices.values()), allow_unused=True) if matrices else ()
        # A matrix that still gets a gradient is also used outside of such products.
        only_products = {name for name, gradient in zip(matrices, other_uses, strict=True) if gradient is None}
        calls = [(name, shape) for (name, _), shape in zip(trial.factors, trial.shapes, strict=True) if name in only_products]
        self.products = [name for name, _ in calls]  # the matrix of each product, in the order of the products
        self.shapes = [shape for _, shape in calls]
        self.others = [name for name in own if name not in self.products]

    def theta(self) -> Parameters:
        """The current parameters of the cell, by the names that `forward` uses."""
        return {name: value.detach() for name, value in self.step.named_parameters()}

    def forward(
        self, theta: Parameters, u: Tensor, state: Any, t: int, running: Tensor | None = None
    ) -> tuple[Any, Tensor, BackwardStep]:
        """The new state, the output and the backward pass of the step; arguments as in `StepModule.forward`."""
        matrices = {name: theta[name] for name in self.products}
        taps = [torch.zeros(shape, dtype=u.dtype, device=u.device) for shape in self.shapes]

        def f(others: Parameters, taps: list[Tensor], u: Tensor, state: Any) -> tuple[Any, Any]:
            with _ProductTaps(matrices, taps) as recorded:
                result = functional_call(self.step, {**theta, **others}, (u, state, t, running))
            return result, [v for _, v in recorded.factors]

        others = {name: theta[name] for name in self.others}
        (new, y), f_vjp, factors = vjp(f, others, taps, u, state, has_aux=True)  # type: ignore[misc]  # three, with aux

        def backward(s_bar: Any, y_bar: Tensor) -> tuple[Tensor, Tensor, Any]:
            d_others, d_taps, u_bar, s_bar = f_vjp((s_bar, y_bar))
            return self._gradient_norm(d_others, d_taps, factors), u_bar, s_bar

        return new, y, backward

    def _gradient_norm(self, d_others: Parameters, d_taps: list[Tensor], factors: list[Tensor]) -> Tensor:
        """||d theta|| over all parameters."""
        norms = [_norm(gradient) for gradient in d_others.values()]
        for name in dict.fromkeys(self.products):
            uses = [i for i, other in enumerate(self.products) if other == name]
            d_a = torch.cat([d_taps[i].flatten(0, -2) for i in uses])
            v = torch.cat([factors[i].flatten(0, -2) for i in uses])
            norms.append(_norm(d_a) * _norm(v) if len(v) == 1 else _norm(d_a.T @ v))
        return _norm(torch.stack(norms))


def _norm(tensor: Tensor) -> Tensor:
    """The norm in float64, because the squares of very small gradients are zero in float32."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)

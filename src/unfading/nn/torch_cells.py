"""The cells of torch.nn's layers: the equations of the library's cells, on tensors in torch.nn's layout.

    weight_ih [G H, I]    weight_hh [G H, H]    bias_ih, bias_hh [G H], or None    weight_hr [P, H], or None

G is the number of gates, in the order of the library's cells. With weight_hr (`proj_size=P`) the LSTM's output is projected,
h_t = weight_hr (o_t * tanh(c_t)), and weight_hh is [4H, P]. The tensors belong to a layer, which puts them into its cells
before every run.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from unfading.cells import elman, gru, lstm
from unfading.cells.base import Activation, Cell, Gains
from unfading.cells.layer_norm import Plain
from unfading.cells.matrix import linear


class ProjectedWeights(NamedTuple):
    """The weights of an LSTM with a projection."""

    W_h: Tensor  # [4H, P] rows: i, f, z, o
    norm: Plain
    W_p: Tensor  # [P, H]


class TorchTensors(Cell):
    """The common part of the three cells: the tensors."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None

    singular_values_at_zero: Gains | None = None
    bounded_state: Any = None

    def __init__(self, input_size: int, hidden_size: int, gates: int, *, bias: bool, proj_size: int = 0):
        Cell.__init__(self, input_size, proj_size or hidden_size)
        self.hidden_size = hidden_size
        rows = gates * hidden_size
        shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, input_size), "weight_hh": (rows, proj_size or hidden_size)}
        shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if bias else {}
        shapes |= {"weight_hr": (proj_size, hidden_size)} if proj_size else {}
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"):
            self.register_parameter(name, nn.Parameter(torch.empty(shapes[name])) if name in shapes else None)

    def hold(self, tensors: list[Tensor]) -> None:
        """Use these tensors from now on, in torch.nn's order. They may be computed from others, as by a parametrisation."""
        own = [name for name, tensor in self._parameters.items() if tensor is not None]
        self._parameters.update(zip(own, tensors, strict=True))  # type: ignore[arg-type]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product of the input matrix."""
        return functional.linear(x, self.weight_ih, bias)


class TorchLSTMCell(TorchTensors, lstm.LSTMCell):
    """The cell of nn.LSTM."""

    def project(self, x: Tensor, start: int = 0) -> lstm.Inputs:
        return lstm.Inputs(self.product(x, both(self.bias_ih, self.bias_hh)))

    def weights(self) -> lstm.Weights | ProjectedWeights:  # type: ignore[override]
        if self.weight_hr is None:
            return lstm.Weights(self.weight_hh, Plain())
        return ProjectedWeights(self.weight_hh, Plain(), self.weight_hr)

    def initial_state(self, batch: int) -> lstm.State:
        h, c = self.output_size, self.hidden_size
        return lstm.State(self.weight_hh.new_zeros(batch, h), self.weight_hh.new_zeros(batch, c))

    def step(self, inputs: lstm.Inputs, state: lstm.State, weights: lstm.Weights | ProjectedWeights) -> lstm.State:
        h, c = super().step(inputs, state, weights)  # type: ignore[arg-type]
        return lstm.State(linear(h, weights.W_p) if isinstance(weights, ProjectedWeights) else h, c)


class TorchGRUCell(TorchTensors, gru.GRUCell):
    """The cell of nn.GRU, whose reset gate acts after the product."""

    def project(self, x: Tensor, start: int = 0) -> gru.Inputs:
        H = self.hidden_size
        bias = self.bias_ih
        if bias is not None and self.bias_hh is not None:
            bias = torch.cat([bias[: 2 * H] + self.bias_hh[: 2 * H], bias[2 * H :]])
        return gru.Inputs(*self.product(x, bias).split([2 * H, H], dim=-1))

    def weights(self) -> gru.WeightsAfter:
        H = self.hidden_size
        c_n = self.weight_hh.new_zeros(H) if self.bias_hh is None else self.bias_hh[2 * H :]
        W_rz, W_n = self.weight_hh.split([2 * H, H])
        return gru.WeightsAfter(W_rz, W_n, Plain(), Plain(), c_n)

    def initial_state(self, batch: int) -> gru.State:
        return gru.State(self.weight_hh.new_zeros(batch, self.hidden_size))


class TorchRNNCell(TorchTensors, elman.ElmanCell):
    """The cell of nn.RNN."""

    def __init__(self, input_size: int, hidden_size: int, gates: int, *, bias: bool, nonlinearity: Activation):
        super().__init__(input_size, hidden_size, gates, bias=bias)
        self.activation = nonlinearity

    def project(self, x: Tensor, start: int = 0) -> elman.Inputs:
        return elman.Inputs(self.product(x, both(self.bias_ih, self.bias_hh)))

    def weights(self) -> elman.Weights:
        return elman.Weights(self.weight_hh, Plain())

    def initial_state(self, batch: int) -> elman.State:
        return elman.State(self.weight_hh.new_zeros(batch, self.hidden_size))


def both(bias: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of the two biases that torch.nn stores for each gate."""
    return None if bias is None or second is None else bias + second

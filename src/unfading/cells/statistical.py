"""StatisticalRNN (Oliva's SRU): moving averages of learned statistics at several time scales, without gates.

Here P is the number of statistics, A the number of scales, mu in R^(A P):

    r_t    = ReLU(W_r mu_{t-1} + b_r)                           summary of the past
    phi_t  = ReLU(W_x x_t + W_phi r_t + b_phi)                  statistics of this step, in R^P
    mu_t^a = a mu_{t-1}^a + (1 - a) phi_t                       for each scale a
    o_t    = ReLU(W_o mu_t + b_o)                               output, in R^H

Oliva et al. 2017. The output is computed once for all time, outside the loop. Xavier initialisation with gain sqrt 2 and zero
biases, as in NRU's baseline; the authors draw from U(-0.1, 0.1). The SRU of Lei et al. is another cell.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.errors import check_count, check_share
from unfading.initialise import uniform_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, P] W_x x + b_phi


class Weights(NamedTuple):
    W_r: Tensor  # [R, A P]
    b_r: Tensor  # [R]
    W_phi: Tensor  # [P, R]
    keep: Tensor  # [A P] the scale of each entry of mu


class State(NamedTuple):
    mu: Tensor  # [B, A P] scale after scale


class StatisticalRNNCell(Cell[Inputs, State, Weights]):
    """Statistical recurrent unit.

    Args:
        statistics: P, the number of statistics per step.
        summary_size: size of the summary r.
        scales: the decay factors a, each in [0, 1); NRU's baseline has 0, 0.5, 0.9, 0.99, 0.999.
    """

    paper = "Oliva 2017"
    keep: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        statistics: int = 64,
        summary_size: int = 16,
        scales: Sequence[float] = (0.0, 0.25, 0.5, 0.9, 0.99),
    ):
        super().__init__(input_size, hidden_size)
        check_count("statistics", statistics)
        check_count("summary_size", summary_size)
        if isinstance(scales, int | float) or not scales:
            raise ValueError(
                f"scales must be a list of at least one time scale; got {scales!r}. The authors take 0, 0.25, 0.5, 0.9, 0.99."
            )
        for scale in scales:
            check_share("each of scales", scale)
            if scale == 1.0:
                raise ValueError("an average with scale 1.0 never moves; each of scales must lie in [0, 1).")
        self.scales = tuple(scales)
        self.statistics = statistics
        self.from_input = nn.Linear(input_size, statistics, bias=bias)
        self.to_summary = nn.Linear(len(scales) * statistics, summary_size, bias=bias)
        self.W_phi = nn.Parameter(torch.empty(statistics, summary_size))
        self.to_output = nn.Linear(len(scales) * statistics, hidden_size, bias=bias)
        # A buffer: numbers that come from the host at every call cannot be captured in a CUDA graph.
        keep = torch.tensor(self.scales, dtype=self.W_phi.dtype).repeat_interleave(statistics)
        self.register_buffer("keep", keep, persistent=False)
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        for W in (self.from_input.weight, self.to_summary.weight, self.W_phi, self.to_output.weight):
            uniform_(W, math.sqrt(2) * math.sqrt(6 / sum(W.shape)), generator=generator)
        for layer in (self.from_input, self.to_summary, self.to_output):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        b_r = self.to_summary.bias if self.to_summary.bias is not None else self.W_phi.new_zeros(self.W_phi.shape[1])
        return Weights(self.to_summary.weight, b_r, self.W_phi, self.keep)

    def initial_state(self, batch: int) -> State:
        return State(self.W_phi.new_zeros(batch, len(self.scales) * self.statistics))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        r = torch.relu(linear(state.mu, weights.W_r) + weights.b_r)
        phi = torch.relu(inputs.a + linear(r, weights.W_phi))
        every_scale = torch.cat([phi] * len(self.scales), dim=-1)
        return State(weights.keep * state.mu + (1 - weights.keep) * every_scale)

    def output(self, state: State) -> Tensor:
        return torch.relu(self.to_output(state.mu))

"""UGRNN, the update-gate recurrent network: the smallest gated cell with a recurrent candidate.

    f_t = sigmoid(W_xf x_t + W_hf h_{t-1} + b_f)
    z_t = tanh(W_xz x_t + W_hz h_{t-1} + b_z)
    h_t = f_t * h_{t-1} + (1 - f_t) * z_t

Collins et al. 2016, who write g for f and c for z; JANET with beta = 0 is the same equation. TensorFlow's cell adds a
constant 1 to the gate's argument; here b_f starts at 1, which is the same function. EdgeML's cell starts with biases 1 and
matrices 0.1 N(0, 1); here matrices start orthogonal.
"""

import torch

from unfading.cells.base import Gains
from unfading.cells.janet import ForgetGateCell, Inputs, State, Weights
from unfading.cells.matrix import linear


class UGRNNCell(ForgetGateCell):
    """Update-gate recurrent cell.

    Args:
        max_lag: longest dependency expected, in steps. Chrono initialisation: b_f = log U[1, max_lag - 1], so that units
            remember for 2 to max_lag steps. None for b_f = 1.
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [2H, H / heads].
    """

    paper = "Collins 2016"
    singular_values_at_zero = Gains(input=(0.5, 0.5), state=(0.0, 1.0))
    bounded_state = 1.0

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, max_lag: int | None = None, heads: int = 1):
        super().__init__(input_size, hidden_size, bias=bias, max_lag=max_lag, heads=heads)

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        f, z = (inputs.a + linear(state.h, weights.W_h)).chunk(2, dim=-1)
        f = torch.sigmoid(f)
        return State(f * state.h + (1 - f) * torch.tanh(z))

"""Write your own cell and train it beside a built-in one: `python examples/own_cell.py`

The cell is a leaky Elman network, h_t = h_{t-1} + leak (tanh(W x_t + U h_{t-1} + b) - h_{t-1}). It is compiled like the
built-in cells.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import unfading
from unfading import Cell, Run, linear


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] W x + b


class Weights(NamedTuple):
    U: Tensor  # [H, H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class LeakyCell(Cell):
    """A leaky Elman network.

    Args:
        leak: share of the new value that a step adds.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, leak: float = 0.1):
        super().__init__(input_size, hidden_size)
        self.leak = leak
        self.W = nn.Linear(input_size, hidden_size, bias=bias)
        self.U = nn.Parameter(torch.empty(hidden_size, hidden_size))
        nn.init.orthogonal_(self.U)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.W(x))

    def weights(self) -> Weights:
        return Weights(self.U)

    def initial_state(self, batch: int) -> State:
        return State(self.U.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        new = torch.tanh(inputs.a + linear(state.h, weights.U))
        return State(state.h + self.leak * (new - state.h))


def main() -> None:
    torch.set_num_threads(1)
    here = Path(__file__).resolve()
    for cell, options in ((f"{here}:LeakyCell", {"leak": 0.2}), ("LSTM", {})):
        run = Run(
            task="adding", task_options={"T": 20}, cell=cell, cell_options=options, hidden=32, batch=32, rate=1e-2, steps=500
        )
        record = unfading.train(run)
        print(f"{cell.rpartition(':')[2]:10} test error {record['test']['mse']:.4f}; a guess: {record['guess']:.4f}")


if __name__ == "__main__":
    main()

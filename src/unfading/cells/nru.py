"""NRU, the non-saturating recurrent unit: an additive memory, written and erased by gates that never saturate.

Here M is the memory size, k the number of heads, and every f is a learned linear map of [x_t, h_t, m_{t-1}] plus a bias:

    h_t     = ReLU(W_h h_{t-1} + W_i x_t + W_c m_{t-1} + b)
    alpha   = f_alpha,  beta = f_beta                                  in R^k: what each head writes, and erases
    p, q    = f_p, f_q                                                 in R^sqrt(kM), once to write and once to erase
    v_1..k  = rows of p q^T, read as k x M, each divided by its L5 norm     where each head writes, and erases
    m_t     = m_{t-1} + sum_i alpha_i v_i^w - sum_i beta_i v_i^e

Chandar et al. 2019, eq. 9-17, with the biases that its parameter counts imply. With an optional ReLU on alpha, beta and v
(before the norm) writing heads only add and erasing heads only subtract; the authors use it for language only.

The authors' released code differs: its heads do not read x_t, and the contributions of the heads are averaged, not summed
(with k = 4 a quarter of the step). `NRU.released(...)` gives that form, whose counts are the paper's "23.5k" and "165k". The
printed sum grows fast at the beginning (at the copying size, memory entries reach 1e5 to 1e9 within 100 steps); averaged heads
grow more slowly. Both start like nn.Linear, as in the released code; the paper gives no initial values. The multiplicative
memory, which the paper mentions for language without an equation, is as in the authors' framework

    m_t     = m_{t-1} * (sum_i alpha_i v_i^w - sum_i beta_i v_i^e),    m_0 = 1

There m_0 is 0, so that the memory stays 0 and the cell is a plain ReLU network. With m_0 = 1 the memory can be used, but the
factors are about 0.01 at the beginning, and the memory vanishes within five steps. A factor of 1 + sum alpha v - sum beta v,
which would retain it, overflows within 150 steps in most draws: alpha grows with m, and the memory faster than exponentially.

With `normalise=True` a layer norm (`layer_norm.py`) acts on the argument of the ReLU.
"""

import math
from itertools import count
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.layer_norm import LayerNorm, Normalise, Plain
from unfading.cells.matrix import linear
from unfading.cells.recipe import Recipe
from unfading.errors import check_count, check_number
from unfading.initialise import uniform_


class Inputs(NamedTuple):
    h: Tensor  # [T, B, H] W_i x + b
    heads: Tensor  # [T, B, n] contribution of x to the heads, with biases; [T, 1, n] where the heads do not read x


class Weights(NamedTuple):
    W_h: Tensor  # [H, H + M] from [h_{t-1}, m_{t-1}]
    norm: LayerNorm | Plain
    W_heads: Tensor  # [n, H + M] from [h_t, m_{t-1}]; rows: alpha, beta, directions to write, directions to erase


class State(NamedTuple):
    h: Tensor  # [B, H]
    m: Tensor  # [B, M]


class NRUCell(Cell[Inputs, State, Weights]):
    """Non-saturating recurrent unit.

    Args:
        memory_size: M, the number of entries of the memory.
        heads: k, the number of writing heads.
        erase_heads: the number of erasing heads; None for as many as there are writing heads.
        factored: compute the k directions from an outer product; memory_size * heads must then be a perfect square.
            Otherwise a linear map computes all k * M entries.
        norm: the order p of the norm by which each direction is divided, at least 1.
        relu_heads: ReLU on alpha, beta and the directions.
        heads_see_input: feed x_t to the heads, as in the printed equations.
        mean_over_heads: average the heads' contributions instead of summing them.
        multiplicative: multiply the memory by the heads' contributions instead of adding them.
        normalise: layer norm of h's pre-activation inside the step.
    """

    paper = "Chandar 2019"
    released = {"heads_see_input": False, "mean_over_heads": True}
    # The printed sum over the heads overflows on long sequences; the authors' code averages them.
    recipe = Recipe(rate=4e-3, options=released)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        memory_size: int = 64,
        heads: int = 4,
        erase_heads: int | None = None,
        factored: bool = True,
        norm: float = 5.0,
        relu_heads: bool = False,
        heads_see_input: bool = True,
        mean_over_heads: bool = False,
        multiplicative: bool = False,
        normalise: bool = False,
    ):
        super().__init__(input_size, hidden_size)
        erase_heads = heads if erase_heads is None else erase_heads
        check_count("memory_size", memory_size)
        check_count("heads", heads)
        check_count("erase_heads", erase_heads)
        check_number("norm", norm)
        if not norm >= 1:
            raise ValueError(f"norm must be at least 1 to be a norm; got {norm}. Nearest valid: 1.")
        if factored:
            _check_square(memory_size, heads, erase_heads)
        self.memory_size = memory_size
        self.heads, self.erase_heads = heads, erase_heads
        self.factored = factored
        self.norm = norm
        self.relu_heads = relu_heads
        self.mean_over_heads = mean_over_heads
        self.multiplicative = multiplicative

        self.head_rows = [heads, erase_heads, self._direction_rows(heads), self._direction_rows(erase_heads)]
        n = sum(self.head_rows)
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.W_h = nn.Parameter(torch.empty(hidden_size, hidden_size + memory_size))
        self.layer_norm = Normalise(1, hidden_size, on=normalise)
        self.heads_from_input = nn.Parameter(torch.empty(n, input_size)) if heads_see_input else None
        self.W_heads = nn.Parameter(torch.empty(n, hidden_size + memory_size))
        self.b_heads = nn.Parameter(torch.empty(n)) if bias else None
        if not heads_see_input:
            self.shared = ("heads",)
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """As in nn.Linear: uniform, bounded by one over the square root of the number of inputs of a row, x included."""
        joint = self.output_size + self.memory_size
        from_input = 0 if self.heads_from_input is None else self.input_size
        to_h = (self.input_size + joint, [self.from_input.weight, self.W_h, self.from_input.bias])
        to_heads = (from_input + joint, [self.heads_from_input, self.W_heads, self.b_heads])
        for fan_in, tensors in (to_h, to_heads):
            for tensor in tensors:
                if tensor is not None:
                    uniform_(tensor, 1 / math.sqrt(fan_in), generator=generator)
        self.layer_norm.reset_parameters()

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        if self.heads_from_input is not None:
            return Inputs(self.from_input(x), nn.functional.linear(x, self.heads_from_input, self.b_heads))
        bias = self.W_heads.new_zeros(sum(self.head_rows)) if self.b_heads is None else self.b_heads
        return Inputs(self.from_input(x), bias.expand(x.shape[0], 1, -1))

    def weights(self) -> Weights:
        return Weights(self.W_h, self.layer_norm(), self.W_heads)

    def initial_state(self, batch: int) -> State:
        m = self.W_h.new_ones if self.multiplicative else self.W_h.new_zeros
        return State(self.W_h.new_zeros(batch, self.output_size), m(batch, self.memory_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        h = torch.relu(weights.norm(inputs.h + linear(torch.cat([state.h, state.m], dim=-1), weights.W_h)))
        heads = inputs.heads + linear(torch.cat([h, state.m], dim=-1), weights.W_heads)
        alpha, beta, write, erase = heads.split(self.head_rows, dim=-1)
        change = self._along(alpha, write, self.heads) - self._along(beta, erase, self.erase_heads)
        return State(h, state.m * change if self.multiplicative else state.m + change)

    def _along(self, amount: Tensor, direction: Tensor, heads: int) -> Tensor:
        """sum_i amount_i v_i, [B, M], with the v_i computed from `direction`, the result of the linear map."""
        if self.factored:
            p, q = direction.chunk(2, dim=-1)
            direction = p.unsqueeze(-1) * q.unsqueeze(-2)
        v = direction.reshape(-1, heads, self.memory_size)
        if self.relu_heads:
            amount, v = torch.relu(amount), torch.relu(v)
        # A direction does not depend on its length, so each row is first scaled to a largest entry of 1: the fifth powers of
        # the norm would overflow or underflow float32 for entries above 5e7 or below 1e-9. The norm is then at least 1, or 0.
        largest = v.detach().abs().amax(dim=-1, keepdim=True)
        v = v / largest.clamp_min(torch.finfo(v.dtype).tiny)
        v = v / torch.linalg.vector_norm(v, ord=self.norm, dim=-1, keepdim=True).clamp_min(0.5)
        total = (amount.unsqueeze(-1) * v).sum(dim=-2)
        return total / heads if self.mean_over_heads else total

    def _direction_rows(self, heads: int) -> int:
        cells = heads * self.memory_size
        return 2 * math.isqrt(cells) if self.factored else cells


def _check_square(memory_size: int, heads: int, erase_heads: int) -> None:
    def fits(size: int) -> bool:
        return all(math.isqrt(size * k) ** 2 == size * k for k in (heads, erase_heads))

    if fits(memory_size):
        return
    # A size that fits both kinds of head exists if and only if heads * erase_heads is itself a perfect square.
    if math.isqrt(heads * erase_heads) ** 2 != heads * erase_heads:
        raise ValueError(
            f"NRU writes memory as an outer product of two equal vectors, so memory_size * heads must be a perfect square "
            f"for both kinds of head, and no memory_size is for heads={heads} with erase_heads={erase_heads}. "
            f"Take equal numbers, or factored=False."
        )
    nearest = next(size for d in count(1) for size in (memory_size - d, memory_size + d) if size > 0 and fits(size))
    raise ValueError(
        f"NRU writes memory as an outer product of two equal vectors, so memory_size * heads must be a perfect square; "
        f"got {memory_size} * {heads} = {memory_size * heads}. Nearest memory_size: {nearest}; or factored=False."
    )

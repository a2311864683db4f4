"""DeepTransition: the incremental form of any inner network.

    s   = g_{k-1} + h_{m-1}
    g_k = g_{k-1} + eta_{m,k} * (f(U s + W x_m + b) - alpha s),    g_0 = h_{m-1},  h_m = g_K

Kag et al. 2020, appendix A.1, after the deep transition RNN of Pascanu et al. 2013. In the limit h_m = f(h_m + h_{m-1}, x_m)
- h_{m-1}. f is any network from R^H to R^H; f = phi gives their eq. 5. U starts Gaussian with norm about 0.6. The initial eta =
0.1 is our choice.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.incremental import InnerStepsCell
from unfading.cells.matrix import linear
from unfading.errors import check_count
from unfading.initialise import gaussian_, orthogonal_linear_


class Weights(NamedTuple):
    U: Tensor  # [H, H]
    f: tuple[Tensor, ...]  # the inner network's parameters


class DeepTransitionCell(InnerStepsCell[Weights]):
    """Incremental cell around an inner network.

    Args:
        network: f, as a module from [B, H] to [B, H] or as widths. Each cell takes a copy of the module with its weights; the
            module must not change its buffers. The widths (w,) stand for tanh(L_2 tanh(L_1 tanh(.))) with w units in the
            middle, () for tanh alone.
        inner_steps: K, the number of inner steps per time step.
        steps: number of rows of the table of eta. Row m is used at time step m, the last row at all later ones.
        eta: initial value of every step size.
        learn_eta: learn the step sizes; otherwise they are fixed.
        alpha: factor of the leak term, -alpha s.
    """

    paper = "Kag 2020, A.1"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        network: nn.Module | Sequence[int] = (32,),
        inner_steps: int = 1,
        steps: int = 1,
        eta: float = 0.1,
        learn_eta: bool = True,
        alpha: float = 1.0,
    ):
        super().__init__(
            input_size,
            hidden_size,
            bias=bias,
            inner_steps=inner_steps,
            steps=steps,
            eta=eta,
            learn_eta=learn_eta,
            bounded_eta=False,
            alpha=alpha,
            activation="tanh",
            from_zero=False,
            minus=False,
        )
        self.own_network = not isinstance(network, nn.Module)
        # A copy, so that the cells of a stack do not share one.
        self.f = deepcopy(network) if isinstance(network, nn.Module) else _tanh_network(hidden_size, network, bias)
        _check_network(self.f, hidden_size)
        self.U = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        gaussian_(self.U, 0.3 / math.sqrt(self.output_size), generator=generator)
        for module in self.f.modules():
            # A network from the caller keeps its weights.
            if self.own_network and isinstance(module, nn.Linear):
                orthogonal_linear_(module, blocks=1, generator=generator)

    def weights(self) -> Weights:
        return Weights(self.U, tuple(self.f.parameters()))

    def pull(self, s: Tensor, u: Tensor, weights: Weights) -> Tensor:
        parameters = dict(zip((name for name, _ in self.f.named_parameters()), weights.f, strict=True))
        return torch.func.functional_call(self.f, parameters, (u + linear(s, weights.U),)) - self.alpha * s


@torch.no_grad()
def _check_network(f: nn.Module, size: int) -> None:
    example = torch.zeros(2, size, device=next((p.device for p in f.parameters()), None))
    shape = tuple(f(example).shape)
    if shape != (2, size):
        raise ValueError(f"network must map [B, {size}] to [B, {size}], the hidden size; got {list(shape)} for a batch of 2.")


def _tanh_network(size: int, widths: Sequence[int], bias: bool) -> nn.Sequential:
    for width in widths:
        check_count("each width of network", width)
    sizes = [size, *widths, size] if widths else []
    layers: list[nn.Module] = [nn.Tanh()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers)

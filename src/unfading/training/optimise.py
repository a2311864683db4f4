"""Optimisers of a fleet: E models at once, the parameters of each a row of one matrix; a single run is E = 1.

w [E, N] parameters, g [E, N] gradients, rate [E, 1] or [E, N], t [E, 1] the number of steps of each model, with this one:

    g = g + l2 w
    w = w - rate weight_decay w            as in AdamW, separate from the gradient
    Adam       m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
               w = w - rate m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
    AMSGrad    as Adam, with the largest v so far in the root
    RMSProp    v = alpha v + (1 - alpha) g^2,  m = momentum m + g / (sqrt(v) + eps)        w = w - rate m
    SGD        m = momentum m + g,  nesterov: g + momentum m for m                         w = w - rate m

A row holds all parameters of a model, so that a step takes a dozen operations however many parameters there are. Each row gets
the step of the optimiser of that name in torch.optim.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unfading.errors import check_number, check_positive, check_share


@dataclass(frozen=True)
class Optimiser(ABC):
    """The rule for one step, with its options. Its state is an argument.

    Args:
        l2: factor of the L2 penalty, added to the gradient; torch.optim calls it weight_decay except in AdamW.
        weight_decay: share of w, times the rate, that every step subtracts, as in AdamW.
    """

    l2: float = 0.0
    weight_decay: float = 0.0

    # Names of the state's tensors, each [E, N] and zero at the start.
    state_names: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        _check_not_negative("l2", self.l2)
        _check_not_negative("weight_decay", self.weight_decay)

    def update(self, w: Tensor, g: Tensor, state: dict[str, Tensor], rate: Tensor, t: Tensor) -> None:
        """Take a step: changes w and the state in place, and may change g."""
        if self.l2:
            g.add_(w, alpha=self.l2)
        if self.weight_decay:
            w.sub_(w * rate, alpha=self.weight_decay)
        self.move(w, g, state, rate, t)

    @abstractmethod
    def move(self, w: Tensor, g: Tensor, state: dict[str, Tensor], rate: Tensor, t: Tensor) -> None:
        """The step without decay."""


@dataclass(frozen=True)
class Adam(Optimiser):
    """Adam (Kingma & Ba 2015).

    Args:
        b1: decay of the mean gradient m.
        b2: decay of the mean square v.
        eps: added to the square root.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    state_names: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_below_one("b1", self.b1)
        _check_below_one("b2", self.b2)
        check_positive("eps", self.eps)

    def move(self, w: Tensor, g: Tensor, state: dict[str, Tensor], rate: Tensor, t: Tensor) -> None:
        state["m"].lerp_(g, 1 - self.b1)
        state["v"].mul_(self.b2).addcmul_(g, g, value=1 - self.b2)
        step = (rate / (1 - self.b1**t)).to(w.dtype)
        root = torch.sqrt(self.largest(state)).mul_((1 - self.b2**t).rsqrt().to(w.dtype)).add_(self.eps)
        w.addcdiv_(state["m"] * step, root, value=-1.0)

    def largest(self, state: dict[str, Tensor]) -> Tensor:
        """The mean square under the square root."""
        return state["v"]


@dataclass(frozen=True)
class AMSGrad(Adam):
    """Adam with the largest mean square so far (Reddi et al. 2018)."""

    state_names = ("m", "v", "top")

    def largest(self, state: dict[str, Tensor]) -> Tensor:
        return torch.maximum(state["top"], state["v"], out=state["top"])


@dataclass(frozen=True)
class RMSProp(Optimiser):
    """RMSProp (Tieleman & Hinton 2012), as in torch.optim: eps is added to the square root.

    Args:
        alpha: decay of the mean square.
        momentum: share of the last move that is added to the next.
        eps: added to the square root.
    """

    alpha: float = 0.99
    momentum: float = 0.0
    eps: float = 1e-8

    state_names = ("m", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_below_one("alpha", self.alpha)
        _check_below_one("momentum", self.momentum)
        check_positive("eps", self.eps)

    def move(self, w: Tensor, g: Tensor, state: dict[str, Tensor], rate: Tensor, t: Tensor) -> None:
        state["v"].mul_(self.alpha).addcmul_(g, g, value=1 - self.alpha)
        state["m"].mul_(self.momentum).addcdiv_(g, torch.sqrt(state["v"]).add_(self.eps))
        w.sub_(state["m"] * rate.to(w.dtype))


@dataclass(frozen=True)
class SGD(Optimiser):
    """Stochastic gradient descent, with momentum.

    Args:
        momentum: share of the last move that is added to the next.
        nesterov: use Nesterov momentum.
    """

    momentum: float = 0.0
    nesterov: bool = False

    state_names = ("m",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_below_one("momentum", self.momentum)
        if not isinstance(self.nesterov, bool):
            raise TypeError(f"nesterov must be true or false; got {self.nesterov!r} ({type(self.nesterov).__name__}).")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum, and momentum is 0. Set momentum, e.g. to 0.9.")

    def move(self, w: Tensor, g: Tensor, state: dict[str, Tensor], rate: Tensor, t: Tensor) -> None:
        m = state["m"].mul_(self.momentum).add_(g)
        w.sub_((g.add_(m, alpha=self.momentum) if self.nesterov else m) * rate.to(w.dtype))


def norms(g: Tensor) -> Tensor:
    """The norm of each model's gradient, [E, 1], in float64, so that large finite entries have a finite norm."""
    return torch.linalg.vector_norm(g, dim=1, keepdim=True, dtype=torch.float64)


def clip_norms(g: Tensor, norm: Tensor, limits: Tensor) -> None:
    """Scale each row of g down, in place, to the norm in `limits` [E, 1]; inf leaves it unchanged."""
    g.mul_((limits / (norm + 1e-6)).clamp_(max=1.0).to(g.dtype))


def clip_values(g: Tensor, limits: Tensor) -> None:
    """Clamp each entry of g, in place, to [-limit, limit], with limits [E, 1]; inf leaves it unchanged."""
    limits = limits.to(g.dtype)
    torch.minimum(torch.maximum(g, -limits, out=g), limits, out=g)


# By the names that runs and the command line use.
OPTIMISERS: dict[str, type[Optimiser]] = {kind.__name__.lower(): kind for kind in (Adam, AMSGrad, RMSProp, SGD)}


def _check_not_negative(name: str, value: float) -> None:
    check_number(name, value)
    if not value >= 0:
        raise ValueError(f"{name} must be at least 0; got {value}. Nearest valid: 0.")


def _check_below_one(name: str, value: float) -> None:
    check_share(name, value)
    if value == 1:
        raise ValueError(f"{name} must be below 1, because at 1 new gradients have no effect; got {value}.")

"""Whether the fused loop computes what the reference computes: asked before anything is timed.

Everything is compared that a training step and an inference see: the output with and without a graph, the final state, and
the gradient of each parameter under a random cotangent.

The tolerance is measured, not guessed. A float64 run of the reference is taken as true; the reference in float32 misses it
by its rounding, which grows with the length and with what the cell does to errors. The fused loop sums in another order
and has its own exp and tanh, so it is allowed MARGIN times that miss, and never less than FLOOR or more than LARGEST. All of
these are norms of differences over the norm of the true tensor: one wrong row among a hundred stands out at 1e-1. On a GPU
the reference runs in the precision of the case, and FLOOR and LARGEST are that precision's.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unfading.backends.choose import use_backend
from unfading.layers.recurrent import Recurrent

MARGIN = 8.0  # two orders of summation rarely differ by 3; the rest is for cells that sum few terms
FLOOR = 2e-5  # a sum over a thousand steps in one accumulator, of terms that cancel ten to one; the reference adds pairwise
LARGEST = 1e-2  # a reference that misses by more is no yardstick


def disagreement(layer: Recurrent, x: Tensor, lengths: Tensor | None = None) -> str | None:
    """In words where the fused loop parts from the reference on this input, or why none can tell; None where they agree."""
    for name, parameter in layer.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the weight {name} is not finite"
    double = copy.deepcopy(layer).double()
    with use_backend("reference"):
        true = everything(double, x.double(), lengths=lengths)
        plain = everything(layer, x, lengths=lengths)
    with use_backend("fused"):
        fused = everything(layer, x, lengths=lengths)
    return first_parting(fused, plain, true)


Results = Mapping[str, Tensor]


def first_parting(fused: Results, plain: Results, true: Results, floor: float = FLOOR, largest: float = LARGEST) -> str | None:
    """In words the first of the results that parts from the reference, as `parts_from` tells it; None where all agree."""
    for name, want in true.items():
        problem = parts_from(fused[name], plain[name], want, floor, largest)
        if problem:
            return f"{name} {problem}"
    return None


def distance(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float((got.double() - want).norm() / want.norm())


def furthest(got: Results, true: Results) -> float | None:
    """The largest distance among all results; None where one is not finite, or is zero and has no norm to measure by."""
    largest = max(distance(got[name], want) for name, want in true.items())
    return largest if math.isfinite(largest) else None


def parts_from(fused: Tensor, plain: Tensor, want: Tensor, floor: float = FLOOR, largest: float = LARGEST) -> str | None:
    """In words what is wrong with a fused tensor, given the reference's in its precision and, as `want`, in float64."""

    def allowed(rounding: float) -> float:
        return max(floor, MARGIN * rounding)

    if not (torch.isfinite(want).all() and torch.isfinite(plain).all()):
        return "of the reference is not finite, so that there is nothing to agree with"
    if not want.norm() > 0:
        return "of the reference is zero, so that there is nothing to agree with"
    rounding = distance(plain, want)
    if allowed(rounding) > largest:
        return f"of the reference is {rounding:.1e} off by rounding alone, so that agreement cannot be told"
    got = distance(fused, want)
    if math.isfinite(got) and got <= allowed(rounding):
        return None
    return f"is {got:.1e} away from the reference; rounding explains {allowed(rounding):.1e}"


def everything(module: nn.Module, x: Tensor, **arguments: Any) -> dict[str, Tensor]:
    """What a recurrent module computes on x, by name. The cotangents are the same at every call, whatever the precision."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        made = {"the output without a graph": module(x, **arguments)[0]}
    output, state = module(x, **arguments)
    parts = state if isinstance(state, tuple) else (state,)
    names = getattr(state, "_fields", [f"state {i}" for i in range(len(parts))])
    results: dict[str, Any] = {"the output": output}
    results |= {f"the final {name}": part for name, part in zip(names, parts, strict=True)}
    pulled = list(results.values())
    cotangents = [random_like(part, generator) for part in pulled]
    named = dict(module.named_parameters())
    gradients = torch.autograd.grad(pulled, list(named.values()), cotangents, materialize_grads=True)
    made |= {name: part.detach() for name, part in results.items()}
    return made | {f"the gradient of {name}": gradient for name, gradient in zip(named, gradients, strict=True)}


def random_like(part: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers of few digits, which are the same in every precision."""
    return torch.randn(part.shape, generator=generator).bfloat16().to(part)

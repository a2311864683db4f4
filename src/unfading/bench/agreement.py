"""Check that the fused loop computes what the reference computes, before anything is timed.

The check covers everything that training and inference use: the output with and without a graph, the final state, and the
gradient of each parameter under a random cotangent.

The tolerance is measured, not guessed. A float64 run of the reference counts as exact. The float32 reference differs from it by
rounding, which grows with the length and with how the cell propagates errors. The fused loop sums in another order and has
its own exp and tanh, so it may differ by MARGIN times that rounding, and the limit is never below FLOOR. If it would exceed
LARGEST, the check is refused. All differences are norms relative to the norm of the exact tensor: one wrong row among a
hundred gives about 1e-1. On a GPU the reference runs in the precision of the case, and FLOOR and LARGEST are those of that
precision.
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
LARGEST = 1e-2  # a reference with a larger rounding error cannot be compared with


def disagreement(layer: Recurrent, x: Tensor, lengths: Tensor | None = None) -> str | None:
    """Where the fused loop differs from the reference on this input, or why that cannot be checked; None if they agree."""
    for name, parameter in layer.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the weight {name} is not finite"
    double = copy.deepcopy(layer).double()
    with use_backend("reference"):
        exact = all_results(double, x.double(), lengths=lengths)
        reference = all_results(layer, x, lengths=lengths)
    with use_backend("fused"):
        fused = all_results(layer, x, lengths=lengths)
    return first_difference(fused, reference, exact)


Results = Mapping[str, Tensor]


def first_difference(
    fused: Results, reference: Results, exact: Results, floor: float = FLOOR, largest: float = LARGEST
) -> str | None:
    """The first result for which `difference` gives a reason, with that reason; None if all agree."""
    for name, tensor in exact.items():
        problem = difference(fused[name], reference[name], tensor, floor, largest)
        if problem:
            return f"{name} {problem}"
    return None


def relative_error(tensor: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact tensor."""
    return float((tensor.double() - exact).norm() / exact.norm())


def largest_error(results: Results, exact: Results) -> float | None:
    """The largest relative error of all results; None if one is not finite, or is zero and has no norm to divide by."""
    largest = max(relative_error(results[name], tensor) for name, tensor in exact.items())
    return largest if math.isfinite(largest) else None


def difference(fused: Tensor, reference: Tensor, exact: Tensor, floor: float = FLOOR, largest: float = LARGEST) -> str | None:
    """What is wrong with a fused tensor; None if it agrees.

    Args:
        fused: The tensor to check.
        reference: The tensor of the reference in the same precision.
        exact: The tensor of the reference in float64.
        floor: Smallest relative error that is allowed in any case.
        largest: Largest relative error that may be allowed.
    """

    def allowed(rounding: float) -> float:
        return max(floor, MARGIN * rounding)

    if not (torch.isfinite(exact).all() and torch.isfinite(reference).all()):
        return "of the reference is not finite, so there is nothing to compare with"
    if not exact.norm() > 0:
        return "of the reference is zero, so there is nothing to compare with"
    rounding = relative_error(reference, exact)
    if allowed(rounding) > largest:
        return f"of the reference is {rounding:.1e} off by rounding alone, so agreement cannot be checked"
    error = relative_error(fused, exact)
    if math.isfinite(error) and error <= allowed(rounding):
        return None
    return f"is {error:.1e} away from the reference; rounding explains {allowed(rounding):.1e}"


def all_results(module: nn.Module, x: Tensor, **arguments: Any) -> dict[str, Tensor]:
    """What a recurrent module computes on x, by name. The cotangents are the same at every call and in every precision."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        results = {"the output without a graph": module(x, **arguments)[0]}
    output, state = module(x, **arguments)
    parts = state if isinstance(state, tuple) else (state,)
    names = getattr(state, "_fields", [f"state {i}" for i in range(len(parts))])
    differentiable: dict[str, Any] = {"the output": output}
    differentiable |= {f"the final {name}": part for name, part in zip(names, parts, strict=True)}
    tensors = list(differentiable.values())
    cotangents = [random_like(part, generator) for part in tensors]
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(tensors, list(parameters.values()), cotangents, materialize_grads=True)
    results |= {name: part.detach() for name, part in differentiable.items()}
    return results | {f"the gradient of {name}": gradient for name, gradient in zip(parameters, gradients, strict=True)}


def random_like(part: Tensor, generator: torch.Generator) -> Tensor:
    """Normal random numbers with so few digits that they are the same in every precision."""
    return torch.randn(part.shape, generator=generator).bfloat16().to(part)

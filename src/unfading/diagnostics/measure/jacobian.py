"""Step Jacobians: how one step stretches and turns what comes back through it.

    J_t = ds_t/ds_{t-1}   [n, n] of the whole state s;  its block dh_t/dh_{t-1} is that of h alone, the other parts held
    K_t = dh_t/dx_t       [h, I]

A step does not mix rows, so all steps of all rows are taken side by side as one batch, and n backward passes through that one
step give every Jacobian exactly. Past a row's end the state stands still: J_t = I, K_t = 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.diagnostics.measure.observe import Chain, side_by_side, taken


class Spectrum(NamedTuple):
    """What a step does to a gradient, in the median over rows."""

    layer: str
    step: int  # from 1, in the order of processing
    part: str  # h: of h with the rest held; all: of the whole state
    largest: float  # singular value of J_t; where it is exact, low and high are equal to it
    largest_low: float
    largest_high: float
    median: float | None  # None, like the next two, where the state is too large to write J_t out
    smallest: float | None
    radius: float | None  # largest absolute eigenvalue of J_t
    input_largest: float  # singular value of K_t
    input_smallest: float


def state_jacobians(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> Tensor:
    """J_t [S, rows, n, n] of the given steps, counted from 0."""
    inputs, state = side_by_side(chain, times, rows)
    flat, new = stepped(chain, inputs, state)
    J = torch.stack([_gradient(new[:, i].sum(), flat) for i in range(chain.size)], dim=1)
    J = J.reshape(len(times), len(rows), chain.size, chain.size)
    return torch.where(_running(chain, times, rows), J, torch.eye(chain.size, dtype=J.dtype, device=J.device))


def input_jacobians(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> Tensor:
    """K_t [S, rows, h, I] of the given steps."""
    _, state = side_by_side(chain, times, rows)
    x = torch.stack([taken(chain.x[t], rows) for t in times]).requires_grad_()
    # Step by step, since a cell that counts is told each step's own index.
    projected = [chain.cell.project(x[i : i + 1], chain.index[t]) for i, t in enumerate(times)]
    leaves = [_pytree.tree_flatten(each) for each in projected]
    fields = [
        torch.cat([value[0].expand(len(rows), *value.shape[2:]) for value in field])
        for field in zip(*(flat for flat, _ in leaves), strict=True)
    ]
    new = chain.cell.step(_pytree.tree_unflatten(fields, leaves[0][1]), state, _held(chain))[0]
    K = torch.stack([_gradient(new[:, i].sum(), x) for i in range(new.shape[1])], dim=2)
    return torch.where(_running(chain, times, rows), K, 0.0)


def stepped(chain: Chain, inputs: Any, state: Any) -> tuple[Tensor, Tensor]:
    """The whole state before a step as one leaf [rows, n], and after it."""
    flat = torch.cat(list(state), dim=-1).detach().requires_grad_()
    new = chain.cell.step(inputs, type(state)(*flat.split(list(chain.parts.values()), dim=-1)), _held(chain))
    return flat, torch.cat(list(new), dim=-1)


def spectra(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> list[Spectrum]:
    """Singular values and spectral radius at the given steps, of h alone and, where there is more, of the whole state."""
    J = state_jacobians(chain, times, rows).double().cpu()
    K = input_jacobians(chain, times, rows).double().cpu()
    if not (J.isfinite().all() and K.isfinite().all()):
        return []
    # Rows that have ended are left out: they stand still, which no step does.
    running = _running(chain, times, rows)[:, :, 0, 0].cpu()
    seen = torch.linalg.svdvals(K)
    found = []
    for part, size in chain.blocks.items():
        block = J[:, :, :size, :size]
        values, radii = torch.linalg.svdvals(block), torch.linalg.eigvals(block).abs().amax(dim=-1)
        for i, t in enumerate(times):
            rows_of = running[i]
            if rows_of.any():
                own = values[i][rows_of]
                numbers = (own[:, 0], own[:, 0], own[:, 0], own[:, size // 2], own[:, -1], radii[i][rows_of])
                reach = (seen[i][rows_of][:, 0], seen[i][rows_of][:, -1])
                found.append(Spectrum(str(chain.position), t + 1, part, *(float(n.median()) for n in (*numbers, *reach))))
    return found


def features(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> Tensor:
    """[I] how strongly each feature of the input moves h: norm of its column of K_t, root mean square over steps and rows."""
    K = input_jacobians(chain, times, rows).double().cpu()
    return K.square().sum(dim=2).mean(dim=(0, 1)).sqrt()


def spread(T: int, most: int) -> list[int]:
    """At most so many of the steps 0..T-1, evenly, the first and the last among them."""
    if most >= T:
        return list(range(T))
    return sorted({round(i * (T - 1) / (most - 1)) for i in range(most)})


def _held(chain: Chain) -> Any:
    return _pytree.tree_map_only(Tensor, Tensor.detach, chain.weights)


def _running(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> Tensor:
    """[S, rows, 1, 1] whether a row has not ended before its step."""
    steps = torch.tensor(list(times)).unsqueeze(1)
    return (steps < chain.ends[list(rows)]).reshape(len(times), len(rows), 1, 1).to(chain.x[0].device)


def _gradient(value: Tensor, of: Tensor) -> Tensor:
    """Zeros where the graph does not lead there."""
    if not value.requires_grad:
        return torch.zeros_like(of)
    (found,) = torch.autograd.grad(value, [of], retain_graph=True, allow_unused=True)
    return torch.zeros_like(of) if found is None else found

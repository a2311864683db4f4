"""Step Jacobians and their singular values.

    J_t = ds_t/ds_{t-1}   [n, n] of the whole state s; its block dh_t/dh_{t-1} is that of h, with the other parts held fixed
    K_t = dh_t/dx_t       [h, I]

Frames are flattened: n and h count the entries of a state, channel by channel, and I those of an input frame.

A step does not mix rows. All steps of all rows therefore form one batch, and n backward passes through a single step give every
Jacobian exactly. Past the end of a row the state does not change: J_t = I, K_t = 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.diagnostics.measure.observe import Chain, batch_steps, select_rows
from unfading.diagnostics.measure.single_steps import check_single_steps


class Spectrum(NamedTuple):
    """Singular values and spectral radius of the Jacobians of one step: medians over rows."""

    layer: str
    step: int  # from 1, in the order of processing
    part: str  # h: the block of h, with the other parts held fixed; all: the whole state
    largest: float  # singular value of J_t; if it is exact, low and high are equal to it
    largest_low: float
    largest_high: float
    median: float | None  # None, like the next two, if the state is too large to compute J_t
    smallest: float | None
    radius: float | None  # largest absolute eigenvalue of J_t
    input_largest: float  # singular value of K_t
    input_smallest: float | None  # None where K_t is too large to compute


def state_jacobians(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> Tensor:
    """J_t [S, rows, n, n] of the given steps, counted from 0."""
    inputs, state = batch_steps(chain, times, rows)
    flat, new = step_flat_state(chain, inputs, state)
    J = torch.stack([_gradient(new[:, i].sum(), flat) for i in range(chain.size)], dim=1)
    J = J.reshape(len(times), len(rows), chain.size, chain.size)
    return torch.where(_running(chain, times, rows), J, torch.eye(chain.size, dtype=J.dtype, device=J.device))


def input_jacobians(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> Tensor:
    """K_t [S, rows, h, I] of the given steps."""
    check_single_steps(chain.cell, chain.T, reverse=chain.position.backward)
    _, state = batch_steps(chain, times, rows)
    x = torch.stack([select_rows(chain.x[t], rows) for t in times]).requires_grad_()
    # Step by step, because a projection may depend on the index of the step.
    projected = [chain.cell.project(x[i : i + 1], chain.index[t]) for i, t in enumerate(times)]
    leaves = [_pytree.tree_flatten(each) for each in projected]
    fields = [
        torch.cat([value[0].expand(len(rows), *value.shape[2:]) for value in field])
        for field in zip(*(flat for flat, _ in leaves), strict=True)
    ]
    new = chain.cell.step(_pytree.tree_unflatten(fields, leaves[0][1]), state, detached_weights(chain))[0].flatten(1)
    K = torch.stack([_gradient(new[:, i].sum(), x) for i in range(new.shape[1])], dim=2).flatten(3)
    return torch.where(_running(chain, times, rows), K, 0.0)


def step_flat_state(chain: Chain, inputs: Any, state: Any) -> tuple[Tensor, Tensor]:
    """Take one step; the whole state before it, as one leaf tensor [rows, n], and after it."""
    flat = torch.cat([part.flatten(1) for part in state], dim=1).detach().requires_grad_()
    pieces = flat.split(list(chain.parts.values()), dim=1)
    state = type(state)(*(piece.reshape(part.shape) for piece, part in zip(pieces, state, strict=True)))
    new = chain.cell.step(inputs, state, detached_weights(chain))
    return flat, torch.cat([part.flatten(1) for part in new], dim=1)


def spectra(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> list[Spectrum]:
    """Singular values and spectral radius at the given steps, of the block of h and, if there are more parts, of J_t."""
    J = state_jacobians(chain, times, rows).double().cpu()
    K = input_jacobians(chain, times, rows).double().cpu()
    if not (J.isfinite().all() and K.isfinite().all()):
        return []
    # Rows that have ended are left out: their identity Jacobian is not that of a step.
    running = _running(chain, times, rows)[:, :, 0, 0].cpu()
    input_values = torch.linalg.svdvals(K)
    results = []
    for part, size in chain.blocks.items():
        block = J[:, :, :size, :size]
        values, radii = torch.linalg.svdvals(block), torch.linalg.eigvals(block).abs().amax(dim=-1)
        for i, t in enumerate(times):
            active = running[i]
            if active.any():
                sigma, of_input = values[i][active], input_values[i][active]
                columns = (
                    *(sigma[:, 0], sigma[:, 0], sigma[:, 0], sigma[:, size // 2], sigma[:, -1], radii[i][active]),
                    *(of_input[:, 0], of_input[:, -1]),
                )
                results.append(Spectrum(str(chain.position), t + 1, part, *(float(column.median()) for column in columns)))
    return results


def features(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> Tensor:
    """The effect of each input feature on h, [I]: norm of its column of K_t, root mean square over steps and rows."""
    K = input_jacobians(chain, times, rows).double().cpu()
    return K.square().sum(dim=2).mean(dim=(0, 1)).sqrt()


def evenly_spaced(T: int, most: int) -> list[int]:
    """At most `most` of the steps 0..T-1, evenly spaced, including the first and the last."""
    if most >= T:
        return list(range(T))
    return sorted({round(i * (T - 1) / (most - 1)) for i in range(most)})


def detached_weights(chain: Chain) -> Any:
    """The weights of the cell, without a gradient."""
    return _pytree.tree_map_only(Tensor, Tensor.detach, chain.weights)


def _running(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> Tensor:
    """Whether a row has not ended before a step, [S, rows, 1, 1]."""
    steps = torch.tensor(list(times)).unsqueeze(1)
    return (steps < chain.ends[list(rows)]).reshape(len(times), len(rows), 1, 1).to(chain.x[0].device)


def _gradient(value: Tensor, of: Tensor) -> Tensor:
    """d value / d of; zeros if value does not depend on it."""
    if not value.requires_grad:
        return torch.zeros_like(of)
    (gradient,) = torch.autograd.grad(value, [of], retain_graph=True, allow_unused=True)
    return torch.zeros_like(of) if gradient is None else gradient

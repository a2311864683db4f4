"""The lattice and the equilibria of a model that was observed, at as many steps as a few seconds allow.

Both are exact where they are taken. They are taken at steps spread evenly from the first to the last, where there are more than

    lattice       STEPS of a layer, or POINTS of all layers
    equilibria    VISITS of all layers that take inner steps, of the longest row; a quarter where the state has more than LARGE
                  entries, none where it has more than MOST: each costs decompositions of a matrix of its size

What was left out is said in words.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from unfading.cells.incremental import InnerStepsCell
from unfading.cells.wrap import innermost
from unfading.diagnostics.equilibrium.analysis import EquilibriumAnalysis, along
from unfading.diagnostics.equilibrium.inner_path import revisit
from unfading.diagnostics.measure import lattice as _lattice
from unfading.diagnostics.measure.flatness import Flatness, flatness
from unfading.diagnostics.measure.jacobian import spread
from unfading.diagnostics.measure.lag import Swept
from unfading.diagnostics.measure.lattice import LatticePoint
from unfading.diagnostics.measure.observe import Chain, taken

STEPS, POINTS = 32, 400
VISITS, LARGE, MOST = 16, 128, 256
# The step Jacobian is told for K = 1 up to this.
INNER_STEPS = 12


class Lattice(NamedTuple):
    """Points, and what they come to."""

    points: list[LatticePoint]
    flat: dict[str, Flatness]  # by what L is; of one stack that runs forward
    capped: list[str]


class LayerEquilibrium(NamedTuple):
    """How near a layer comes to its equilibrium."""

    layer: str
    steps: list[int]  # at which it was looked at, from 1
    found: EquilibriumAnalysis


def lattice(chains: list[Chain], bars: Mapping[str, Swept]) -> Lattice:
    """G of all layers, for each L by name."""
    most = max(2, min(STEPS, POINTS // len(chains)))
    points, capped = [], []
    for i, chain in enumerate(chains):
        if _lattice.has_one(chain):
            points += _lattice.observed(chain, spread(chain.T, most), {of: bar[i] for of, bar in bars.items()})
        else:
            capped.append(
                f"The lattice leaves out {chain.position}: its output has parameters of its own, or it has none at all."
            )
    if points and most < chains[0].T:
        capped.append(f"The lattice is measured at {most} of {chains[0].T} steps.")
    flat = {}
    if not any(chain.position.bidirectional or chain.position.stack != chains[0].position.stack for chain in chains):
        for of in bars:
            here = [point for point in points if point.of == of]
            steps = sorted({point.step for point in here})
            G = torch.tensor([point.value for point in here], dtype=torch.float64).reshape(-1, max(1, len(steps)))
            # Nothing can be told of what no gradient reaches.
            if len(G) == len(chains) and len(steps) > 1 and G.isfinite().all() and G[-1, -1] > 0:
                flat[of] = flatness(G, steps)
    return Lattice([point for point in points if point.value < torch.inf], flat, capped)


def equilibria(chains: list[Chain]) -> tuple[list[LayerEquilibrium], list[str]]:
    """Of every layer that takes inner steps; and what was left out."""
    those = [chain for chain in chains if isinstance(innermost(chain.cell), InnerStepsCell)]
    small = [chain for chain in those if chain.size <= MOST]
    capped = [
        f"The equilibrium of {chain.position} is not measured: its state has more than {MOST} entries. Call "
        f"unfading.diagnostics.equilibrium.analysis.equilibrium for it."
        for chain in those
        if chain.size > MOST
    ]
    found = []
    for chain in small:
        row = int(chain.ends.argmax())
        end = int(chain.ends[row])
        most = max(2, (VISITS if chain.size <= LARGE else VISITS // 4) // len(small))
        times = spread(end, most)
        if len(times) < end:
            capped.append(f"The equilibrium is measured at {len(times)} of {end} steps, of one row.")
        measured = along(revisit(chain, times, [row]), taken(chain.x[times[-1]], [row]), inner_steps=INNER_STEPS)
        found.append(LayerEquilibrium(str(chain.position), [t + 1 for t in times], measured))
    return found, list(dict.fromkeys(capped))

"""All measurements of one model on one batch, as plain values. `verdict` interprets them.

Everything is exact where it is measured, except for the norms of states with more than `exact_up_to` entries. To finish in
seconds, some measurements use a subset of the steps, evenly spaced from the first to the last:

    step Jacobians    SPECTRA steps of ROWS rows; 6 steps of one row if the state has more than LARGE entries
    lags              a growing distance between lags, larger for large states; see `lag.choose_lags`
    lattice           LATTICE_STEPS steps of a layer, and LATTICE_POINTS points over all layers
    equilibria        EQUILIBRIUM_STEPS steps over all layers that take inner steps, of the longest row; a quarter of them if
                      the state has more than LARGE entries, none above EQUILIBRIUM_SIZE, because each step decomposes matrices

`Measures.capped` says in words what was left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.incremental import InnerStepsCell
from unfading.cells.wrap import innermost
from unfading.diagnostics.equilibrium.analysis import EquilibriumAnalysis, analyse_path
from unfading.diagnostics.equilibrium.inner_path import observed_path
from unfading.diagnostics.measure import jacobian, lag, random_probes
from unfading.diagnostics.measure.jacobian import Spectrum, evenly_spaced
from unfading.diagnostics.measure.lag import GradientNorm, LagNorm, StateGradients
from unfading.diagnostics.measure.lattice import Flatness, LatticePoint, flatness, has_lattice, observed_points
from unfading.diagnostics.measure.memory import MemoryUse, memory_map
from unfading.diagnostics.measure.observe import Chain, select_rows
from unfading.diagnostics.measure.saturation import Activation, StateSize, activations, state_sizes
from unfading.layers.recurrent import Recurrent

# Steps and rows whose Jacobians are measured; rows whose activations are measured; number of Gaussian probes.
SPECTRA, ROWS, ACTIVATION_ROWS, PROBES = 16, 2, 8, 16
# Entries of the states whose activations are measured at most.
ACTIVATION_ENTRIES = 10_000_000
# States with more entries are measured at fewer steps, lags and rows, because the cost of a decomposition grows with the cube.
LARGE = 128
LATTICE_STEPS, LATTICE_POINTS = 32, 400
EQUILIBRIUM_STEPS, EQUILIBRIUM_SIZE = 16, 256
# The step Jacobian of an incremental cell is measured for K = 1 up to this.
INNER_STEPS = 12


class LayerEquilibrium(NamedTuple):
    """The equilibrium analysis of one layer."""

    layer: str
    steps: list[int]  # the measured steps, from 1
    analysis: EquilibriumAnalysis


@dataclass(frozen=True)
class Measures:
    """One model on one batch. Layers are listed from the input up. If anything is not finite, nothing is measured."""

    model: str
    layers: tuple[str, ...]
    top: tuple[str, ...]  # the layers whose output the head reads
    steps: int  # of the longest row
    rows: int
    parameters: int
    loss: str | None  # the name of the loss; None without a loss
    broken: tuple[str, ...]  # what is not finite: parameters, input, states, loss
    features: tuple[float, ...] = ()  # the effect of each input feature, or channel of frames, on h of the first layer
    spectra: tuple[Spectrum, ...] = ()
    lags: tuple[LagNorm, ...] = ()
    ratios: dict[str, float] = field(default_factory=dict)  # by layer: ||dh_T/dh_1|| / ||dh_T/dh_{T-1}||
    end: tuple[GradientNorm, ...] = ()  # L is a random direction of the top layer's last output
    gradients: tuple[GradientNorm, ...] = ()  # L is the loss; empty without a loss
    activations: tuple[Activation, ...] = ()
    sizes: tuple[StateSize, ...] = ()
    memory: tuple[MemoryUse, ...] = ()  # of the layer that reads the input
    lattice: tuple[LatticePoint, ...] = ()
    flat: dict[str, Flatness] = field(default_factory=dict)  # of the lattice, by L: loss, end; only for one forward stack
    equilibria: tuple[LayerEquilibrium, ...] = ()  # of layers that take inner steps
    capped: tuple[str, ...] = ()  # one sentence for each measurement that was limited or left out

    def curve(self, layer: str, *, loss: bool) -> list[GradientNorm]:
        """||dL/ds_t|| of a layer by lag, for the loss or for the end."""
        return [norm for norm in (self.gradients if loss else self.end) if norm.layer == layer]

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values: a list of dicts for each measurement."""
        rows = {
            name: [value._asdict() for value in getattr(self, name)]
            for name in ("spectra", "lags", "end", "gradients", "activations", "sizes", "memory", "lattice")
        }
        rows["equilibria"] = [{"layer": e.layer, "steps": e.steps, **e.analysis._asdict()} for e in self.equilibria]
        rows["flat"] = [{"of": of, **numbers._asdict()} for of, numbers in self.flat.items()]
        single = ("model", "layers", "top", "steps", "rows", "parameters", "loss", "broken", "features", "ratios", "capped")
        values = {name: getattr(self, name) for name in single}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()} | rows


def measure(
    model: nn.Module,
    chains: list[Chain],
    *,
    broken: list[str],
    loss: Tensor | None,
    loss_name: str | None,
    exact_up_to: int,
    generator: Generator,
) -> Measures:
    """Measure an observed model.

    Args:
        model: the model.
        chains: of its forward pass, from `observe`.
        broken: what is not finite; if there is anything, only the description of the model is returned.
        loss: the value of the loss; None without one.
        loss_name: what the loss is called.
        exact_up_to: the Jacobians of states with more entries are estimated by random probes.
        generator: of probes and random directions.
    """
    first, last = chains[0], chains[-1].position
    names = [str(chain.position) for chain in chains]
    description = Measures(
        model=_describe(model),
        layers=tuple(names),
        top=tuple(str(c.position) for c in chains if (c.position.stack, c.position.layer) == (last.stack, last.layer)),
        steps=int(first.ends.max()),
        rows=len(first.ends),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        loss=loss_name,
        broken=tuple(broken),
    )
    if broken:
        return description
    spectra, lags = _jacobian_measures(chains, exact_up_to, generator)
    gradients = {"end": lag.state_gradients(chains, lag.random_end_loss(chains, generator))}
    if loss is not None:
        gradients["loss"] = lag.state_gradients(chains, loss)
    lattice = sampled_lattice(chains, gradients)
    equilibria, left_out = sampled_equilibria(chains)
    longest = _longest_rows(first)[:ROWS]
    return replace(
        description,
        features=tuple(_features(first, longest, generator).tolist()),
        spectra=tuple(spectra),
        lags=tuple(lags),
        ratios={name: ratio for name in names if (ratio := lag.ratio(lags, name)) is not None},
        end=tuple(lag.gradient_norms(chains, gradients["end"])),
        gradients=tuple(lag.gradient_norms(chains, gradients["loss"])) if "loss" in gradients else (),
        activations=tuple(a for chain in chains for a in activations(chain, _activation_rows(chain))),
        sizes=tuple(size for chain in chains for size in state_sizes(chain)),
        memory=tuple(memory_map(first, longest, probes=PROBES, generator=generator)),
        lattice=tuple(lattice.points),
        flat=lattice.flat,
        equilibria=tuple(equilibria),
        capped=(*lattice.capped, *left_out),
    )


def _jacobian_measures(chains: list[Chain], exact_up_to: int, generator: Generator) -> tuple[list[Spectrum], list[LagNorm]]:
    """Spectra of the step Jacobians and norms over the lag, of the longest rows of every layer."""
    spectra: list[Spectrum] = []
    lags: list[LagNorm] = []
    for chain in chains:
        end, small = int(chain.ends.max()), chain.size <= LARGE
        rows = _longest_rows(chain)[: ROWS if small else 1]
        times = evenly_spaced(end, SPECTRA if small else 6)
        if chain.size <= exact_up_to:
            spectra += jacobian.spectra(chain, times, rows)
            lags += lag.exact_norms(
                chain, rows, lag.choose_lags(end) if small else lag.choose_lags(end, all_up_to=4, factor=1.2)
            )
        else:
            few = lag.choose_lags(end, all_up_to=1, factor=2.0)
            spectra += random_probes.spectra(chain, times, rows, probes=PROBES, generator=generator)
            lags += lag.estimated_norms(chain, rows, few, probes=PROBES, generator=generator)
    return spectra, lags


def _features(first: Chain, rows: list[int], generator: Generator) -> Tensor:
    """The effect of each input feature, or of each channel of frames, on h of the first layer."""
    times = evenly_spaced(first.T, 8)
    if first.frame:
        return random_probes.channels(first, times, rows, probes=PROBES, generator=generator)
    return jacobian.features(first, times, rows)


def _activation_rows(chain: Chain) -> list[int]:
    return _longest_rows(chain)[: max(1, min(ACTIVATION_ROWS, ACTIVATION_ENTRIES // (chain.T * chain.size)))]


def _longest_rows(chain: Chain) -> list[int]:
    """All rows, the longest first."""
    return chain.ends.argsort(descending=True, stable=True).tolist()


class SampledLattice(NamedTuple):
    """The lattice at some of the steps."""

    points: list[LatticePoint]
    flat: dict[str, Flatness]  # by the name of L; empty unless there is a single stack that runs forward
    capped: list[str]


def sampled_lattice(chains: list[Chain], gradients: Mapping[str, StateGradients]) -> SampledLattice:
    """G of all layers for each L, from dL/ds_t by the name of L."""
    most = max(2, min(LATTICE_STEPS, LATTICE_POINTS // len(chains)))
    points: list[LatticePoint] = []
    capped = []
    for i, chain in enumerate(chains):
        if has_lattice(chain):
            of_chain = {of: by_chain[i] for of, by_chain in gradients.items()}
            points += observed_points(chain, evenly_spaced(chain.T, most), of_chain)
        else:
            capped.append(
                f"The lattice does not include {chain.position}: its output depends directly on parameters, or it has none."
            )
    if points and most < chains[0].T:
        capped.append(f"The lattice is measured at {most} of {chains[0].T} steps.")
    flat = {}
    if not any(chain.position.bidirectional or chain.position.stack != chains[0].position.stack for chain in chains):
        for of in gradients:
            numbers = _flatness([point for point in points if point.of == of], len(chains))
            if numbers is not None:
                flat[of] = numbers
    return SampledLattice([point for point in points if point.value < torch.inf], flat, capped)


def _flatness(points: list[LatticePoint], layers: int) -> Flatness | None:
    """The summary of a lattice; None if it is not complete, not finite, or no gradient reaches its last point."""
    steps = sorted({point.step for point in points})
    G = torch.tensor([point.value for point in points], dtype=torch.float64).reshape(-1, max(1, len(steps)))
    complete = len(G) == layers and len(steps) > 1
    return flatness(G, steps) if complete and G.isfinite().all() and G[-1, -1] > 0 else None


def sampled_equilibria(chains: list[Chain]) -> tuple[list[LayerEquilibrium], list[str]]:
    """The equilibrium analysis of every layer that takes inner steps, and sentences on what was limited or left out."""
    incremental = [chain for chain in chains if isinstance(innermost(chain.cell), InnerStepsCell)]
    measured = [chain for chain in incremental if chain.size <= EQUILIBRIUM_SIZE]
    capped = [
        f"The equilibrium of {chain.position} is not measured, because its state has more than {EQUILIBRIUM_SIZE} entries. "
        f"unfading.diagnostics.equilibrium.analysis.equilibrium measures it."
        for chain in incremental
        if chain.size > EQUILIBRIUM_SIZE
    ]
    results = []
    for chain in measured:
        row = int(chain.ends.argmax())
        end = int(chain.ends[row])
        most = max(2, (EQUILIBRIUM_STEPS if chain.size <= LARGE else EQUILIBRIUM_STEPS // 4) // len(measured))
        times = evenly_spaced(end, most)
        if len(times) < end:
            capped.append(f"The equilibrium is measured at {len(times)} of {end} steps, for one row.")
        path = observed_path(chain, times, [row])
        analysis = analyse_path(path, select_rows(chain.x[times[-1]], [row]), inner_steps=INNER_STEPS)
        results.append(LayerEquilibrium(str(chain.position), [t + 1 for t in times], analysis))
    return results, list(dict.fromkeys(capped))


def _describe(model: nn.Module) -> str:
    stacks = [module for module in model.modules() if isinstance(module, Recurrent)]
    names = ", ".join(f"{type(stack).__name__}({stack.extra_repr()})" for stack in stacks[:2])
    return names if isinstance(model, Recurrent) else f"{type(model).__name__} with {names}"

"""All that is measured of a model, as plain values; what is said of it is in `verdict`."""

from dataclasses import dataclass
from typing import Any

from unfading.diagnostics.measure.flatness import Flatness
from unfading.diagnostics.measure.jacobian import Spectrum
from unfading.diagnostics.measure.lag import Gradient, Lag
from unfading.diagnostics.measure.lattice import LatticePoint
from unfading.diagnostics.measure.memory import Square
from unfading.diagnostics.measure.saturation import Activation, Size
from unfading.diagnostics.sampled import LayerEquilibrium


@dataclass(frozen=True)
class Measures:
    """One model on one batch. Layers are named from the input up."""

    model: str
    layers: tuple[str, ...]
    top: tuple[str, ...]  # the layers whose output the head reads
    steps: int  # of the longest row
    rows: int
    parameters: int
    loss: str | None  # the name of the loss; None where there was none
    broken: tuple[str, ...]  # what is not finite: parameters, input, states, loss
    features: tuple[float, ...]  # how strongly each feature of the first layer's input moves its h
    spectra: tuple[Spectrum, ...]
    lags: tuple[Lag, ...]
    ratios: dict[str, float]  # by layer: ||dh_T/dh_1|| / ||dh_T/dh_{T-1}||
    end: tuple[Gradient, ...]  # L is a random direction of the top layer's last output
    gradients: tuple[Gradient, ...]  # L is the loss; empty where there was none
    activations: tuple[Activation, ...]
    sizes: tuple[Size, ...]
    memory: tuple[Square, ...]  # of the layer that reads the input
    lattice: tuple[LatticePoint, ...]
    flat: dict[str, Flatness]  # what the lattice comes to, for the loss and for the end; of one stack that runs forward
    equilibria: tuple[LayerEquilibrium, ...]  # of layers that take inner steps
    capped: tuple[str, ...]  # what was measured in part, or not at all, to save time: a sentence each

    def curve(self, layer: str, *, loss: bool) -> list[Gradient]:
        """||dL/ds_t|| of a layer by lag, for the loss or for the end."""
        return [each for each in (self.gradients if loss else self.end) if each.layer == layer]

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it: rows of dicts under the names of the measures."""
        rows = {
            name: [each._asdict() for each in getattr(self, name)]
            for name in ("spectra", "lags", "end", "gradients", "activations", "sizes", "memory", "lattice")
        }
        rows["equilibria"] = [{"layer": each.layer, "steps": each.steps, **each.found._asdict()} for each in self.equilibria]
        rows["flat"] = [{"of": of, **numbers._asdict()} for of, numbers in self.flat.items()]
        alone = ("model", "layers", "top", "steps", "rows", "parameters", "loss", "broken", "features", "ratios", "capped")
        about = {name: getattr(self, name) for name in alone}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in about.items()} | rows

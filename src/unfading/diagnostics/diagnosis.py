"""`unfading.diagnose`: look into a model's gradients, and say what was found.

found = unfading.diagnose(model, x)              # or a Batch, whose target gives a loss
print(found)                                     # the verdict, in a few lines
found.rows()                                     # every number, as JSON has it
found.write("report.html")                       # one page with the figures, the verdict on top
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from unfading.diagnostics import remedy, sampled, verdict
from unfading.diagnostics.measure import jacobian, lag, memory, saturation
from unfading.diagnostics.measure import random_probes as probe
from unfading.diagnostics.measure.observe import Chain, evaluating, observe
from unfading.diagnostics.measures import Measures
from unfading.diagnostics.remedy import Advice
from unfading.diagnostics.verdict import Finding
from unfading.errors import check_count
from unfading.layers.recurrent import Recurrent
from unfading.report import gradient_page
from unfading.tasks.base import Batch, cross_entropy

# Steps at which a spectrum is taken; rows whose Jacobians are measured and rows whose activations are; Gaussian probes.
SPECTRA, ROWS, HEARD, PROBES = 16, 2, 8, 16
# States of more entries than this are looked at in one row and at fewer steps and lags: decompositions cost their cube.
LARGE = 128

# What L is, in words.
OF = {"loss": "loss", "end": "last output"}

Loss = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, what it means, and what is worth trying. Print it, or write its page."""

    measures: Measures
    verdict: str  # one sentence
    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...]

    @property
    def clean(self) -> bool:
        """Whether no fault was found; notes may still have been."""
        return not any(finding.fault for finding in self.findings)

    def rows(self) -> dict[str, Any]:
        """Everything as plain values that JSON takes: a list of dicts for each measure, the verdict, findings and advice."""
        said = {
            "verdict": self.verdict,
            "clean": self.clean,
            "findings": [finding._asdict() for finding in self.findings],
            "advice": [each._asdict() for each in self.advice],
        }
        return said | self.measures.plain()

    def write(self, path: str | Path, *, png: bool = False) -> list[Path]:
        """Write one HTML page that works offline, and with `png` its figures beside it; the paths written, page first."""
        return gradient_page.write(self.rows(), Path(path), png=png)

    def __str__(self) -> str:
        m = self.measures
        lines = [
            self.verdict,
            f"{m.model}, {m.steps} steps, {m.rows} rows, loss: {m.loss or 'none, the last output instead'}",
            "",
        ]
        for finding in self.findings:
            lines += _wrapped("! " if finding.fault else "- ", finding.sentence)
        if self.advice:
            lines += ["", "Worth trying:"]
            for i, each in enumerate(self.advice, 1):
                lines += _wrapped(f"{i}. ", f"{each.change} {each.evidence}")
        if m.ratios:
            told = ", ".join(f"{layer} {value:.2g}" for layer, value in m.ratios.items())
            lines += ["", *_wrapped("", f"||dh_T/dh_1|| / ||dh_T/dh_(T-1)||: {told}.")]
        for of, flat in m.flat.items() if len(m.layers) > 1 else ():
            told = (
                f"the bottom layer has {flat.bottom_to_top:.2g} of the top one's; {flat.share_within_ten:.0%} of all layers "
                f"and steps are within a factor of ten of the top layer's last step"
            )
            lines += ["", *_wrapped("", f"Gradient of the parameters, of the {OF[of]}: {told}.")]
        for inner in m.equilibria:
            lines += ["", *_wrapped("", f"Inner steps of {inner.layer}: {inner.found}")]
        lines += ["", *(line for said in m.capped for line in _wrapped("", said))]
        return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip()


def diagnose(
    model: nn.Module,
    x: Tensor | PackedSequence | Batch,
    *,
    loss: Loss | None = None,
    exact_up_to: int = 512,
    seed: int = 0,
) -> Diagnosis:
    """Measure where a model's gradients vanish, explode or survive, on this input, and say so.

    The model is run without noise and left as it was.

    Args:
        model: any module with a layer of unfading in it: a layer, a `Recurrent` of your own cell, a `Model`, your own.
        x: what the model is called with, or a `Batch` (then the loss is measured too, and its lengths are passed on).
        loss: (prediction, batch) -> scalar, such as a task's `loss`. Without it a batch with int64 targets has cross
            entropy, others the mean squared error.
        exact_up_to: states of up to so many entries are measured exactly, larger ones by random probes with intervals.
        seed: of probes and random directions.
    """
    check_count("exact_up_to", exact_up_to)
    if not isinstance(model, nn.Module):
        raise TypeError(f"diagnose takes a torch.nn.Module; got {type(model).__name__}.")
    if not isinstance(x, Tensor | PackedSequence | Batch):
        raise TypeError(f"diagnose takes a Tensor, a PackedSequence or a Batch; got {type(x).__name__}.")
    if loss is not None and not isinstance(x, Batch):
        raise TypeError("a loss needs targets; pass a Batch(x, target) in place of the tensor, or leave the loss out.")
    batch = x if isinstance(x, Batch) else Batch(x, torch.empty(0))  # type: ignore[arg-type]
    # All of it, since projections are run again when Jacobians are measured.
    with evaluating(model):
        return _diagnosed(model, batch, _usual if loss is None and isinstance(x, Batch) else loss, exact_up_to, seed)


def _diagnosed(model: nn.Module, batch: Batch, loss: Loss | None, exact_up_to: int, seed: int) -> Diagnosis:
    generator = torch.Generator().manual_seed(seed)
    broken = _broken(model, batch)
    prediction, chains = observe(model, batch)
    value = None if loss is None else loss(prediction, batch)
    named = None if loss is None else _name(loss, batch)
    broken += _broken_on_the_way(chains, value)
    measures = _measured(model, chains, broken, value, named, exact_up_to, generator)
    found = verdict.findings(measures)
    stack = model.get_submodule(chains[0].position.stack)
    assert isinstance(stack, Recurrent)
    given = remedy.advice(measures, found, stack, chains[0], generator)
    return Diagnosis(measures, verdict.headline(measures, found), tuple(found), tuple(given))


def _measured(
    model: nn.Module,
    chains: list[Chain],
    broken: list[str],
    value: Tensor | None,
    named: str | None,
    exact_up_to: int,
    generator: Generator,
) -> Measures:
    last, first = chains[-1].position, chains[0]
    sound = not broken
    spectra, lags, activations = [], [], []
    for chain in chains if sound else []:
        # The longest rows, of which the most can be told.
        rows = chain.ends.argsort(descending=True, stable=True).tolist()
        end = int(chain.ends.max())
        times = jacobian.spread(end, SPECTRA if chain.size <= LARGE else 6)
        few = rows[: ROWS if chain.size <= LARGE else 1]
        if chain.size <= exact_up_to:
            spectra += jacobian.spectra(chain, times, few)
            lags += lag.exact(chain, few, lag.chosen(end) if chain.size <= LARGE else lag.chosen(end, all_up_to=4, factor=1.2))
        else:
            spectra += probe.spectra(chain, times, few, probes=PROBES, generator=generator)
            lags += lag.estimated(chain, few, lag.chosen(end, all_up_to=1, factor=2.0), probes=PROBES, generator=generator)
        activations += saturation.activations(chain, rows[:HEARD])
    rows = first.ends.argsort(descending=True, stable=True).tolist()
    names = [str(chain.position) for chain in chains]
    ratios = {name: ratio for name in names if (ratio := lag.ratio(lags, name)) is not None}
    bars = {"end": lag.swept(chains, remedy.end(chains, generator))} if sound else {}
    if sound and value is not None:
        bars["loss"] = lag.swept(chains, value)
    lattice = sampled.lattice(chains, bars) if sound else sampled.Lattice([], {}, [])
    equilibria, left_out = sampled.equilibria(chains) if sound else ([], [])
    return Measures(
        model=_described(model),
        layers=tuple(names),
        top=tuple(str(c.position) for c in chains if (c.position.stack, c.position.layer) == (last.stack, last.layer)),
        steps=int(first.ends.max()),
        rows=len(first.ends),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        loss=named,
        broken=tuple(broken),
        features=tuple(jacobian.features(first, jacobian.spread(first.T, 8), rows[:ROWS]).tolist()) if sound else (),
        spectra=tuple(spectra),
        lags=tuple(lags),
        ratios=ratios,
        end=tuple(lag.gradients(chains, bars["end"])) if "end" in bars else (),
        gradients=tuple(lag.gradients(chains, bars["loss"])) if "loss" in bars else (),
        activations=tuple(activations),
        sizes=tuple(each for chain in chains for each in saturation.sizes(chain)) if sound else (),
        memory=tuple(memory.maps(first, rows[:ROWS], probes=PROBES, generator=generator)) if sound else (),
        lattice=tuple(lattice.points),
        flat=lattice.flat,
        equilibria=tuple(equilibria),
        capped=(*lattice.capped, *left_out),
    )


def _usual(prediction: Tensor, batch: Batch) -> Tensor:
    """Cross entropy for classes, the mean squared error for numbers; over the answers that count."""
    if batch.target.dtype == torch.int64:
        return cross_entropy(prediction, batch.target, batch.mask)
    if prediction.shape != batch.target.shape:
        raise ValueError(
            f"the prediction has shape {list(prediction.shape)}, the batch's target {list(batch.target.shape)}; pass the loss "
            f"that compares them: diagnose(model, batch, loss=task.loss)."
        )
    error = (prediction - batch.target).square()
    return error.mean() if batch.mask is None else error[batch.mask].mean()


def _name(loss: Loss, batch: Batch) -> str:
    if loss is _usual:
        return "cross entropy" if batch.target.dtype == torch.int64 else "mean squared error"
    owner = getattr(loss, "__self__", None)
    return f"that of {type(owner).__name__}" if owner is not None else getattr(loss, "__name__", type(loss).__name__)


def _broken(model: nn.Module, batch: Batch) -> list[str]:
    found = [f"parameter {name}" for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    x = batch.x.data if isinstance(batch.x, PackedSequence) else batch.x
    # What stands in the padding is no input.
    if batch.lengths is None and x.is_floating_point() and not x.isfinite().all():
        found.append("the input")
    return found


def _broken_on_the_way(chains: list[Chain], value: Tensor | None) -> list[str]:
    found = []
    for chain in chains:
        bad = (t for t in range(1, chain.T + 1) if not all(part.isfinite().all() for part in chain.states[t]))
        step = next(bad, None)
        if step is not None:
            found.append(f"the state of {chain.position} from step {step} on")
    if value is not None and value.dim() != 0:
        raise ValueError(f"the loss must be one number; got a tensor of shape {list(value.shape)}. Take its mean.")
    return found + ([] if value is None or value.isfinite() else ["the loss"])


def _described(model: nn.Module) -> str:
    stacks = [module for module in model.modules() if isinstance(module, Recurrent)]
    told = ", ".join(f"{type(stack).__name__}({stack.extra_repr()})" for stack in stacks[:2])
    return told if isinstance(model, Recurrent) else f"{type(model).__name__} with {told}"


def _wrapped(mark: str, sentence: str) -> list[str]:
    return textwrap.wrap(sentence, width=100, initial_indent=mark, subsequent_indent=" " * len(mark))

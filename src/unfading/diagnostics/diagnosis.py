"""`unfading.diagnose`: measure a model's gradients and report what is wrong with them.

diagnosis = unfading.diagnose(model, x)          # or a Batch, whose target gives a loss
print(diagnosis)                                 # the verdict, in a few lines
diagnosis.rows()                                 # every number, as JSON values
diagnosis.write("report.html")                   # one page with the figures, the verdict at the top
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from unfading.diagnostics import remedy, verdict
from unfading.diagnostics.measure.observe import Chain, evaluation_mode, observe
from unfading.diagnostics.measures import Measures, measure
from unfading.diagnostics.remedy import Advice
from unfading.diagnostics.verdict import Finding
from unfading.errors import check_count, check_seed
from unfading.layers.recurrent import Recurrent
from unfading.report import diagnosis_page
from unfading.tasks.base import Batch, cross_entropy

Loss = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class Diagnosis:
    """Measurements of a model, the findings from them, and changes worth trying. Print it, or write its page."""

    measures: Measures
    verdict: str  # one sentence
    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...]

    @property
    def clean(self) -> bool:
        """Whether there is no fault; there may be notes."""
        return not any(finding.fault for finding in self.findings)

    def rows(self) -> dict[str, Any]:
        """Everything as JSON values: the verdict, findings and advice, and a list of dicts for each measurement."""
        summary = {
            "verdict": self.verdict,
            "clean": self.clean,
            "findings": [finding._asdict() for finding in self.findings],
            "advice": [change._asdict() for change in self.advice],
        }
        return summary | self.measures.as_json()

    def write(self, path: str | Path, *, png: bool = False) -> list[Path]:
        """Write one HTML page that works offline, and with `png` its figures next to it; returns the paths, page first."""
        return diagnosis_page.write(self.rows(), Path(path), png=png)

    def __str__(self) -> str:
        m = self.measures
        lines = [
            self.verdict,
            f"{m.model}, {m.steps} steps, {m.rows} rows, loss: {m.loss or 'none, the last output instead'}",
            "",
        ]
        for finding in self.findings:
            lines += _wrap("! " if finding.fault else "- ", finding.sentence)
        if self.advice:
            lines += ["", "Worth trying:"]
            for i, change in enumerate(self.advice, 1):
                lines += _wrap(f"{i}. ", f"{change.change} {change.evidence}")
        for sentence in _summary(m):
            lines += ["", *_wrap("", sentence)]
        lines += ["", *(line for sentence in m.capped for line in _wrap("", sentence))]
        return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip()


def diagnose(
    model: nn.Module,
    x: Tensor | PackedSequence | Batch,
    *,
    loss: Loss | None = None,
    exact_up_to: int = 512,
    seed: int = 0,
) -> Diagnosis:
    """Measure where a model's gradients vanish, explode or keep their size on an input, and report it.

    The model runs without noise and is left unchanged.

    Args:
        model: any module that contains a layer of unfading: a layer, a `Recurrent` with your own cell, a `Model`, your own.
        x: the input of the model, or a `Batch`. With a batch the loss is measured too, and its lengths are passed on.
        loss: function (prediction, batch) -> scalar, such as a task's `loss`. By default the cross entropy for a batch with
            int64 targets, and the mean squared error for others.
        exact_up_to: the Jacobians of states with at most this many entries are exact; those of larger states are estimated
            from random vectors, with intervals. Of a convolutional layer every pixel of every channel is an entry.
        seed: seed of these vectors and of the random direction that replaces a loss.
    """
    check_count("exact_up_to", exact_up_to)
    check_seed("seed", seed)
    if not isinstance(model, nn.Module):
        raise TypeError(f"diagnose takes a torch.nn.Module; got {type(model).__name__}.")
    if not isinstance(x, Tensor | PackedSequence | Batch):
        raise TypeError(f"diagnose takes a Tensor, a PackedSequence or a Batch; got {type(x).__name__}.")
    if loss is not None and not isinstance(x, Batch):
        raise TypeError("a loss needs targets; pass a Batch(x, target) instead of the tensor, or leave out the loss.")
    batch = x if isinstance(x, Batch) else Batch(x, torch.empty(0))  # type: ignore[arg-type]
    # Evaluation mode for everything, because measuring Jacobians runs projections again.
    with evaluation_mode(model):
        return _diagnose(model, batch, _default_loss if loss is None and isinstance(x, Batch) else loss, exact_up_to, seed)


def _diagnose(model: nn.Module, batch: Batch, loss: Loss | None, exact_up_to: int, seed: int) -> Diagnosis:
    generator = torch.Generator().manual_seed(seed)
    prediction, chains = observe(model, batch)
    value = None if loss is None else loss(prediction, batch)
    if value is not None and value.dim() != 0:
        raise ValueError(f"the loss must be one number; got a tensor of shape {list(value.shape)}. Take its mean.")
    measures = measure(
        model,
        chains,
        broken=_not_finite(model, batch, chains, value),
        loss=value,
        loss_name=None if loss is None else _loss_name(loss, batch),
        exact_up_to=exact_up_to,
        generator=generator,
    )
    findings = verdict.findings(measures)
    stack = model.get_submodule(chains[0].position.stack)
    assert isinstance(stack, Recurrent)
    changes = remedy.advice(measures, findings, stack, chains[0], generator)
    return Diagnosis(measures, verdict.headline(measures, findings), tuple(findings), tuple(changes))


def _default_loss(prediction: Tensor, batch: Batch) -> Tensor:
    """Cross entropy for classes, mean squared error for numbers, over the targets that count."""
    if batch.target.dtype == torch.int64:
        return cross_entropy(prediction, batch.target, batch.mask)
    if prediction.shape != batch.target.shape:
        raise ValueError(
            f"the prediction has shape {list(prediction.shape)}, the batch's target {list(batch.target.shape)}; pass the loss "
            f"that compares them: diagnose(model, batch, loss=task.loss)."
        )
    error = (prediction - batch.target).square()
    return error.mean() if batch.mask is None else error[batch.mask].mean()


def _loss_name(loss: Loss, batch: Batch) -> str:
    if loss is _default_loss:
        return "cross entropy" if batch.target.dtype == torch.int64 else "mean squared error"
    owner = getattr(loss, "__self__", None)
    return f"{type(owner).__name__}.loss" if owner is not None else getattr(loss, "__name__", type(loss).__name__)


def _not_finite(model: nn.Module, batch: Batch, chains: list[Chain], loss: Tensor | None) -> list[str]:
    """The parameters, inputs, states and loss that are not finite, in words."""
    names = [f"parameter {name}" for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    x = batch.x.data if isinstance(batch.x, PackedSequence) else batch.x
    # Padding is not checked, because the model does not read it.
    if batch.lengths is None and x.is_floating_point() and not x.isfinite().all():
        names.append("the input")
    for chain in chains:
        steps = (t for t in range(1, chain.T + 1) if not all(part.isfinite().all() for part in chain.states[t]))
        step = next(steps, None)
        if step is not None:
            names.append(f"the state of {chain.position} from step {step} on")
    return names + ([] if loss is None or loss.isfinite() else ["the loss"])


def _summary(m: Measures) -> list[str]:
    """Sentences with the main numbers that are printed whether or not there is a finding."""
    sentences = []
    if m.ratios:
        ratios = ", ".join(f"{value:.2g} in {layer}" for layer, value in m.ratios.items())
        sentences.append(f"||dh_T/dh_1|| / ||dh_T/dh_(T-1)|| is {ratios}.")
    for of, flat in m.flat.items() if len(m.layers) > 1 else ():
        sentences.append(
            f"Parameter gradients of the {'loss' if of == 'loss' else 'last output'}: the bottom layer gets "
            f"{flat.bottom_to_top:.2g} of the top layer's; {flat.share_within_ten:.0%} of all layers and steps are within a "
            f"factor of ten of the top layer's last step."
        )
    sentences += [f"Inner steps of {inner.layer}: {inner.analysis}" for inner in m.equilibria]
    return sentences


def _wrap(mark: str, sentence: str) -> list[str]:
    return textwrap.wrap(sentence, width=100, initial_indent=mark, subsequent_indent=" " * len(mark))

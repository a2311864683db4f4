"""A task and a cell of a user with one fault each, chosen by an option; named by file in tests.

A fault of a task begins at the batch `at` of a split. The target of a regression is the sum of the inputs, of a classification
whether it is large.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

import unfading

T, CLASSES, SYMBOLS = 5, 3, 7


def replaced(**fields):
    return lambda batch: batch._replace(**{name: change(getattr(batch, name)) for name, change in fields.items()})


def put(value, *at):
    def change(part):
        part = part.clone()
        part[at] = value
        return part

    return change


def to(value):
    return lambda part: value


NAN, INF = float("nan"), float("inf")
# What `batch` returns, from the right batch.
BATCHES = {
    "None": lambda batch: None,
    "a tuple": lambda batch: (batch.x, batch.target),
    "a dict": lambda batch: {"x": batch.x, "target": batch.target},
    "x None": replaced(x=to(None)),
    "x a list": replaced(x=lambda x: x.tolist()),
    "x an array": replaced(x=lambda x: x.numpy()),
    "x of one axis": replaced(x=lambda x: x[:, 0].flatten()),
    "x without steps": replaced(x=lambda x: x[:0]),
    "x without rows": replaced(x=lambda x: x[:, :0]),
    "x complex": replaced(x=lambda x: x.to(torch.complex64)),
    "x with rows first": replaced(x=lambda x: x.transpose(0, 1)),
    "x with fewer rows": replaced(x=lambda x: x[:, :-1]),
    "x on another device": replaced(x=lambda x: x.to("meta")),
    "target None": replaced(target=to(None)),
    "target a list": replaced(target=lambda target: target.tolist()),
    "target with fewer rows": replaced(target=lambda target: target[:-1]),
    "target a scalar": replaced(target=lambda target: target.flatten()[0]),
    "target on another device": replaced(target=lambda target: target.to("meta")),
    "lengths a list": replaced(lengths=to([T, T, T, T])),
    "lengths of floats": replaced(lengths=to(torch.full((4,), float(T)))),
    "lengths int32": replaced(lengths=to(torch.full((4,), T, dtype=torch.int32))),
    "too few lengths": replaced(lengths=to(torch.full((3,), T))),
    "length zero": replaced(lengths=to(torch.tensor([T, 0, T, T]))),
    "length negative": replaced(lengths=to(torch.tensor([T, T, -2, T]))),
    "length too long": replaced(lengths=to(torch.tensor([T, T, T, T + 1]))),
    "mask of floats": replaced(mask=to(torch.ones(4))),
    "mask of another shape": replaced(mask=to(torch.ones(9, dtype=torch.bool))),
    "batch raises": lambda batch: {}["no such key"],
    "batch divides by zero": lambda batch: 1 / 0,
    "batch takes an index out of range": lambda batch: [][3],
    "batch adds tensors of other shapes": lambda batch: torch.ones(2) + torch.ones(3),
}
# Only where x, or the target, is of one kind.
NUMBERS = {
    "x of tokens": replaced(x=lambda x: x.long()),
    "x with more features": replaced(x=lambda x: torch.cat([x, x], dim=-1)),
    "x without features": replaced(x=lambda x: x[..., 0]),
    "x nan": replaced(x=put(NAN, 2, 1, 0)),
    "x inf": replaced(x=put(INF, 2, 1, 0)),
}
TOKENS = {
    "token too large": replaced(x=put(SYMBOLS, 2, 1)),
    "token negative": replaced(x=put(-1, 2, 1)),
    "tokens of floats": replaced(x=lambda x: x.float()),
    "tokens with an axis": replaced(x=lambda x: x.unsqueeze(-1)),
}
REGRESSION = {
    "target nan": replaced(target=put(NAN, 1)),
    "target inf": replaced(target=put(-INF, 1)),
    "target of another shape": replaced(target=lambda target: target[:, 0]),
}
LABELS = {
    "label too large": replaced(target=put(CLASSES, 1)),
    "label negative": replaced(target=put(-1, 1)),
    "labels of floats": replaced(target=lambda target: target.float()),
    "labels int32": replaced(target=lambda target: target.int()),
}
# What other methods return, from the right value.
LOSSES = {
    "loss None": to(None),
    "loss a float": lambda loss: float(loss),
    "loss of each row": lambda loss: loss.expand(4),
    "loss of one entry": lambda loss: loss.reshape(1),
    "loss detached": lambda loss: loss.detach(),
    "loss constant": lambda loss: torch.ones(()),
    "loss of other weights": lambda loss: torch.ones((), requires_grad=True) * 2,
    "loss an integer": lambda loss: torch.ones((), dtype=torch.int64),
    "loss raises": lambda loss: {}["no such key"],
    "loss asserts": lambda loss: (_ for _ in ()).throw(AssertionError("rows differ")),
}
METRICS = {
    "metrics None": to(None),
    "metrics a list": lambda metrics: list(metrics.values()),
    "metrics empty": to({}),
    "metric missing": lambda metrics: {"other": metrics["score"]},
    "metric a float": lambda metrics: {"score": float(metrics["score"])},
    "metric of each row": lambda metrics: {"score": metrics["score"].expand(4)},
    "metric a str": lambda metrics: {"score": "good"},
    "metric not named": lambda metrics: {**metrics, 3: metrics["score"]},
    "metrics raises": lambda metrics: {}["no such key"],
}
HEADS = {
    "head None": to(None),
    "head a function": lambda head: lambda output, lengths: output[-1],
    "head of another size": lambda head: unfading.LastStep(99, CLASSES),
    "head raises": lambda head: {}["no such key"],
    "head without lengths": lambda head: nn.Linear(head.answer.in_features, CLASSES),
}
ENCODERS = {
    "encoder None": to(None),
    "encoder of integers": lambda encoder: Rounded(),
    "encoder of another size": lambda encoder: (
        nn.Embedding(SYMBOLS, 5) if isinstance(encoder, nn.Embedding) else nn.Linear(2, 5)
    ),
    "encoder raises": lambda encoder: {}["no such key"],
}
OTHERS = {
    "length zero batches": 0,
    "length negative batches": -3,
    "length a float": 2.5,
    "length a str": "many",
    "input size zero": 0,
    "input size a str": "3",
    "input size None": None,
    "guess a str": "half",
    "guess nan": NAN,
    "guess None": None,
    "weight zero": 0,
    "weight negative": -1,
    "weight None": None,
    "weight a str": "heavy",
    "carried None": None,
    "carried a str": "no",
}
FIELDS = BATCHES | NUMBERS | TOKENS | REGRESSION | LABELS


class Rounded(nn.Module):
    """Returns integers."""

    def forward(self, x):
        return x.long()


@dataclass(frozen=True)
class Broken(unfading.Task):
    """A task with one fault.

    Args:
        kind: "numbers" or "tokens", to "regression" or "classes".
        fault: its name; empty for none.
        at: the batch at which the fault of a batch, a loss or metrics begins.
        split: the split that has it.
    """

    kind: str = "numbers to classes"
    fault: str = ""
    at: int = 0
    split: str = "train"

    paper: ClassVar[str] = "none"
    metric: ClassVar[str] = "score"

    def other(self, name, right):
        return OTHERS[self.fault] if self.fault in OTHERS and self.fault.startswith(name) else right

    @property
    def input_size(self):
        return self.other("input size", 2)

    @property
    def guess(self):
        return self.other("guess", 0.5)

    def batch(self, index, size, *, split, seed, device):
        number = index + 1000 * ["train", "valid", "full", "test"].index(split)
        generator = torch.Generator().manual_seed(7919 * number + seed)
        if self.kind.startswith("tokens"):
            x = torch.randint(SYMBOLS, (T, size), generator=generator)
            total = x.sum(dim=0, keepdim=True).T.float() / 10
        else:
            x = torch.rand(T, size, 2, generator=generator)
            total = x.sum(dim=(0, 2)).unsqueeze(1)
        target = total if self.kind.endswith("regression") else total.squeeze(1).long().clamp(0, CLASSES - 1)
        # Where the faults of loss and metrics begin is written into the lengths: all are T, or the last is one less.
        faulty = split == self.split and index >= self.at
        lengths = torch.full((size,), T) - (torch.arange(size) == size - 1).long() * faulty
        batch = unfading.Batch(x.to(device), target.to(device), lengths.to(device))
        return FIELDS[self.fault](batch) if faulty and self.fault in FIELDS else batch

    def length(self, split, size):
        return self.other("length", 6)

    def loss(self, prediction, batch):
        if self.kind.endswith("regression"):
            loss = functional.mse_loss(prediction, batch.target)
        else:
            loss = functional.cross_entropy(prediction, batch.target)
        return LOSSES[self.fault](loss) if self.fault in LOSSES and batch.lengths[-1] < T else loss

    def metrics(self, prediction, batch):
        score = {"score": prediction.detach().mean()}
        return METRICS[self.fault](score) if self.fault in METRICS and batch.lengths[-1] < T else score

    def head(self, size):
        head = unfading.LastStep(size, 1 if self.kind.endswith("regression") else CLASSES)
        return HEADS[self.fault](head) if self.fault in HEADS else head

    def encoder(self):
        encoder = nn.Embedding(SYMBOLS, 2) if self.kind.startswith("tokens") else nn.Identity()
        return ENCODERS[self.fault](encoder) if self.fault in ENCODERS else encoder

    def weight(self, batch):
        return self.other("weight", batch.x.shape[1])

    def carried(self, index, size, *, split):
        return self.other("carried", False)


class BrokenCell(unfading.ElmanCell):
    """Elman with one fault.

    Args:
        fault: its name.
    """

    def __init__(self, input_size, hidden_size, *, bias=True, fault=""):
        super().__init__(input_size, hidden_size, bias=bias)
        self.fault = fault
        if fault == "constructor raises":
            {}["no such key"]
        if fault == "constructor asserts":
            assert hidden_size < 0, "units"
        if fault == "output size":
            self.output_size += 1

    def initial_state(self, batch):
        state = super().initial_state(batch)
        changed = {
            "state None": None,
            "state a tensor": state.h,
            "state of other rows": type(state)(state.h[:1].repeat(batch + 1, 1)),
        }
        return changed.get(self.fault, state)

    def project(self, x, start=0):
        if self.fault == "project raises":
            return {}["no such key"]
        return super().project(x[..., :1] if self.fault == "project of other features" else x)

    def weights(self):
        return {}["no such key"] if self.fault == "weights raises" else super().weights()

    def step(self, inputs, state, weights):
        if self.fault == "step raises":
            return {}["no such key"]
        if self.fault == "step of other shapes":
            return type(state)(state.h + torch.ones(99))
        new = super().step(inputs, state, weights)
        changed = {
            "step None": None,
            "step a tensor": new.h,
            "step of fewer units": type(new)(new.h[:, 1:]),
            "step of float64": type(new)(new.h.double()),
        }
        return changed.get(self.fault, new)


CELLS = [
    *("constructor raises", "constructor asserts", "output size", "state None", "state a tensor", "state of other rows"),
    *("project raises", "project of other features", "weights raises", "step raises", "step of other shapes", "step None"),
    *("step a tensor", "step of fewer units", "step of float64"),
]

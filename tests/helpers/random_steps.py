"""Random steps for the recurrence compiler: Python functions, written line by line, that use its whole language.

A step is text, so that one that fails can be read, shortened and pasted:

    x0, x1, h0, W0, = *inputs, *states, *weights
    v0 = F.linear(h0, W0[1:4])
    v1 = torch.maximum(v0, x1[:, :3])
    return [0.5 * torch.tanh(v1)]

Each line is evaluated on a few rows of numbers when it is written. This gives its shape, and ensures that it is finite and
that no comparison in it is near a tie, which rounding could decide differently in two programs (`torch.maximum(x, x)` and
similar lines are ties on purpose; both programs decide them alike). Lines with large numbers are scaled, so that numbers stay
near 1.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import random_lines
from tests.helpers.random_lines import LARGEST
from unfading.fuse.trace.recorder import Signature

ROWS = 13  # of the numbers that lines are evaluated on
# Draws that use every operation of the language. A fixed seed, not `derandomize`, which would draw other steps whenever
# this file is moved or edited.
SEED = 5


class Known(NamedTuple):
    """A variable of the step: its name, its value in the example, and whether it has the batch axis."""

    name: str
    probe: Tensor
    batched: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the features."""
        return tuple(self.probe.shape[self.batched :])


class RandomStep(NamedTuple):
    """The lines of a step, its return values, and the sizes of its arguments."""

    lines: tuple[str, ...]
    batched: tuple[bool, ...]  # whether the result of each line has the batch axis
    returns: tuple[str, ...]
    inputs: tuple[int, ...]
    kinds: tuple[str, ...]
    states: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        arguments = [f"x{i}" for i in range(len(self.inputs))] + [f"h{i}" for i in range(len(self.states))]
        arguments += [f"W{i}" for i in range(len(self.weights))]
        body = [f"{', '.join(arguments)}, = *inputs, *states, *weights", *self.lines, f"return [{', '.join(self.returns)}]"]
        return "def step(inputs, states, weights):\n    " + "\n    ".join(body)

    def function(self) -> Callable[..., list[Tensor]]:
        names: dict[str, Any] = dict(NAMES)
        exec(str(self), names)
        return names["step"]

    def signature(self, dtype: torch.dtype = torch.float64) -> Signature:
        return Signature(self.inputs, self.kinds, self.states, self.weights, dtype)

    def cuts(self) -> "list[RandomStep]":
        """The step with its first lines only, shortest first; the new states are computed from the last of them."""
        out = []
        for n, batched in enumerate(self.batched):
            size = f"size(v{n}, {batched})"
            returns = tuple(f"0.5 * h{i} + 0.1 * {size}" for i in range(len(self.states)))
            out.append(self._replace(lines=self.lines[: n + 1], batched=self.batched[: n + 1], returns=returns))
        return out


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cos(x)


def size(x: Tensor, batched: bool) -> Tensor:
    """One number for each row, [B, 1], or one for all rows."""
    flat = x.reshape(len(x), -1) if batched else x.reshape(-1)
    return torch.sin(flat).mean(-1, keepdim=True)


def settled(x: Tensor, y: Tensor, W: Tensor, times: int) -> Tensor:
    """An inner loop."""
    for _ in range(times):
        x = 0.5 * x + 0.4 * torch.tanh(y + F.linear(x, W))
    return x


NAMES = {"torch": torch, "F": F, "without_gradient": without_gradient, "size": size, "settled": settled}


class Writer:
    """A step while it is written. `draw` draws from a strategy of hypothesis."""

    def __init__(self, draw: Callable[..., Any]):
        self.draw = draw
        self.generator = torch.Generator().manual_seed(0)
        self.names = dict(NAMES)
        self.known: list[Known] = []
        self.unused: set[str] = set()
        self.lines: list[str] = []
        self.batched: list[bool] = []
        self.weights: list[tuple[int, ...]] = []
        width = st.integers(1, 9)
        self.kinds = ("sequence", *draw(st.lists(st.sampled_from(["sequence", "shared", "constant"]), max_size=2)))
        self.inputs = tuple(draw(width) for _ in self.kinds)
        self.states = tuple(draw(st.lists(width, min_size=1, max_size=3)))
        for name, widths in (("x", self.inputs), ("h", self.states)):
            for i, n in enumerate(widths):
                self.know(f"{name}{i}", 2 * self.random((ROWS, n)) - 1, True)
        n = self.states[0]
        for shape in draw(st.lists(st.sampled_from([(), (n,), (1, n), (3, n), (2, 3), (2, 2, n)]), max_size=2)):
            self.weight(shape)

    def random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def know(self, name: str, probe: Tensor, batched: bool) -> Known:
        self.names[name] = probe
        self.unused.add(name)
        self.known.append(Known(name, probe, batched))
        return self.known[-1]

    def weight(self, shape: tuple[int, ...]) -> Known:
        """A weight of this shape: an existing one, or a new one."""
        existing = [known for known in self.known if known.name.startswith("W") and tuple(known.probe.shape) == shape]
        if existing and self.number(0, 2):
            return self.one(existing)
        self.weights.append(shape)
        return self.know(f"W{len(self.weights) - 1}", 2 * self.random(shape) - 1, False)

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def one(self, of: Any) -> Any:
        return self.draw(st.sampled_from(list(of)))

    def draw_order(self, n: int) -> list[int]:
        """0..n-1 in some order."""
        return self.draw(st.permutations(range(n)))

    def pick(self, fits: Callable[[Known], bool] = lambda known: True) -> Known:
        """A variable that fits; unused ones and late ones are preferred."""
        fitting = [known for known in reversed(self.known) if math.prod(known.shape) <= LARGEST and fits(known)]
        fitting.sort(key=lambda known: known.name not in self.unused)
        return fitting[min(self.number(0, len(fitting) - 1), self.number(0, len(fitting) - 1))]

    def row(self) -> Known:
        """A value [B, n]."""
        return self.pick(lambda known: known.batched and len(known.shape) == 1)

    def partner(self, x: Known) -> Known:
        """A value that broadcasts with x, with no batch axis against features."""
        return self.pick(lambda y: _broadcast(x, y))

    def run(self, text: str) -> Tensor:
        return eval(text, self.names)

    def add(self, text: str, batched: bool) -> Known:
        """Add a line, scaled if its numbers are too large."""
        largest = self.run(text).abs().max().item()
        text = text if largest <= 3 else f"{2 / largest:.2g} * ({text})"
        probe = self.run(text)
        assert probe.isfinite().all(), text
        self.uses(text)
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.batched.append(batched)
        return self.know(name, probe, batched)

    def uses(self, text: str) -> None:
        self.unused -= set(re.findall(r"\w+", text))

    def matters(self, text: str) -> bool:
        """Whether the result depends on any argument of the step."""
        arguments = {known.name: known.probe.clone().requires_grad_() for known in self.known if known.name[0] in "xhW"}
        names = {**NAMES, **arguments}
        exec("\n".join([*self.lines, f"result = {text}"]), names)
        result = names["result"]
        if not result.requires_grad:
            return False
        gradients = torch.autograd.grad(result.sum(), list(arguments.values()), materialize_grads=True)
        return any(gradient.abs().max() > 1e-3 for gradient in gradients)


def _broadcast(x: Known, y: Known) -> bool:
    a, b = x.shape, y.shape
    if x.batched and y.batched and len(a) != len(b):
        return False
    own, other = (a, b) if x.batched else (b, a)
    if x.batched != y.batched and len(other) > len(own):
        # The first axis of a parameter may be a batch axis of size 1.
        return len(other) == len(own) + 1 and other[0] == 1 and other[1:] == own
    try:
        return math.prod(torch.broadcast_shapes(a, b)) <= LARGEST
    except RuntimeError:
        return False


@st.composite
def steps(draw: Callable[..., Any], longest: int) -> RandomStep:
    w = Writer(draw)
    for _ in range(draw(st.integers(longest // 4, longest))):
        w.one(random_lines.LINES)(w)
    returns = [random_lines.new_state(w, i) for i in range(len(w.states))]
    w.uses(" ".join(returns))
    returns[-1] = random_lines.with_the_rest(w, returns[-1])
    if not w.matters(returns[0]):
        returns[0] = f"0.5 * torch.tanh({returns[0]} + h0 + x0[:, :1])"
    return RandomStep(tuple(w.lines), tuple(w.batched), tuple(returns), w.inputs, w.kinds, w.states, tuple(w.weights))


def some(count: int, longest: int) -> list[RandomStep]:
    """`count` steps of at most `longest` choices each, the same in every run."""
    by_beginning: dict[tuple[str, ...], RandomStep] = {}

    # Hypothesis often draws small changes of its last example; one step of each such family is enough.
    @seed(SEED)
    @settings(
        max_examples=3 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(steps(longest))
    def collect(step: RandomStep) -> None:
        by_beginning.setdefault(step.lines[:3], step)

    collect()
    assert len(by_beginning) >= count
    return list(by_beginning.values())[:count]

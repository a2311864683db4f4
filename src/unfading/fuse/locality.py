"""Whether the projection of a cell may be cut in time: f(x, s) = project(x, start=s) of a sequence, cut anywhere.

A sequence is run in chunks without a gradient, in segments with `checkpoint_every`, in single steps by a stream. This is right
with a projection that is local in time, for every cut a..b of every sequence,

    f(x, s)[a:b] = f(x[a:b], s + a)

and wrong with one along time: a convolution, a shift, a cumulative sum, a normalisation over all steps. In reverse a sequence
is also flipped, row by row with its lengths, and steps are numbered in the order of processing. Then this must hold too:

    f(flip(x), s') = flip(f(x, s))        fields that are `shared` are not flipped

`locality` tests both equations on a copy of the cell, with random data and with parameters that differ a little from the
cell's own, so that a weight that is zero today hides nothing. Fields that are `constant` must be the same for all pieces.
"""

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import pairwise, product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.cells.wrap import innermost
from unfading.fuse.cell_copy import CellCopy, varied, with_data
from unfading.fuse.contents import HOOKS, Contents
from unfading.fuse.equal_cells import EqualCells
from unfading.fuse.isolation import WithoutDraws, apart, numbers
from unfading.fuse.recorded_start import RecordedStart
from unfading.fuse.refusal import Refusal
from unfading.lengths import flip
from unfading.reference import leaf_names
from unfading.source_lines import definition_line, first_line

# Steps of the sequence that is cut: at least LEAST, and up to MOST as many as the caller's, so that a convolution with a long
# reach is noticed where it matters.
LEAST, MOST = 64, 4096
ROWS_AND_STARTS = ((3, 0), (2, 3), (1, 7))  # of the sequences that are cut: project may compute with either number
NUMBERS = 16  # at most, of those that the index of a first step is compared with
STARTS = (1, 2, 3, 1000)  # a flipped sequence is projected from these
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest entry; 1e-2 for other types
DRAWS = ("bernoulli", "bernoulli_", "rand", "randn", "rand_like", "randn_like", "uniform_", "normal_", "normal")


NOT_LOCAL = "project is not local in time: its field {name} differs between a sequence and the parts of it"


class Locality(NamedTuple):
    """What was shown about the projection of a cell."""

    refusal: Refusal | None  # why a sequence cannot be cut in time, with the line of `project`; None where it can be cut
    random: bool = False  # whether it draws random numbers: each piece then has its own, and another cut gives others
    writes: bool = False  # whether it writes attributes of the cell: it would do so once for each piece


class _Answer(NamedTuple):
    reverse: bool
    steps: int  # of the longest sequence that is covered
    locality: Locality

    def covers(self, steps: int, reverse: bool) -> bool:
        return self.reverse == reverse and self.steps >= steps


# For each cell, the last answers, with the contents they were found for: in training and evaluation, in both directions.
_answers: "WeakKeyDictionary[Cell, list[tuple[Contents, _Answer]]]" = WeakKeyDictionary()
_known: EqualCells[_Answer] = EqualCells()


def locality(cell: Cell, steps: int, *, reverse: bool = False) -> Locality:
    """Whether the projection of a sequence may be cut in time: tested at the first call, and when an option has changed.

    Args:
        cell: whose projection is tested.
        steps: of the sequence.
        reverse: whether it is run from its last step to its first.
    """
    answers = _answers.get(cell, [])
    for own, earlier in answers:
        if earlier.covers(steps, reverse) and own.unchanged():
            return earlier.locality
    contents = Contents(cell)
    answer = next((known for known in _known.find(contents) if known.covers(steps, reverse)), None)
    if answer is None:
        tested = max(LEAST, min(MOST, 1 << (steps - 1).bit_length()))
        contents, result = apart(lambda: _tested(cell, tested, steps, reverse))
        covered = tested if tested < MOST and result.refusal is None else sys.maxsize
        answer = _Answer(reverse, covered, result)
        _known.add(contents, answer)
    _answers[cell] = [(contents.for_comparison(), answer), *answers[:3]]
    return answer.locality


def check_local(cells: Iterable[Cell], steps: int, how: str) -> None:
    """Raise ValueError for a cell that cannot run in a certain way, such as "in a stream", since project needs all steps."""
    for cell in cells:
        refusal = locality(cell, steps).refusal
        if refusal is not None:
            raise ValueError(
                f"{type(innermost(cell)).__name__} cannot run {how}: {refusal}. Run the layer over whole sequences, with "
                "checkpoint_every to save memory."
            )


def _tested(cell: Cell, tested: int, steps: int, reverse: bool) -> tuple[Contents, Locality]:
    """The result of the first test that `project` can run: it may have tables of finite length, take only tokens, or compute
    in one precision. With it, the contents of the cell that it depends on."""
    lengths = [tested]
    while lengths[-1] > 8:
        lengths.append(steps if len(lengths) == 1 and 8 < steps < tested else lengths[-1] // 2)
    line = definition_line(innermost(cell).project)
    contents, reasons = Contents(cell), []
    with torch.no_grad():
        for T, sample, dtype in product(lengths, (_heavy_tailed, _tokens), (torch.float64, None)):
            try:
                test = _Test(contents, T, sample, dtype)
                reason = test.difference(reverse)
                written = frozenset(test.copies[0].written())
                result = Locality(None if reason is None else Refusal(reason, line), test.random, bool(written))
                return Contents(cell, written), result
            except Exception as error:  # of the user's code, or of something that cannot be copied
                reasons.append(first_line(error))
    return contents.settled(), Locality(Refusal(f"project could not be tested for locality in time ({reasons[0]})", line))


class _Test:
    """Project one random sequence, whole and in pieces, by a copy of a cell.

    Args:
        contents: of the cell, which is left as it is.
        T: steps of the sequence.
        sample: draws x.
        dtype: of the copy and of x; None for the cell's own parameters as they are.
    """

    def __init__(self, contents: Contents, T: int, sample: Callable[..., Tensor], dtype: torch.dtype | None):
        # Two copies: what a projection stores when it sees the whole sequence must not help it with the pieces.
        self.copies = [CellCopy(contents, with_data if dtype is None else varied(dtype), example=True) for _ in "12"]
        self.cell, self.other = (each.cell for each in self.copies)
        for module in (*self.cell.modules(), *self.other.modules()):  # hooks observe the calls of the user, not a test
            vars(module).update({kind: OrderedDict() for kind in HOOKS})
        like = self.cell.initial_state(1)[0]
        rows = max(rows for rows, _ in ROWS_AND_STARTS)
        x = sample((T, rows, self.cell.input_size, *self.cell.example_frame), torch.Generator().manual_seed(0))
        self.x = x.to(like.device, dtype or like.dtype)
        self.tolerance = TOLERANCE.get(self.x.dtype, 1e-2)
        self.sample, self.random = sample, False
        self.numbers: set[int] = set()  # with which the index of a first step is compared

    def difference(self, reverse: bool) -> str | None:
        """Where the equations do not hold, in words; None where they hold."""
        for rows, start in ROWS_AND_STARTS:
            reason = self._whole_and_pieces(self.x[:, :rows], start)
            if reason is not None:
                return reason
        return (
            self._branches() or (self._constants() if self.cell.constant else None) or (self._reversed() if reverse else None)
        )

    def _whole_and_pieces(self, x: Tensor, start: int) -> str | None:
        T = len(x)
        whole = self._project(x, start)
        borders = sorted({0, *(b for b in (1, 3, 6, 10) if b < T), T // 2 + 1, T - 1, T})  # 1, 2, 3, 4 and more steps
        reason = self._cut(x, start, whole, borders)
        return reason or (self._spread(x, start, whole) if self.sample is _heavy_tailed else None)

    def _cut(self, x: Tensor, start: int, whole: dict[str, Tensor], borders: list[int]) -> str | None:
        # From the last piece to the first, so that a projection that stores what it has seen is noticed too.
        for a, b in reversed(list(pairwise(borders))):
            for name, value in self._project(x[a:b], start + a, cell=self.other).items():
                if name not in self.cell.constant and not self._same(value, whole[name][a:b]):
                    return NOT_LOCAL.format(name=name)
        return None

    def _branches(self) -> str | None:
        """Cut where the index of a first step is a number that `project` compares it with, and beside; for unusual x too."""
        plain = self.x[:8, :1]
        for number, x in product(sorted({0, *self.numbers})[:NUMBERS], (plain, *unusual(plain))):
            start = max(number - 2, 0)
            borders = [0, *(i - start for i in (number - 1, number, number + 1) if 0 < i - start < len(x)), len(x)]
            try:
                whole = self._project(x, start)
                reason = self._cut(x, start, whole, borders)
                if reason is not None and not self._rounding_decides(x, start, whole):
                    return reason
            except Exception:  # beyond the end of a table
                continue
        return None

    def _rounding_decides(self, x: Tensor, start: int, whole: dict[str, Tensor]) -> bool:
        """Whether a field changes with the last digits of x: a product rounds otherwise for a part, and the sine of a large
        number has no digits in float32."""
        noise = (2 * numbers(torch.zeros(1), 0, x.numel()).reshape(x.shape) - 1).to(x)
        other = self._project(x * (1 + 8 * torch.finfo(x.dtype).eps * noise), start)
        return not all(self._same(other[name], whole[name]) for name in whole.keys() - {*self.cell.constant})

    def _spread(self, x: Tensor, start: int, whole: dict[str, Tensor]) -> str | None:
        """NaN in one step must leave the others as they were: what is multiplied by 0 today need not be finite tomorrow."""
        t = len(x) // 2
        try:
            other = self._project(x.index_fill(0, torch.tensor([t], device=x.device), torch.nan), start)
        except Exception:  # project refuses NaN
            return None
        for name in whole.keys() - {*self.cell.constant}:
            parts = ((other[name][part], whole[name][part]) for part in (slice(t), slice(t + 1, None)))
            if not all(self._same(a, b) for a, b in parts):
                return NOT_LOCAL.format(name=name)
        return None

    def _constants(self) -> str | None:
        """One piece computes these fields for all, with its own x and the noise of a single draw."""
        T = len(self.x)
        fields = [self._project(self.x[a:b], a, call=0) for a, b in ((0, T), (0, 1), (T // 2, T))]
        for name in self.cell.constant:
            if not all(self._same(other[name], fields[0][name]) for other in fields[1:]):
                return f"project is not local in time: its constant field {name} depends on x or on the index of the step"
        return None

    def _reversed(self) -> str | None:
        x = self.x[:LEAST, :2]
        lengths = torch.tensor([len(x), len(x) // 2], device=x.device)
        forward = self._project(x, 0, call=0, moving=False)
        for start in (*STARTS, *(number for number in sorted(self.numbers)[:NUMBERS] if number > 0)):
            backward = self._project(flip(x, lengths), start, call=0, moving=False)
            for name in forward.keys() - {*self.cell.constant, *self.cell.shared}:
                if not self._same(backward[name], flip(forward[name], lengths)):
                    return f"in reverse, the field {name} of project depends on the index of the step or on other rows"
        other = self._project(x.flip(0), 0, call=0, moving=False)
        for name in self.cell.shared:
            if not self._same(other[name], forward[name]):
                return f"in reverse, the shared field {name} of project depends on x"
        return None

    def _project(self, x: Tensor, start: int, cell: Cell | None = None, **noise: Any) -> dict[str, Tensor]:
        with Noise(len(x), x.shape[1], start, **noise) as stand_in:
            fields = fields_of(cell or self.cell, x, RecordedStart(start, self.numbers))
        self.random = self.random or stand_in.draws > 0
        return fields

    def _same(self, a: Tensor, b: Tensor) -> bool:
        return same(a, b, self.tolerance)


def unusual(x: Tensor) -> list[Tensor]:
    """Zeros, large numbers and infinities like x, where functions such as the sigmoid are exactly 0 or 1."""
    first = torch.arange(x.shape[-1], device=x.device) == 0
    return [0 * x, 1e4 * x, -1e4 * x, *(torch.where(first, sign * math.inf, x) for sign in (1, -1))]


def fields_of(cell: Cell, x: Tensor, start: int) -> dict[str, Tensor]:
    """The fields that `project` returns, by name."""
    inputs = cell.project(x, start)
    return dict(zip(leaf_names(inputs), _pytree.tree_leaves(inputs), strict=True))


def same(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal up to `tolerance`, which is relative to the largest entry; NaN is equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    size = b.nan_to_num(0.0, 0.0, 0.0).abs().amax().item() if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * size, equal_nan=True)


class Noise(WithoutDraws):
    """In place of random numbers, numbers that depend on the step: a projection that draws for each step alone stays local.

    A draw without an axis of time is different at every call, since each piece would have a draw of its own.

    Args:
        steps: of the sequence that is projected.
        rows: of it.
        start: index of its first step.
        call: a number for draws without an axis of time; by default, another one at every call.
        moving: whether draws differ from step to step.
    """

    calls = 0

    def __init__(self, steps: int, rows: int, start: int, call: int | None = None, moving: bool = True):
        super().__init__()
        Noise.calls += 1
        self.call = Noise.calls if call is None else call
        self.steps, self.rows, self.start, self.moving, self.draws = steps, rows, start, moving, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ones = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return ones
        if name == "native_dropout":
            keep = self._draw(args[0]).round()
            return args[0] * keep, keep.bool()
        if name not in DRAWS:
            raise NotImplementedError(f"{name} draws random numbers")
        drawn = self._draw(ones).round() if name.startswith("bernoulli") else self._draw(ones)
        if name.endswith("_"):
            return ones.copy_(drawn)
        # Probabilities and means, but not a tensor that only gives the shape.
        given = [] if name.endswith("_like") else [each for each in args if isinstance(each, Tensor)]
        return sum(given, drawn)

    def _draw(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1] in the shape of a tensor."""
        self.draws += 1
        shape, T = list(like.shape), self.steps
        axis = next((i for i, n in enumerate(shape) if n in (T, T * self.rows)), None)
        if axis is None:
            return numbers(torch.tensor([self.call]), self.draws, like.numel()).reshape(shape).to(like)
        rest = [shape[axis] // T, *shape[:axis], *shape[axis + 1 :]]
        index = torch.arange(self.start, self.start + T) if self.moving else torch.zeros(T)
        drawn = numbers(index, self.draws, like.numel() // T).reshape(T, *rest)
        return drawn.flatten(0, 1).movedim(0, axis).to(like)


def _heavy_tailed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal numbers, with steps of very different sizes."""
    sizes = torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator).exp()
    return torch.randn(shape, generator=generator) * sizes


def _tokens(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Zeros and ones, for a projection that looks rows up in a table."""
    return torch.randint(0, 2, shape, generator=generator).float()

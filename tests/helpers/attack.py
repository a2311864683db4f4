"""Run random users' cells against the reference: `python -m tests.helpers.attack SEED` shows a cell and what is wrong with it.

    python -m tests.helpers.attack 17                                   one cell, its source and its calls
    python -m tests.helpers.attack 17 --shrink                          and the shortest form that is still wrong
    python -m tests.helpers.attack --cells 20000 --processes 16 --out failures.txt --seconds 500

A cell is loaded twice. One layer runs on the reference loop, each call as one sequence; its results are the truth. The other
runs as the backend "fused" or "auto" would run it, with checkpoints through time, small chunks of time, as a stream, in
threads. Both get the same calls and the same changes in between. Outputs, states, all gradients, buffers and random number
generators must agree. A compiled loop may be refused instead, with a reason; "auto" must then give the results of the
reference, or raise the same error.

Rounding may decide a comparison or be amplified. A difference is therefore counted only if the reference itself is
insensitive to it: it runs again with noise of the size of rounding in every inexact operation (`Rounding`). A cell that
rounding decides in float32 runs again in float64, where rounding hides a billionth of what it hides in float32.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import user_cells
from tests.helpers.cell_calls import Call, Results, Scenario, build, change, perform, scenario
from tests.helpers.user_cells import UserCell
from unfading.fuse import fused as fused_module
from unfading.fuse.c import compiler

REASONS: Counter[str] | None = None  # of refusals, where someone counts them
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-4}  # relative to the largest entry of each tensor
WHOLE = {"stream": "no_grad", "truncated": "grad"}  # how a layer that runs in pieces runs in one
LONGEST = 60.0  # seconds of computation for one cell: other processes may take most of a machine
STUCK = 5 * LONGEST  # seconds after which a process that waits for something is ended


class Wrong(Exception):
    """A result that is not that of the reference; the message says which."""


class Undecided(Exception):
    """The reference itself depends on rounding here."""


class AtPole(Exception):
    """Only gradients differ, and only in which entries are not finite, where the reference has such entries.

    Autograd multiplies zeros by infinities where a path exists but carries nothing, for example past the end of a row; a
    compiled loop has no such path. It passes zeros where autograd passes nothing.
    """


# -- comparison ---------------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """How a result differs; `error` is its relative error, infinite where it is no matter of size."""

    reason: str
    error: float


def differences(got: Results, want: Results, tolerance: float) -> dict[str, Difference]:
    """What differs, by name. NaN, infinities and missing gradients must be in the same places."""
    if set(got) != set(want):
        return {"names": Difference(f"{sorted(got)} instead of {sorted(want)}", float("inf"))}
    usual = [value for value in want.values() if value is not None and value.numel() and value.isfinite().all()]
    floor = max([*(value.abs().max().item() for value in usual), 0.0]) * 1e-3
    pairs = {name: difference(got[name], expected, floor) for name, expected in want.items()}
    return {name: pair for name, pair in pairs.items() if pair.error > tolerance}


def difference(value: Tensor | None, expected: Tensor | None, floor: float) -> Difference:
    if value is None or expected is None:
        words = f"{'None' if value is None else 'a tensor'} instead of {'None' if expected is None else 'a tensor'}"
        return Difference(words, 0.0 if value is expected else float("inf"))
    if value.shape != expected.shape or value.dtype != expected.dtype or value.device != expected.device:
        words = f"{value.dtype} {list(value.shape)} on {value.device} instead of {expected.dtype} {list(expected.shape)}"
        return Difference(words, float("inf"))
    if not torch.equal(value.isnan(), expected.isnan()):
        return Difference(f"{int(value.isnan().sum())} NaN instead of {int(expected.isnan().sum())}", 1e9)
    infinite = expected.isinf()
    if not torch.equal(value.isinf(), infinite) or not torch.equal(value[infinite], expected[infinite]):
        words = f"{int(value.isinf().sum())} infinities instead of {int(infinite.sum())}, or other signs"
        return Difference(words, 1e9)
    plain = expected.isfinite()
    if not plain.any():
        return Difference("", 0.0)
    scale = max(expected[plain].abs().max().item(), floor, 1e-30)
    error = (value[plain].double() - expected[plain].double()).abs().max().item() / scale
    return Difference(f"relative error {error:.2g}", error)


def at_poles(wrong: dict[str, Difference], want: Results, call: Call) -> bool:
    """Whether all differences are entries of gradients that are not finite, among numbers that are not finite anyway."""
    infinite = call.data == "special" or any(value is not None and not value.isfinite().all() for value in want.values())
    words = ("NaN instead", "infinities instead")
    return infinite and all("gradient" in name and any(w in one.reason for w in words) for name, one in wrong.items())


def leftovers(layer: Any) -> Results:
    """What a call may leave behind: parameters, buffers, and the state of the random number generators."""
    values = {f"parameter {name}": p.detach() for name, p in layer.named_parameters()}
    values |= {f"buffer {name}": b.detach().clone() for name, b in layer.named_buffers()}
    return values


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


aten = torch.ops.aten
SUMS = {aten.sum, aten.nansum, aten.mean, aten.var, aten.std, aten.var_mean, aten.std_mean, aten.linalg_vector_norm}
SUMS |= {aten.cumsum, aten.scatter_add, aten.index_add}
SUMS |= {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.linear, aten.matmul}
OF_SUMS = get_decompositions(
    [
        aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data, aten.logsumexp,
        aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
        aten._fused_rms_norm, aten._fused_rms_norm_backward, aten._euclidean_dist,
    ]
)  # fmt: skip


class Rounding(TorchDispatchMode):
    """Multiplies the results of inexact operations by 1 + noise, where noise has the size of rounding.

    Numbers with few binary places are left alone: they are probably exact, and so are the ties among them. An operation that
    sums rounds terms that may cancel, so its operands get noise too: torch's float32 variance of three numbers 0.9 is 5e-15 for
    one row and 0 for two. An operation that computes with a sum inside rounds it too: the gradient g of a softmax y gives
    y (g - sum(g y)), which is 0 where one entry of y is 1, unless g and sum(g y) are rounded apart. Such an operation runs as
    the operations that torch decomposes it into, each with noise.
    """

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OF_SUMS:
            with self:
                return OF_SUMS[func](*args, **(kwargs or {}))
        if func.overloadpacket in SUMS:
            args = _pytree.tree_map_only(Tensor, self.noisy, args)
        out = func(*args, **(kwargs or {}))
        views = any(r.alias_info is not None for r in func._schema.returns)
        if views or func._schema.is_mutable or not any(isinstance(a, Tensor) for a in _pytree.tree_leaves((args, kwargs))):
            return out
        return _pytree.tree_map_only(Tensor, self.noisy, out)

    def noisy(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.is_meta:
            return value
        eps = torch.finfo(value.dtype).eps
        places = 2.0 ** (24 if value.dtype == torch.float64 else 10)
        noise = 2 * torch.rand(value.shape, generator=self.generator, dtype=torch.float64) - 1
        other = value + value * (4 * eps * noise).to(value.dtype)
        few = value.abs() < 0.25 / (eps * places)  # a larger number has no more places, exact or not
        exact = few & ((value * places).round() == value * places)
        return torch.where(exact | ~value.isfinite(), value, other)


# -- a cell -------------------------------------------------------------------------------------------------------------------

CHEAP = tuple(flag if flag != "-O2" else "-O0" for flag in compiler.FLAGS)


@contextmanager
def cheap_compilation() -> Iterator[None]:
    """Without optimisation the C compiler needs a fifth of the time; nothing is stored on disk."""
    compiler.flags.cache_clear()
    try:
        with patch.object(compiler, "FLAGS", CHEAP):
            yield
    finally:
        compiler.flags.cache_clear()


class Pair:
    """Two layers of one cell: `mine` runs as the user's would, `truth` by the reference."""

    def __init__(self, cell: UserCell, plan: Scenario):
        self.cell, self.plan = cell, plan
        self.modules = (cell.module("mine"), cell.module("truth"))
        self.mine = build(self.modules[0], plan, backend=plan.backend, checkpoint_every=plan.checkpoint_every)
        self.truth = build(self.modules[1], plan, backend="reference", checkpoint_every=None)
        self.outcomes: Counter[str] = Counter()

    def check(self) -> None:
        for index, call in enumerate(self.plan.calls):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.check_call(index, call)
            stores = re.search(r"^ {12}self\.\w+ = ", self.cell.source, re.M)
            if stores and (self.outcomes["refused in pieces"] or call.kind == "stream"):
                return  # a method stores something: the reference has run one call more, and a stream stores it in a copy

    def check_call(self, index: int, call: Call) -> None:
        errors: list[Exception | None] = [None, None]
        for i, layer in enumerate((self.mine, self.truth)):
            try:
                change(self.modules[i], layer, call)
            except Exception as error:
                errors[i] = error
        if any(errors):
            if type(errors[0]) is not type(errors[1]):
                raise Wrong(f"call {index}: the change raises {errors[0]!r} and for the reference {errors[1]!r}")
            self.outcomes["change raises"] += 1
            return
        want, error = self.expected(index, call)
        after = random_states()
        if error is not None:
            self.outcomes["reference raises"] += 1
        got, refusal = self.actual(index, call, error)
        if got is None or want is None:
            return
        if self.runs_without_gradients(call) and re.search(r"\.requires_grad\b|is_grad_enabled", self.cell.source):
            return
        if call.kind in WHOLE and re.search(r"is_contiguous|\.requires_grad\b", self.cell.source):
            return  # a stream and a truncated sequence copy the initial state, which may be a view, and detach it
        own = random_states()
        tolerance = TOLERANCE[self.plan.dtype]
        if call.around == "reentrant" or call.kind == "truncated":  # which give no gradients
            want = {name: value for name, value in want.items() if name in got}
        want = self.with_zeros(got, want, call)
        wrong = differences(got, want, tolerance) | differences(leftovers(self.mine), leftovers(self.truth), tolerance)
        if own != after and call.around not in ("fork", "threads"):
            which = [name for name, a, b in zip(("torch's", "Python's", "NumPy's"), own, after, strict=True) if a != b]
            wrong["random numbers"] = Difference(f"the generator of {' and '.join(which)} has moved", float("inf"))
        if wrong:
            if at_poles(wrong, want, call) or (call.wanted != "all" and self.poles_beside(index, call, wrong)):
                raise AtPole
            if self.undecided(index, call, want, wrong):
                raise Undecided
            lines = "\n".join(f"    {name}: {one.reason}" for name, one in wrong.items())
            ran = "refused fused, ran auto" if refusal else f"ran {self.mine.backend}"
            raise Wrong(f"call {index} ({call.kind}{' in ' + call.around if call.around else ''}, {ran}):\n{lines}")

    def runs_without_gradients(self, call: Call) -> bool:
        """Whether a step is run, or run a first time, on tensors that need no gradient, where the reference has some."""
        return self.plan.checkpoint_every is not None or call.kind == "truncated" or call.around in ("checkpoint", "reentrant")

    def with_zeros(self, got: Results, want: Results, call: Call) -> Results:
        """The results of the reference, with None for zeros and zeros for None where a compiled loop may have them.

        A gradient is None where no path leads to it. Of a part of the results, or over few steps, the reference may have
        None where a compiled loop, which knows no T, has zeros. A parameter that the cell does not read at all has None.
        An initial state that no step reads has zeros: with a length of 0 it would be the result.
        """
        strict = call.wanted == "all" and call.T > 4 and call.lengths is None and call.kind == "grad"

        def alike(name: str) -> Tensor | None:
            expected, value = want[name], got.get(name)
            initial = re.search(r"\.[hcm]0\b", name) is not None
            if expected is None and value is not None and (initial or not (strict and "gradient of cells" in name)):
                return torch.zeros_like(value)
            if value is None and expected is not None and not expected.nan_to_num(0, 0, 0).any():  # or zeros times infinities
                return None
            return expected

        return {name: alike(name) for name in want}

    def expected(self, index: int, call: Call) -> tuple[Results | None, Exception | None]:
        """The results of the reference, in one call over the whole sequence, or its error."""
        whole = call._replace(kind=WHOLE.get(call.kind, call.kind))
        around = call.around if call.around in ("vmap", "func_grad", "fork") else ""
        try:
            results = perform(self.truth, whole, self.plan, index, around)
        except Exception as error:
            return None, error
        if call.around == "threads":
            results = {f"{name} of thread {i}": value for i in range(3) for name, value in results.items()}
        return results, None

    def actual(self, index: int, call: Call, expected: Exception | None) -> tuple[Results | None, str]:
        """The results of the layer under attack; the reason if its compiled loop was refused."""
        refusal = ""
        with patch.object(fused_module, "CHUNK_BYTES", call.chunk_bytes):
            for backend in (self.plan.backend, "auto"):
                self.mine.backend = backend
                try:
                    results = perform(self.mine, call, self.plan, index, call.around)
                except Exception as error:
                    reason = re.search(r"cannot run (fused|as CUDA graphs): (.+)", str(error))
                    if backend == "fused" and reason and len(reason[2]) > 8:
                        refusal = reason[2]
                        self.outcomes["refused"] += 1
                        if REASONS is not None:
                            REASONS[re.sub(r"[\d.]+|\[.*?\]|\(<.*", "#", refusal)[:110]] += 1
                        continue
                    self.judge(error, expected, call, index)
                    return None, refusal
                without_backward = call.kind == "truncated" or call.around == "reentrant"
                if expected is not None and not (without_backward and re.search("derivative|backward", str(expected))):
                    raise Wrong(f"call {index} ({call.kind}, ran {backend}): no error where the reference raises {expected!r}")
                self.outcomes[backend if not refusal else "auto after refusal"] += 1
                return results, refusal
        raise AssertionError

    def judge(self, error: Exception, expected: Exception | None, call: Call, index: int) -> None:
        """Whether an error is right: it is that of the reference, or says what cannot be cut in time."""
        if isinstance(error, Wrong):
            raise error
        if expected is not None and (type(error) is type(expected) or call.kind in ("stream", "truncated")):
            self.outcomes["raises as the reference"] += 1
            return
        refused = isinstance(error, RuntimeError | ValueError) and re.search(r"time|stream", str(error))
        unknown = "could not be tested for locality" in str(error)  # a hook, or a table that is too short
        if call.kind in ("stream", "truncated") and refused and (unknown or not self.cell.local):
            self.outcomes["refused in pieces"] += 1
            return
        if self.plan.checkpoint_every and re.search(r"derivative for \S+ is not implemented", str(error)):
            self.outcomes["no derivative of a state"] += 1  # a segment does not know whether a gradient can reach its state
            return
        lines = "".join(traceback.format_exception(error, limit=-3))
        where = f"call {index} ({call.kind}{' in ' + call.around if call.around else ''})"
        raise Wrong(f"{where}: the reference gives {expected!r}, this layer raises\n{lines}")

    def poles_beside(self, index: int, call: Call, wrong: dict[str, Difference]) -> bool:
        """Whether the loss of all results, of which only a part is wanted, has gradients that are not finite."""
        want, _ = self.expected(index, call._replace(wanted="all"))
        return want is not None and at_poles(wrong, want, call)

    def undecided(self, index: int, call: Call, want: Results, wrong: dict[str, Difference]) -> bool:
        """Whether rounding alone gives differences like these, in the reference."""
        if any(one.error == float("inf") for one in wrong.values()):
            return False
        if self.plan.dtype == torch.float32 and call.data == "special" and re.search("gelu|GELU", self.cell.source):
            return True  # at infinity, torch gives NaN for eight numbers at once and infinity for one
        whole = call._replace(kind=WHOLE.get(call.kind, call.kind))
        around = call.around if call.around in ("vmap", "func_grad") else ""
        largest: Counter[str] = Counter()
        for seed in range(4):
            try:
                with Rounding(seed):
                    other = perform(self.truth, whole, self.plan, index, around)
            except Exception:
                return False
            if call.around == "threads":
                other = {f"{name} of thread {i}": value for i in range(3) for name, value in other.items()}
            other = {name: value for name, value in other.items() if name in want}
            for name, one in differences(self.with_zeros(want, other, call), want, 0.0).items():
                largest[name] = max(largest[name], one.error)
        # Where rounding changes a tenth of a result, the reference has no digits there, and no error is too large.
        return all(largest[name] >= (min(one.error / 20, 0.1) if one.error < 1e9 else 1e9) for name, one in wrong.items())


class Outcome(NamedTuple):
    """What became of one cell."""

    seed: int
    verdict: str  # "agrees", "wrong", "undecided", "at a pole", "invalid", "crashed"
    message: str
    seconds: float
    outcomes: dict[str, int]


def attack(cell: UserCell, plan: Scenario | None = None) -> Outcome:
    """Run a cell's calls."""
    plan = plan or scenario(cell)
    begin = time.perf_counter()
    outcomes: dict[str, int] = {}

    def outcome(verdict: str, message: str = "") -> Outcome:
        return Outcome(cell.seed, verdict, message, time.perf_counter() - begin, outcomes)

    torch.set_num_threads(1)
    with nullcontext() if plan.optimised else cheap_compilation():
        try:
            pair = Pair(cell, plan)
        except Exception as error:
            return outcome("invalid", repr(error))
        try:
            pair.check()
            return outcome("agrees")
        except Wrong as error:
            return outcome("wrong", str(error))
        except Undecided:
            if plan.dtype != torch.float32:
                return outcome("undecided")
        except AtPole:
            return outcome("at a pole")
        finally:
            outcomes |= pair.outcomes
            for module in pair.modules:
                sys.modules.pop(module.__name__, None)
    finer = attack(cell, plan._replace(dtype=torch.float64))
    if finer.verdict == "wrong":
        return outcome("wrong", f"rounding decides in float32; in float64, {finer.message}")
    return outcome("undecided")


def report(cell: UserCell, plan: Scenario, message: str) -> str:
    """The cell and its calls, to be read and pasted."""
    return f"{cell.source}\n\n# {str(plan).replace(chr(10), chr(10) + '# ')}\n\nseed {cell.seed}: {message}"


# -- shrinking ----------------------------------------------------------------------------------------------------------------


def shrink(cell: UserCell, plan: Scenario) -> tuple[UserCell, Scenario]:
    """A shorter cell with fewer calls that is still wrong."""

    symptom = symptom_of(attack(cell, plan))

    def wrong(cell: UserCell, plan: Scenario) -> bool:
        return symptom_of(attack(cell, plan)) == symptom

    plain = {"kind": "grad", "T": 3, "B": 2, "start": 0, "lengths": None, "state": False, "data": "normal", "change": ""}
    plain |= {"around": "", "chunk_bytes": 1 << 21, "form": "batched", "wanted": "all"}
    easy = {"layers": 1, "bidirectional": False, "batch_first": False, "checkpoint_every": None, "noise": None}
    easy |= {"learn_initial_state": False, "evaluation": False, "quantised": False, "optimised": False, "input_size": 1}
    easy |= {"dtype": torch.float64}
    for i in reversed(range(len(plan.calls))):
        fewer = plan._replace(calls=plan.calls[:i] + plan.calls[i + 1 :])
        plan = fewer if fewer.calls and wrong(cell, fewer) else plan
    for name, value in easy.items():
        simpler = plan._replace(**{name: value})
        plan = simpler if simpler != plan and wrong(cell, simpler) else plan
    for i in range(len(plan.calls)):
        for name, value in plain.items():
            call = plan.calls[i]._replace(**{name: value})
            if call.lengths is not None and (len(call.lengths) != call.B or max(call.lengths) > call.T):
                continue
            simpler = plan._replace(calls=(*plan.calls[:i], call, *plan.calls[i + 1 :]))
            plan = simpler if simpler != plan and wrong(cell, simpler) else plan
    progress = True
    while progress:
        progress = False
        for lines in shorter(cell.source.split("\n")):
            candidate = cell._replace(source="\n".join(lines))
            if wrong(candidate, plan):
                cell, progress = candidate, True
                break
    return cell, plan


def symptom_of(outcome: "Outcome") -> str:
    """The kind of an error: a shorter cell must have the same one."""
    if outcome.verdict != "wrong":
        return ""
    error = re.findall(r"^\S*Error\b", outcome.message, re.MULTILINE)
    words = ("moved", "relative error", "NaN instead", "infinities instead", "tensor instead of None", "None instead")
    return error[-1] if error else next((word for word in words if word in outcome.message), outcome.message)


def shorter(lines: list[str]) -> Iterator[list[str]]:
    """The source without one of its lines, or with a simpler line."""
    begin = next(i for i, line in enumerate(lines) if line.startswith("class UserCell"))
    for i in reversed(range(begin, len(lines))):
        line = lines[i]
        if not line.strip() or re.match(r"\s*(def|class|return Inputs|return Weights|super)", line):
            continue
        yield lines[:i] + lines[i + 1 :]
        assigned = re.match(r"(\s+)(\w+) = (.+)$", line)
        if assigned:
            indent, name, text = assigned.groups()
            for word in dict.fromkeys(re.findall(r"\b(?:inputs|state|weights)\.\w+|\b[vcp]\d*\b", text)):
                if text != word:
                    yield [*lines[:i], f"{indent}{name} = {word}", *lines[i + 1 :]]
        returned = re.match(r"(\s+)return State\((.+)\)$", line)
        if returned and returned[2] != "state.h":
            for word in dict.fromkeys(re.findall(r"\bv\d+\b|inputs\.\w+", line)):
                simple = f"{returned[1]}return State({word})"
                if simple != line:
                    yield [*lines[:i], simple, *lines[i + 1 :]]


# -- many cells ---------------------------------------------------------------------------------------------------------------


def attack_seed(seed: int) -> tuple[UserCell, Outcome]:
    cell = user_cells.write(seed)
    return cell, attack(cell)


def run_all(seeds: range) -> tuple[str, Counter[str]]:
    """The reports of all wrong cells among these, and how many cells and calls ended in which way."""
    reports, outcomes = [], Counter[str]()
    for seed in seeds:
        cell, outcome = attack_seed(seed)
        outcomes.update(outcome.outcomes)
        outcomes[outcome.verdict] += 1
        if outcome.verdict == "wrong":
            reports.append(report(cell, scenario(cell), outcome.message))
    return "\n\n".join(reports), outcomes


def worker(seeds: range, counter: Any, pipe: Any, stop: float) -> None:
    """Take seeds from a shared counter and send each outcome; a line before each says which seed is running."""

    def too_long(*_: Any) -> None:
        raise TimeoutError(f"more than {LONGEST} s")

    signal.signal(signal.SIGPROF, too_long)
    os.environ["UNFADING_CACHE"] = "/dev/null/none"  # nothing is stored: 20,000 cells would fill the disk
    while time.time() < stop:
        with counter.get_lock():
            i = counter.value
            counter.value += 1
        if i >= len(seeds):
            break
        seed = seeds[i]
        pipe.send(("begins", seed, os.getpid()))
        signal.setitimer(signal.ITIMER_PROF, LONGEST)
        try:
            cell, outcome = attack_seed(seed)
            text = report(cell, scenario(cell), outcome.message) if outcome.verdict == "wrong" else outcome.message
        except Exception as error:
            outcome, text = Outcome(seed, "wrong", "", 0.0, {}), f"seed {seed}: {''.join(traceback.format_exception(error))}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(("ends", outcome._replace(message=text), os.getpid()))
    pipe.send(("done", None, os.getpid()))


def run_many(seeds: range, processes: int, out: Path, seconds: float) -> Counter[str]:
    """Run the cells of these seeds in forked processes; a process that dies is replaced, and its cell counts as wrong."""
    context = multiprocessing.get_context("fork")
    counter = context.Value("l", 0)
    begin = time.time()
    stop = begin + seconds
    verdicts: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    workers: dict[Any, tuple[Any, int | None, float]] = {}

    def start() -> None:
        own, other = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(seeds, counter, other, stop), daemon=True)
        process.start()
        other.close()
        workers[own] = (process, None, time.time())

    for _ in range(processes):
        start()
    shown = begin
    with out.open("a") as file:
        while workers:
            for pipe in multiprocessing.connection.wait(list(workers), timeout=1.0):
                process, running, _ = workers[pipe]
                try:
                    event, value, _ = pipe.recv()
                except (EOFError, OSError):
                    event, value = "died", running
                if event == "begins":
                    workers[pipe] = (process, value, time.time())
                elif event == "ends":
                    verdicts[value.verdict] += 1
                    outcomes.update(value.outcomes)
                    if value.verdict == "wrong":
                        file.write(f"{'=' * 120}\n{value.message}\n")
                        file.flush()
                else:
                    process.join()
                    del workers[pipe]
                    if event == "died":
                        verdicts["crashed"] += 1
                        file.write(f"{'=' * 120}\nseed {value}: the process ended with exit code {process.exitcode}\n")
                        file.flush()
                        start()
            for process, _, since in list(workers.values()):
                if time.time() - since > STUCK:
                    process.kill()
            if time.time() - shown > 20:
                shown = time.time()
                print(f"{shown - begin:5.0f} s: {dict(verdicts)}", flush=True)
        summary = {
            "seeds": [seeds.start, seeds.stop],
            "seconds": round(time.time() - begin, 1),
            **verdicts,
            "calls": dict(outcomes),
        }
        file.write(f"{'=' * 120}\n{json.dumps(summary)}\n")
    print(json.dumps(summary))
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the first seed, or the only one")
    parser.add_argument("--cells", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("failures.txt"))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--shrink", action="store_true")
    options = parser.parse_args()
    if options.cells > 1:
        verdicts = run_many(range(options.seed, options.seed + options.cells), options.processes, options.out, options.seconds)
        return int(bool(verdicts["wrong"] or verdicts["crashed"]))
    cell, outcome = attack_seed(options.seed)
    plan = scenario(cell)
    if options.shrink and outcome.verdict == "wrong":
        cell, plan = shrink(cell, plan)
        outcome = attack(cell, plan)
    print(report(cell, plan, f"{outcome.verdict} in {outcome.seconds:.2f} s {outcome.outcomes}\n{outcome.message}"))
    return int(outcome.verdict == "wrong")


if __name__ == "__main__":
    sys.exit(main())

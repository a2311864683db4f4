"""Measure a case on a GPU: whether it runs fused, whether it agrees with the float64 reference, how fast it is beside peers.

Agreement is checked over at most 200 steps with halved weights, under which the errors of most cells do not grow, in the
precision of the case. If the errors of a cell grow so much that this precision says nothing, it is checked in float32. A cell
that differs is not timed. The error at the timed size is reported beside the time, also for the peers.
"""

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unfading.bench.agreement import LARGEST, MARGIN, first_difference, largest_error
from unfading.bench.cases import Case, Dtype
from unfading.bench.contenders import Contender, Single, StackedModels, build_layer, running_on, scale_parameters
from unfading.bench.peers import LOOPS, Peers, PeerUnavailable, peers_of_fleet, peers_of_layer
from unfading.bench.precision import TOLERANCES, float32_precision
from unfading.bench.results import Pass, Peer, PeerPass, Result, case_fields
from unfading.bench.timing import EVENTS, Timer, Timings, time_in_turns
from unfading.fuse.fused import refusal
from unfading.layers.factory import Layer
from unfading.source_lines import first_line

STEPS = 200  # time steps of the check
CONTRACTIVE = 0.5  # factor on the weights in the check
YARDSTICK = 25.0  # times its tolerance: with more rounding, a precision below float32 cannot be checked
SECONDS, SLOW_SECONDS = 2.0, 0.5  # seconds for all rounds of a contender, and of the eager loop


def measure(
    case: Case,
    *,
    rounds: int = 50,
    seed: int = 0,
    loops: bool = True,
    device: torch.device | None = None,
    timer: Timer = EVENTS,
) -> Result:
    """Measure one case. Torch's precision and random state are the same afterwards as before.

    Args:
        case: What to measure.
        rounds: Largest number of rounds. Slow contenders get fewer.
        seed: Seed of weights, data and order.
        loops: Whether the reference loop is timed, eager and as CUDA graphs.
        device: Device to measure; None for the current GPU.
        timer: How calls are timed there.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    with float32_precision(case.dtype), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models = [build_layer(case).to(device) for _ in range(case.models)]
        # Numbers of few digits, which no precision has to round.
        x = torch.randn(case.models, case.T, case.B, case.input_size).bfloat16().float().to(device)
        ours, _ = _fused_and_reference(case, models, x)
        fields = case_fields(case) | _first_run(ours, case, models[0], device)
        if fields["status"] == "measured":
            fields |= _check(case, models, x)
        if fields["status"] == "wrong":
            return Result(**fields)
        contenders: dict[str, Contender] = {}
        if fields["status"] == "measured":
            contenders = {"fused": ours, "control": ours}
            fields["error"] = _rounded(ours.error())
        peers: dict[str, Peer] = {}
        for name, make in _peers(case, models, x, ours).items():
            if name in LOOPS and not loops:
                continue
            peers[name], contender = _build_peer(name, make, device)
            if contender is not None:
                contenders[name] = contender
        seconds = {name: SLOW_SECONDS if name == "eager loop" else SECONDS for name in contenders}

        def run(method: str) -> Timings:
            calls = {name: getattr(contender, method) for name, contender in contenders.items()}
            return time_in_turns(calls, timer, rounds=rounds, seconds=seconds, order=random.Random(seed))

        timings = {method: run(method) for method in ("forward", "both")} if contenders else {}
    for name in peers.keys() & contenders.keys():
        passes: dict[str, Any] = {method: _peer_pass(each, name) for method, each in timings.items()}
        peers[name] = replace(peers[name], **passes)
    if "fused" in contenders:
        fields |= {method: _pass(each) for method, each in timings.items()}
    return Result(**fields, peers=tuple(peers.values()))


def _first_run(ours: Contender, case: Case, model: Layer, device: torch.device) -> dict[str, Any]:
    """Whether our loop runs, and the seconds until both passes have run once."""
    began = time.perf_counter()
    with running_on("fused", case.dtype, device)():
        reason = next(filter(None, map(refusal, model.runners)), None)
    if reason is not None:
        return {"status": "refused", "reason": reason}
    _first_calls(ours, device)
    return {"status": "measured", "first_s": round(time.perf_counter() - began, 3)}


def _check(case: Case, models: Sequence[Layer], x: Tensor) -> dict[str, Any]:
    """The fields of a result that follow from the check of agreement."""
    halved = [scale_parameters(copy.deepcopy(model), CONTRACTIVE) for model in models]
    fields: dict[str, Any] = {}
    precisions: tuple[Dtype, ...] = (case.dtype, "float32")
    for dtype in dict.fromkeys(precisions):
        with float32_precision(dtype):
            ours, reference = _fused_and_reference(case._replace(dtype=dtype), halved, x[:, :STEPS])
            fused, plain, exact = ours.results(), reference.results(), _exact(ours).known_results
        fields.setdefault("error_contractive", _rounded(largest_error(fused, exact)))
        tolerance = TOLERANCES[dtype]
        largest = LARGEST if dtype == "float32" else YARDSTICK * tolerance
        rounding = largest_error(plain, exact)
        if rounding is not None and MARGIN * rounding <= largest:
            break  # else this precision is too coarse to check this cell
    reason = first_difference(fused, plain, exact, floor=tolerance, largest=largest)
    return fields if reason is None else {**fields, "status": "wrong", "reason": reason}


def _fused_and_reference(case: Case, models: Sequence[Layer], x: Tensor) -> tuple[Contender, Contender]:
    """The case by the fused loop and by the reference loop in the same precision, both with the exact results of float64."""

    def contender(models: Sequence[Layer], x: Tensor, backend: str, case: Case, exact: Contender | None) -> Contender:
        context = running_on(backend, case.dtype, x.device)
        return StackedModels(models, x, context, exact) if case.kind == "fleet" else Single(models[0], x[0], context, exact)

    doubles = [copy.deepcopy(model).double() for model in models]
    exact = contender(doubles, x.double(), "reference", case._replace(dtype="float32"), None)
    return contender(models, x, "fused", case, exact), contender(models, x, "reference", case, exact)


def _exact(contender: Contender) -> Contender:
    assert contender.exact is not None
    return contender.exact


def _peers(case: Case, models: Sequence[Layer], x: Tensor, ours: Contender) -> Peers:
    if case.kind == "fleet":
        return peers_of_fleet(case, models, x)
    return peers_of_layer(case, models[0], x[0], _exact(ours))


def _build_peer(name: str, make: Callable[[], Contender], device: torch.device) -> tuple[Peer, Contender | None]:
    """A peer after its first calls, with its error, or with the reason why it does not run."""
    try:
        began = time.perf_counter()
        contender = make()
        _first_calls(contender, device)
        first = time.perf_counter() - began
        return Peer(name, error=_rounded(contender.error()), first_s=round(first, 3)), contender
    except PeerUnavailable as reason:
        return Peer(name, reason=str(reason)), None
    except Exception as error:  # other packages may raise anything, and the other peers should still be timed
        return Peer(name, reason=f"{type(error).__name__}: {first_line(error)}"), None


def _first_calls(contender: Contender, device: torch.device) -> None:
    contender.both()
    contender.forward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pass(timings: Timings) -> Pass:
    control = round(timings.ratio("control", "fused"), 4)
    return Pass(ms=round(1e3 * timings.median("fused"), 5), rounds=timings.rounds("fused"), control=control)


def _peer_pass(timings: Timings, name: str) -> PeerPass:
    of = round(timings.ratio("fused", name), 5) if "fused" in timings.seconds else None
    return PeerPass(ms=round(1e3 * timings.median(name), 5), rounds=timings.rounds(name), of=of)


def _rounded(error: float | None) -> float | None:
    return None if error is None else float(f"{error:.3g}")

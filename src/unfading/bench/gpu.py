"""From a case to a row on a GPU: does it run fused, does it agree with the float64 reference, how fast is it beside others.

Agreement is asked for over at most 200 steps of weights halved, under which the errors of most cells do not grow, in the
precision of the case; of a cell whose errors grow until that can tell nothing, in float32. What parts is not timed. The error
at the size that is timed is told beside the time, of the peers too.
"""

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unfading.bench.agreement import LARGEST, MARGIN, first_parting, furthest
from unfading.bench.cases import Case, Dtype
from unfading.bench.contenders import Contender, Single, Together, built, by, scaled
from unfading.bench.peers import Absent, Peers, peers_of_fleet, peers_of_layer
from unfading.bench.precision import TOLERANCES, float32_precision
from unfading.bench.results import Beside, Pass, Peer, Row, of_case
from unfading.bench.timing import EVENTS, Clock, Race, race
from unfading.fuse.fused import refusal
from unfading.layers.factory import Layer
from unfading.source_lines import first_line

STEPS = 200  # over which agreement is asked for
CONTRACTIVE = 0.5  # what weights are multiplied by for that
YARDSTICK = 25.0  # times its tolerance: where rounding explains more, a precision below float32 tells nothing
SECONDS, SLOW_SECONDS = 2.0, 0.5  # what a contender may take for all its rounds, and the eager loop


def measure(case: Case, *, rounds: int = 50, seed: int = 0, device: torch.device | None = None, clock: Clock = EVENTS) -> Row:
    """Measure one case; torch gets its own precision and random numbers back.

    Args:
        case: what to measure.
        rounds: at most so many rounds; what is slow gets fewer.
        seed: of weights, data and order.
        device: where; the current GPU without.
        clock: how calls are timed there.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    with float32_precision(case.dtype), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models = [built(case).to(device) for _ in range(case.models)]
        # Numbers of few digits: no precision has to round the data.
        x = torch.randn(case.models, case.T, case.B, case.input_size).bfloat16().float().to(device)
        ours, _ = _forms(case, models, x)
        told = of_case(case) | _first_of(ours, case, models[0], device)
        if told["status"] == "measured":
            told |= _agreement(case, models, x)
        if told["status"] == "wrong":
            return Row(**told)
        running: dict[str, Contender] = {}
        if told["status"] == "measured":
            running = {"fused": ours, "control": ours}
            told["error"] = _rounded(ours.error())
        peers: dict[str, Peer] = {}
        for name, make in _peers(case, models, x, ours).items():
            peers[name], contender = _entered(name, make, device)
            if contender is not None:
                running[name] = contender
        seconds = {name: SLOW_SECONDS if name == "eager loop" else SECONDS for name in running}

        def run(of: str) -> Race:
            calls = {name: getattr(contender, of) for name, contender in running.items()}
            return race(calls, clock, rounds=rounds, seconds=seconds, order=random.Random(seed))

        found = {of: run(of) for of in ("forward", "both")} if running else {}
    for name in peers.keys() & running.keys():
        passes: dict[str, Any] = {of: _beside(made, name) for of, made in found.items()}
        peers[name] = replace(peers[name], **passes)
    if "fused" in running:
        told |= {of: _pass(made) for of, made in found.items()}
    return Row(**told, peers=tuple(peers.values()))


def _first_of(ours: Contender, case: Case, model: Layer, device: torch.device) -> dict[str, Any]:
    """Whether our own loop runs, and the seconds until it has run once each way."""
    began = time.perf_counter()
    with by("fused", case.dtype, device)():
        reason = next(filter(None, map(refusal, model.runners)), None)
    if reason is not None:
        return {"status": "refused", "reason": reason}
    _first_calls(ours, device)
    return {"status": "measured", "first_s": round(time.perf_counter() - began, 3)}


def _agreement(case: Case, models: Sequence[Layer], x: Tensor) -> dict[str, Any]:
    """What the check before the timing says."""
    halved = [scaled(copy.deepcopy(model), CONTRACTIVE) for model in models]
    told: dict[str, Any] = {}
    precisions: tuple[Dtype, ...] = (case.dtype, "float32")
    for dtype in dict.fromkeys(precisions):
        with float32_precision(dtype):
            ours, plain = _forms(case._replace(dtype=dtype), halved, x[:, :STEPS])
            got, slow, true = ours.computed(), plain.computed(), _exact(ours).truth
        told.setdefault("error_contractive", _rounded(furthest(got, true)))
        tolerance = TOLERANCES[dtype]
        largest = LARGEST if dtype == "float32" else YARDSTICK * tolerance
        rounding = furthest(slow, true)
        if rounding is not None and MARGIN * rounding <= largest:
            break  # else it is too coarse to tell anything of this cell
    reason = first_parting(got, slow, true, floor=tolerance, largest=largest)
    return told if reason is None else {**told, "status": "wrong", "reason": reason}


def _forms(case: Case, models: Sequence[Layer], x: Tensor) -> tuple[Contender, Contender]:
    """The case fused, and by the reference loop in the same precision; both know what float64 gives."""

    def form(models: Sequence[Layer], x: Tensor, backend: str, case: Case, exact: Contender | None) -> Contender:
        around = by(backend, case.dtype, x.device)
        return Together(models, x, around, exact) if case.kind == "fleet" else Single(models[0], x[0], around, exact)

    doubles = [copy.deepcopy(model).double() for model in models]
    exact = form(doubles, x.double(), "reference", case._replace(dtype="float32"), None)
    return form(models, x, "fused", case, exact), form(models, x, "reference", case, exact)


def _exact(contender: Contender) -> Contender:
    assert contender.exact is not None
    return contender.exact


def _peers(case: Case, models: Sequence[Layer], x: Tensor, ours: Contender) -> Peers:
    if case.kind == "fleet":
        return peers_of_fleet(case, models, x)
    return peers_of_layer(case, models[0], x[0], _exact(ours))


def _entered(name: str, make: Callable[[], Contender], device: torch.device) -> tuple[Peer, Contender | None]:
    """A peer after its first calls, with its error; or with the reason why it does not run."""
    try:
        began = time.perf_counter()
        contender = make()
        _first_calls(contender, device)
        first = time.perf_counter() - began
        return Peer(name, error=_rounded(contender.error()), first_s=round(first, 3)), contender
    except Absent as reason:
        return Peer(name, reason=str(reason)), None
    except Exception as error:  # other people's code may raise anything, and the rest is still worth timing
        return Peer(name, reason=f"{type(error).__name__}: {first_line(error)}"), None


def _first_calls(contender: Contender, device: torch.device) -> None:
    contender.both()
    contender.forward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pass(found: Race) -> Pass:
    control = round(found.ratio("control", "fused"), 4)
    return Pass(ms=round(1e3 * found.median("fused"), 5), rounds=found.rounds("fused"), control=control)


def _beside(found: Race, name: str) -> Beside:
    of = round(found.ratio("fused", name), 5) if "fused" in found.seconds else None
    return Beside(ms=round(1e3 * found.median(name), 5), rounds=found.rounds(name), of=of)


def _rounded(error: float | None) -> float | None:
    return None if error is None else float(f"{error:.3g}")

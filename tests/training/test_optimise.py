"""Optimisers, clipping and schedules agree with torch.optim for every row; each model has its own rate and limit."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from tests.helpers.trained import small
from unfading.errors import unknown
from unfading.training.active_run import ActiveRun
from unfading.training.captured_step import RATES_AHEAD, StepClock
from unfading.training.learning_rate import SCHEDULES, Constant, Cosine, Polynomial, StepDecay
from unfading.training.optimise import OPTIMISERS, SGD, Adam, AMSGrad, RMSProp, clip_norms, clip_values, norms

# float64; the same few operations in another order, over thirty steps.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
STEPS = 30
RATES = [0.1, 0.003, 1.7]
E, N = len(RATES), 7

# Our optimiser, and torch's with the same options.
PAIRS = {
    "adam": (Adam(), torch.optim.Adam, {}),
    "adam-settings": (Adam(b1=0.8, b2=0.95, eps=1e-3), torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-3}),
    "adam-l2": (Adam(l2=0.3), torch.optim.Adam, {"weight_decay": 0.3}),
    "adamw": (Adam(weight_decay=0.2), torch.optim.AdamW, {"weight_decay": 0.2}),
    "amsgrad": (AMSGrad(), torch.optim.Adam, {"amsgrad": True}),
    "amsgradw": (AMSGrad(weight_decay=0.2), torch.optim.AdamW, {"weight_decay": 0.2, "amsgrad": True}),
    "rmsprop": (RMSProp(), torch.optim.RMSprop, {}),
    "rmsprop-settings": (
        RMSProp(alpha=0.8, eps=1e-3, l2=0.1),
        torch.optim.RMSprop,
        {"alpha": 0.8, "eps": 1e-3, "weight_decay": 0.1},
    ),
    "rmsprop-momentum": (RMSProp(momentum=0.7), torch.optim.RMSprop, {"momentum": 0.7}),
    "sgd": (SGD(), torch.optim.SGD, {}),
    "sgd-momentum": (SGD(momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "sgd-nesterov": (SGD(momentum=0.6, nesterov=True), torch.optim.SGD, {"momentum": 0.6, "nesterov": True}),
    "sgd-l2": (SGD(momentum=0.6, l2=0.1), torch.optim.SGD, {"momentum": 0.6, "weight_decay": 0.1}),
}
every_pair = pytest.mark.parametrize(("ours", "theirs", "settings"), PAIRS.values(), ids=PAIRS)


def gradients(w, t):
    """Noisy gradients of a quadratic function, large and small, some of them zero."""
    return w * torch.linspace(0.0, 2.0, N, dtype=w.dtype) + 10.0 ** (t % 5 - 2) * torch.sin(
        3.0 * t + torch.arange(N, dtype=w.dtype)
    )


def moved_by_ours(ours, w, rate):
    w = w.clone()
    state = {name: torch.zeros_like(w) for name in ours.state_names}
    for t in range(1, STEPS + 1):
        ours.update(w, gradients(w, t), state, rate, torch.full((len(w), 1), float(t), dtype=torch.float64))
    return w


def moved_by_torch(optimiser, parameters):
    for t in range(1, STEPS + 1):
        grads = gradients(torch.cat([p.detach() for p in parameters]), t)
        for parameter, grad in zip(parameters, grads.split([len(p) for p in parameters]), strict=True):
            parameter.grad = grad.clone()
        optimiser.step()
    return torch.cat([parameter.detach() for parameter in parameters])


def test_every_optimiser_is_compared_with_torch():
    assert {type(ours) for ours, _, _ in PAIRS.values()} == set(OPTIMISERS.values())


@every_pair
@pytest.mark.sample(4)
def test_each_row_moves_as_in_torch(ours, theirs, settings):
    begin = torch.randn(E, N, dtype=torch.float64)
    got = moved_by_ours(ours, begin, torch.tensor(RATES, dtype=torch.float64).unsqueeze(1))
    for row, rate in enumerate(RATES):
        parameter = begin[row].clone().requires_grad_()
        expected = moved_by_torch(theirs([parameter], lr=rate, **settings), [parameter])
        assert_close(got[row], expected, **EXACT)
        assert not torch.allclose(expected, begin[row])


@every_pair
def test_a_rate_for_each_entry_equals_a_parameter_group(ours, theirs, settings):
    begin = torch.randn(1, N, dtype=torch.float64)
    factors = torch.tensor([[1.0, 1.0, 0.1, 0.1, 0.1, 0.0, 0.0]], dtype=torch.float64)
    got = moved_by_ours(ours, begin, 0.03 * factors)
    parameters = [part.clone().requires_grad_() for part in begin[0].split([2, 3, 2])]
    groups = [{"params": [part], "lr": rate} for part, rate in zip(parameters, (0.03, 0.003, 0.0), strict=True)]
    assert_close(got[0], moved_by_torch(theirs(groups, lr=0.03, **settings), parameters), **EXACT)
    assert torch.equal(got[0, 5:], begin[0, 5:])


@every_pair
def test_float32_agrees_with_float64_to_its_precision(ours, theirs, settings):
    begin = torch.randn(E, N)
    rate = torch.tensor(RATES, dtype=torch.float64).unsqueeze(1) / 10
    single = moved_by_ours(ours, begin, rate)
    assert single.dtype == torch.float32
    # Thirty steps, each off by some units in the last place, of a function that may amplify errors.
    assert_close(single.double(), moved_by_ours(ours, begin.double(), rate), rtol=1e-4, atol=1e-4)


def test_a_model_with_fewer_steps_has_its_own_bias_correction():
    ours = Adam()
    w = torch.zeros(2, N, dtype=torch.float64)
    state = {name: torch.zeros_like(w) for name in ours.state_names}
    ours.update(
        w, torch.ones_like(w), state, torch.ones(2, 1, dtype=torch.float64), torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    )
    assert_close(w[0], torch.full((N,), -1.0, dtype=torch.float64), rtol=1e-7, atol=0)
    expected = -(0.1 / (1 - 0.9**3)) / (math.sqrt(0.001 / (1 - 0.999**3)) + 1e-8)
    assert_close(w[1], torch.full((N,), expected, dtype=torch.float64), **EXACT)


LIMITS = [0.5, 1e9, math.inf]


def test_clipping_by_norm_agrees_with_torch_for_every_row():
    g = 3.0 * torch.randn(E, N, dtype=torch.float64)
    got = g.clone()
    clip_norms(got, norms(got), torch.tensor(LIMITS, dtype=torch.float64).unsqueeze(1))
    for row, limit in enumerate(LIMITS):
        parameters = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (3, 4)]
        for parameter, part in zip(parameters, g[row].split([3, 4]), strict=True):
            parameter.grad = part.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        assert_close(norms(g)[row, 0], norm, **EXACT)
        assert_close(got[row], torch.cat([parameter.grad for parameter in parameters]), **EXACT)
    assert norms(got)[0] <= 0.5 < norms(g)[0]
    assert torch.equal(got[1:], g[1:])


def test_clipping_by_value_agrees_with_torch_for_every_row():
    g = 3.0 * torch.randn(E, N, dtype=torch.float64)
    got = g.clone()
    clip_values(got, torch.tensor(LIMITS, dtype=torch.float64).unsqueeze(1))
    for row, limit in enumerate(LIMITS):
        parameter = torch.nn.Parameter(torch.zeros(N, dtype=torch.float64))
        parameter.grad = g[row].clone()
        torch.nn.utils.clip_grad_value_([parameter], limit)
        assert torch.equal(got[row], parameter.grad)
    assert got[0].abs().max() == 0.5
    assert torch.equal(got[1:], g[1:])


def test_a_large_gradient_in_float32_has_a_finite_norm():
    g = torch.full((1, 4), 3e38)
    assert norms(g).item() == pytest.approx(6e38)
    clip_norms(g, norms(g), torch.ones(1, 1, dtype=torch.float64))
    assert_close(g, torch.full((1, 4), 0.5))


def rates(make, steps=20):
    """The rates of a torch scheduler that starts at 1."""
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimiser)
    rates = []
    for _ in range(steps):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return rates


def _warmed_up(optimiser, steps, schedule):
    """The schedule, times a line that is 1 / steps at the first step and 1 from step number `steps`."""
    line = torch.optim.lr_scheduler.LinearLR(optimiser, 1 / steps, total_iters=steps - 1)
    return torch.optim.lr_scheduler.ChainedScheduler([schedule, line])


SCHEDULED = {
    "constant": (Constant(), lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=1.0)),
    "step": (StepDecay(every=6, gamma=0.3), lambda o: torch.optim.lr_scheduler.StepLR(o, 6, 0.3)),
    "step-once": (StepDecay(every=6, times=1), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [6], 0.1)),
    "cosine": (Cosine(), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)),
    "cosine-floor": (Cosine(floor=0.2), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.2)),
    "cosine-warmup": (Cosine(warmup=0.3), lambda o: _warmed_up(o, 6, torch.optim.lr_scheduler.CosineAnnealingLR(o, 20))),
    "line": (Polynomial(), lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 20)),
    "polynomial": (Polynomial(power=2.5), lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 20, 2.5)),
    "line-floor": (Polynomial(floor=0.3), lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.3, 20)),
}


@pytest.mark.parametrize(("ours", "theirs"), SCHEDULED.values(), ids=SCHEDULED)
def test_schedules_agree_with_torch(ours, theirs):
    # torch multiplies by quotients; twenty of them differ by some units in the last place.
    assert [ours.factor(step, 20) for step in range(20)] == pytest.approx(rates(theirs), rel=1e-12)
    assert ours.factor(0, 20) == (1.0 if not getattr(ours, "warmup", 0.0) else pytest.approx(1 / 6))


def test_every_schedule_is_compared_and_ends_at_its_floor():
    assert {type(ours) for ours, _ in SCHEDULED.values()} == set(SCHEDULES.values())
    assert Cosine(floor=0.2).factor(20, 20) == pytest.approx(0.2)
    assert Polynomial(floor=0.2, power=3.0).factor(20, 20) == pytest.approx(0.2)
    assert Polynomial(floor=0.2, power=3.0).factor(10, 20) == pytest.approx(0.2 + 0.8 / 8)


@pytest.mark.parametrize("steps", [1, 3, 20, 333])
@pytest.mark.parametrize("warmup", [1e-9, 0.05, 0.3, 0.77, 1])
@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_a_warm_up_is_a_straight_rise_to_the_cosine(steps, warmup, floor):
    schedule, cosine = Cosine(floor=floor, warmup=warmup), Cosine(floor=floor)
    shares = [schedule.factor(step, steps) / cosine.factor(step, steps) for step in range(steps)]
    assert shares == pytest.approx([min(1.0, (step + 1) / (warmup * steps)) for step in range(steps)], rel=1e-12)
    assert all(0 < schedule.factor(step, steps) <= 1 for step in range(steps))
    # From the end of the warm-up on the factors are those of the cosine, to the last digit.
    for step in range(math.ceil(warmup * steps), steps + 1):
        assert schedule.factor(step, steps) == cosine.factor(step, steps)
    # No step rises or falls by more than the line and the cosine do.
    factors = [0.0, *(schedule.factor(step, steps) for step in range(steps + 1))]
    largest = max(1 / max(1.0, warmup * steps), math.pi / (2 * steps))
    assert max(abs(b - a) for a, b in pairwise(factors)) <= largest + 1e-12


def test_no_warm_up_is_the_cosine_alone():
    for floor in (0.0, 0.2):
        for step in range(101):
            earlier = floor + (1 - floor) * (1 + math.cos(math.pi * step / 100)) / 2
            assert Cosine(floor, warmup=0).factor(step, 100) == Cosine(floor).factor(step, 100) == earlier


def test_a_captured_step_reads_the_rates_of_every_run_from_its_clock():
    """Beyond the steps whose rates are sent at a time, and with runs of several lengths."""
    runs = [
        small(steps=2 * RATES_AHEAD, rate=0.1, schedule="cosine", schedule_options={"warmup": 0.6}),
        small(steps=RATES_AHEAD + 5, rate=0.2, schedule="cosine", schedule_options={"floor": 0.1, "warmup": 0.01}),
        small(steps=2 * RATES_AHEAD, rate=0.3),
    ]
    active = [ActiveRun(run, run.make_task()) for run in runs]
    clock = StepClock(active, torch.device("cpu"))
    for step in (0, 1, 2, RATES_AHEAD - 1, RATES_AHEAD, RATES_AHEAD + 1, 2 * RATES_AHEAD - 1):
        clock.set(step, [0, 1, 2])
        steps = [min(step, each.total - 1) for each in active]
        want = [[run.rate * run.make_schedule().factor(at, run.steps)] for run, at in zip(runs, steps, strict=True)]
        assert clock.rates().tolist() == want
    clock.set(0, [0, 1, 2])
    clock.tick()
    assert clock.rates()[0].item() == active[0].rate(1) > active[0].rate(0) > 0


CASES = {
    "l2": (lambda: Adam(l2=-0.1), ValueError, "l2 must be at least 0; got -0.1"),
    "l2 nan": (lambda: SGD(l2=math.nan), ValueError, "l2 must be finite; got nan"),
    "weight_decay": (lambda: SGD(weight_decay=-1), ValueError, "weight_decay must be at least 0"),
    "weight_decay kind": (lambda: SGD(weight_decay="1"), TypeError, "weight_decay must be a number; got '1'"),
    "b1": (lambda: Adam(b1=1.0), ValueError, "b1 must be below 1"),
    "b2": (lambda: Adam(b2=1.5), ValueError, r"b2 must lie in \[0, 1\]; got 1.5"),
    "eps": (lambda: Adam(eps=0), ValueError, "eps must be above 0"),
    "eps of rmsprop": (lambda: RMSProp(eps=-1.0), ValueError, "eps must be above 0"),
    "alpha": (lambda: RMSProp(alpha=1), ValueError, "alpha must be below 1"),
    "momentum of rmsprop": (lambda: RMSProp(momentum=-0.5), ValueError, r"momentum must lie in \[0, 1\]"),
    "momentum": (lambda: SGD(momentum=1), ValueError, "momentum must be below 1"),
    "nesterov": (lambda: SGD(nesterov=True), ValueError, "momentum is 0. Set momentum"),
    "nesterov kind": (lambda: SGD(momentum=0.5, nesterov=1), TypeError, "nesterov must be true or false; got 1"),
    "every": (lambda: StepDecay(every=0), ValueError, "every must be at least 1"),
    "gamma": (lambda: StepDecay(gamma=0), ValueError, "gamma must be above 0"),
    "times": (lambda: StepDecay(times=0), ValueError, "times must be at least 1"),
    "floor": (lambda: Cosine(floor=2.0), ValueError, r"floor must lie in \[0, 1\]"),
    "warmup": (lambda: Cosine(warmup=1.5), ValueError, r"warmup must lie in \[0, 1\]; got 1.5"),
    "warmup negative": (lambda: Cosine(warmup=-0.1), ValueError, r"warmup must lie in \[0, 1\]; got -0.1"),
    "warmup nan": (lambda: Cosine(warmup=math.nan), ValueError, "warmup must be finite; got nan"),
    "warmup kind": (lambda: Cosine(warmup="short"), TypeError, "warmup must be a number; got 'short'"),
    "floor of a polynomial": (lambda: Polynomial(floor=-1.0), ValueError, r"floor must lie in \[0, 1\]"),
    "power": (lambda: Polynomial(power=0), ValueError, "power must be above 0"),
}


@pytest.mark.parametrize(("call", "kind", "sentence"), CASES.values(), ids=CASES)
def test_a_wrong_option_raises_an_error_of_one_sentence(call, kind, sentence):
    with pytest.raises(kind, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_every_option_has_a_wrong_value_in_the_cases():
    covered = {word for name in CASES for word in name.split()[:1]}
    for kind in (*OPTIMISERS.values(), *SCHEDULES.values()):
        for field in dataclasses.fields(kind):
            assert field.name in covered, unknown("setting", field.name, covered)

"""Random steps over the whole language: the compiled step has the results and gradients of autograd."""

from functools import cache

import pytest
import torch
from torch.testing import assert_close

from tests.helpers.against_autograd import by_autograd, by_kernel, compiled, some_numbers, some_settings, wrong
from tests.helpers.random_steps import RandomStep, some
from unfading.fuse.c import emit_step, schedule
from unfading.fuse.ir import rules
from unfading.fuse.ir.interpret import next_states
from unfading.fuse.ir.program import ELEMENTWISE, REDUCTIONS, VIEWS, InputKind, Op, Program
from unfading.fuse.trace.recorder import Signature, trace

UNIT = 15  # programs per compilation
steps = cache(some)


def check(these: list[RandomStep], *, first: int = 0, optimised: bool = False) -> None:
    """Check each step under three settings; `first` is the number of the first step, so that settings differ."""
    kernels = compiled([traced(step) for step in these], optimised=optimised)
    for number, (step, kernel) in enumerate(zip(these, kernels, strict=True)):
        matters = False
        for setting in some_settings(step.signature(), first + number):
            errors, want = differences(step, kernel, setting)
            matters |= any(value.abs().max() > 1e-6 for name, value in want.items() if "gradient" in name)
            if errors:
                pytest.fail(report(step, setting, errors))
        assert matters, f"no gradient in\n{step}"


@cache
def traced(step: RandomStep, dtype: torch.dtype = torch.float64) -> Program:
    return trace(step.function(), step.signature(dtype))


def differences(step, kernel, setting):
    numbers = some_numbers(step.signature(), setting)
    want = by_autograd(step.function(), step.signature(), numbers, setting)
    return wrong(by_kernel(kernel, step.signature(), numbers, setting), want), want


def report(step, setting, errors) -> str:
    """The wrong results, the program, and the shortest beginning of the step that is wrong too."""
    cuts = step.cuts()
    kernels = compiled([traced(cut) for cut in cuts])
    short = next((cut for cut, kernel in zip(cuts, kernels, strict=True) if differences(cut, kernel, setting)[0]), step)
    names = "\n".join(f"  {name}: relative error {error:.1e}" for name, error in errors.items())
    return f"wrong:\n{names}\n{setting}\n\n{step}\n\n{traced(step)}\n\nwrong already:\n\n{short}\n\n{traced(short)}"


@pytest.mark.parametrize("unit", range(4))
@pytest.mark.sample(2)
def test_sixty_random_steps_have_the_results_and_gradients_of_autograd(unit):
    check(steps(60, 12)[UNIT * unit : UNIT * (unit + 1)], first=UNIT * unit)


def test_random_steps_have_them_in_optimised_code():
    check(steps(60, 12)[::15], first=100, optimised=True)


def test_random_steps_have_them_as_calls_of_functions(monkeypatch):
    """The form of long steps: every loop is a function, and loops are short."""
    monkeypatch.setattr(emit_step, "LONG", 0)
    monkeypatch.setattr(schedule, "MANY", 0)
    monkeypatch.setattr(schedule, "DEEPEST", 3)
    check(steps(60, 12)[::6], first=200)


@pytest.mark.long
@pytest.mark.parametrize("unit", range(34))
def test_five_hundred_random_steps_have_them_in_optimised_code(unit):
    check(steps(510, 20)[UNIT * unit : UNIT * (unit + 1)], first=UNIT * unit, optimised=True)


def test_random_steps_use_every_word_of_the_language():
    """Only the scheduler writes `copy`."""
    used = {value.op for step in steps(60, 12) for value in traced(step).values()}
    assert (ELEMENTWISE | VIEWS | REDUCTIONS | {Op.CAT, Op.DOT}) - used == {Op.COPY}


def test_evaluating_a_program_is_taking_its_step():
    for number, step in enumerate(steps(60, 12)):
        setting = some_settings(step.signature(), number)[1]
        inputs, states, weights, *_ = some_numbers(step.signature(), setting)
        rows = [x[0] for x in inputs]  # [1, n] for a shared one, as in the reference loop
        want = step.function()([row.expand(setting.B, -1) for row in rows], states, weights)
        for got, part in zip(next_states(traced(step), rows, states, weights), want, strict=True):
            assert_close(got, part, rtol=1e-12, atol=1e-12, msg=lambda text, step=step: f"{text}\n{step}")


def test_evaluation_takes_a_row_that_all_share_into_a_product_with_others():
    def step(inputs, states, weights):
        return [torch.tanh(torch.cat([*inputs, *states], 1) @ weights[0])]

    program = trace(step, Signature((3,), (InputKind.SHARED,), (4,), ((7, 4),), torch.float64))
    shared, h, W = (torch.randn(shape, dtype=torch.float64) for shape in ((1, 3), (5, 4), (7, 4)))
    (got,) = next_states(program, [shared], [h], [W])
    assert_close(got, step([shared.expand(5, -1)], [h], [W])[0], rtol=1e-12, atol=1e-12)


def test_unbind_is_compiled():
    step = RandomStep(
        lines=("v0 = (x0 * h0).unbind(1)", "v1 = torch.stack([v0[2], v0[0], v0[1] * v0[2]], 1)"),
        batched=(True, True),
        returns=("0.5 * torch.tanh(v1)",),
        inputs=(3,), kinds=("sequence",), states=(3,), weights=(),
    )  # fmt: skip
    check([step])


def test_random_steps_are_as_good_in_float32_as_torch():
    """The error against float64 is at most ten times that of torch's own loop in float32, or 1e-5, a hundred roundings."""
    these = steps(60, 12)[::6]
    kernels = compiled([traced(step, torch.float32) for step in these], torch.float32)
    for number, (step, kernel) in enumerate(zip(these, kernels, strict=True)):
        single, double = step.signature(torch.float32), step.signature()
        for setting in some_settings(double, number):
            numbers = some_numbers(single, setting)
            exact = type(numbers)(*([x if x is None else x.double() for x in group] for group in numbers))
            want = by_autograd(step.function(), double, exact, setting)
            torchs = wrong(by_autograd(step.function(), single, numbers, setting), want, 0.0)
            ours = wrong(by_kernel(kernel, single, numbers, setting), want, 0.0)
            for name, error in ours.items():
                assert error < max(1e-5, 10 * torchs.get(name, 0.0)), f"{name}: {error:.1e}\n{setting}\n{step}"


def test_a_fault_is_named_and_cut_to_the_lines_that_show_it(monkeypatch):
    lines = ["torch.tanh(h0)", "F.linear(v0, W0)", "torch.erf(v1)", "v2 * x0", "torch.softmax(v3, 1)"]
    step = RandomStep(
        lines=tuple(f"v{i} = {line}" for i, line in enumerate(lines)),
        batched=(True,) * 5,
        returns=("0.5 * torch.sin(v4)",),
        inputs=(3,), kinds=("sequence",), states=(3,), weights=((3, 3),),
    )  # fmt: skip
    check([step])
    right = rules.RULES[Op.ERF]

    def wrong_rule(b, value, x, y, d):
        return [b.map(Op.MUL, 1.001, part) for part in right(b, value, x, y, d)]

    monkeypatch.setitem(rules.RULES, Op.ERF, wrong_rule)
    with pytest.raises(pytest.fail.Exception) as caught:
        check([step])
    whole, short = caught.value.msg.split("wrong already:")
    for name in ("gradient of input 0", "gradient of state 0", "gradient of weight 0", "softmax", "= erf("):
        assert name in whole
    assert "trajectory" not in whole.partition("Setting")[0]
    assert "v2 = torch.erf(v1)" in short
    assert "v3" not in short

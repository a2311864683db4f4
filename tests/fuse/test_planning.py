"""Planning leaves no trace, in the cell or outside it, and can happen anywhere: in threads, hooks, modes and transforms."""

import copy
import os
import random
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import unfading
from tests.user import impure
from unfading.fuse import isolation, make_plan
from unfading.fuse import plan as plan_module
from unfading.fuse.fused import refusal
from unfading.fuse.locality import locality
from unfading.fuse.plan import plan
from unfading.fuse.refusal import Refusal

T, B, I = 6, 4, 3


def small_layers():
    """Layers that are planned anew, for programs that are compiled once."""
    yield unfading.STAR(I, 5)
    yield unfading.LSTM(I, 4, num_layers=2, dropout=0.2)
    yield unfading.STAR(I, 5, recurrent_dropout=0.3, zoneout=0.1, bidirectional=True)
    yield unfading.Recurrent(impure.StoresLast, I)
    yield unfading.STAR(I, 5, checkpoint_every=2)


def in_threads(number, function):
    """The results of a function that all threads enter at once; exceptions are results."""
    start, answers = threading.Barrier(number), [None] * number

    def run(i):
        start.wait()
        try:
            answers[i] = function()
        except Exception as error:
            answers[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("trials", [2, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_first_calls_from_many_threads(trials, mode):
    for trial in range(trials):
        for make in range(5 if trials < 10 else 1):
            layer = list(small_layers())[make if trials < 10 else trial % 5].train(mode == "training")
            noisy = mode == "training" and (layer.dropout or layer.zoneout)
            before = {name: (id(p), p.detach().clone()) for name, p in layer.named_parameters()}
            x = torch.randn(T, B, I)

            def first():
                if mode == "evaluation":
                    with torch.no_grad():
                        return layer(x)[0]  # noqa: B023
                parameters = list(layer.parameters())  # noqa: B023
                return torch.autograd.grad(layer(x)[0].sum(), parameters)  # noqa: B023

            answers = in_threads(8, first)
            errors = [answer for answer in answers if isinstance(answer, Exception)]
            assert not errors, errors[0]
            with unfading.use_backend("reference"):
                wanted = first()
            for answer in [] if noisy else answers:
                assert_close(answer, wanted)
            for name, parameter in layer.named_parameters():
                assert id(parameter) == before[name][0]
                assert torch.equal(parameter, before[name][1])


def test_a_trained_layer_is_evaluated_first_in_threads():
    layer, x = unfading.STAR(I, 5, num_layers=2), torch.randn(T, B, I)
    layer(x)[0].sum().backward()
    layer.eval()
    with torch.no_grad():
        answers = in_threads(8, torch.no_grad()(lambda: layer(x)[0]))
        with unfading.use_backend("reference"):
            assert_close(answers, [layer(x)[0]] * 8)


def test_a_fork_while_another_thread_plans(monkeypatch):
    """The child has a lock of its own, and plans."""
    planning, done = threading.Event(), threading.Event()
    make = make_plan.make_plan

    def slow(cell):
        planning.set()
        done.wait(30)
        return make(cell)

    layer, other, x = unfading.STAR(I, 5), unfading.STAR(I, 5), torch.randn(T, B, I)
    unfading.STAR(I, 5)(x)  # compiled before the fork
    monkeypatch.setattr(make_plan, "make_plan", slow)
    thread = threading.Thread(target=lambda: plan(other.cells[0]))
    thread.start()
    planning.wait(30)
    monkeypatch.setattr(make_plan, "make_plan", make)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a lock that is never released ends the child
        try:
            layer(x)
            os._exit(0 if refusal(layer.cells[0]) is None and refusal(other.cells[0]) is None else 1)
        except BaseException:
            os._exit(2)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        thread.join()


# -- interrupted --------------------------------------------------------------------------------------------------------------


class Interruption(Exception):
    """An exception that falls between two lines, as that of Ctrl-C or of an alarm does."""


def interrupted_at(number, function):
    """Run a function that is interrupted before a certain line of this thread; how many lines have run."""
    lines = 0

    def at_line(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        if lines == number:
            sys.settrace(None)
            raise Interruption
        return at_line

    sys.settrace(at_line)
    try:
        function()
    except Interruption:
        assert lines == number
    finally:
        sys.settrace(None)
    return lines


@contextmanager
def alarm(seconds):
    """Interrupt the block after a time."""

    def ring(*_):
        raise Interruption

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def assert_nothing_is_left(random_state):
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(torch.get_rng_state(), random_state)
    free = in_threads(1, lambda: plan_module._planning.lock.acquire(timeout=5) and plan_module._planning.lock.release())
    assert free == [None]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interruption inside a finaliser is lost
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("attempt", [plan, lambda cell: locality(cell, 20)], ids=["plan", "locality"])
def test_an_interruption_at_any_line_leaves_nothing(attempt, step):
    cell = unfading.STARCell(I, 5)
    want = plan(cell)
    first, second = copy.deepcopy(cell), copy.deepcopy(cell)
    attempt(first)  # so that modules are imported
    last, random_state = interrupted_at(-1, lambda: attempt(second)), torch.get_rng_state()
    # Most of the first lines read the contents of the cell. Those around the trial are among the last.
    for number in (*range(1, last - 60, 100 * step), *range(max(1, last - 60), last, step)):
        twin = copy.deepcopy(cell)
        parameters = dict(twin.named_parameters())
        interrupted_at(number, lambda: attempt(twin))  # noqa: B023
        assert_nothing_is_left(random_state)
        assert all(p is parameters[name] and not p.is_meta for name, p in twin.named_parameters())
        assert plan(twin) == want
        assert locality(twin, 20).refusal is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("trials", [8, pytest.param(500, marks=pytest.mark.long)])
def test_an_alarm_while_a_layer_is_planned(trials):
    layer, x = unfading.STAR(I, 5), torch.randn(T, B, I)
    want, random_state = layer(x)[0], torch.get_rng_state()

    for trial in range(trials):
        twin = copy.deepcopy(layer)
        with suppress(Interruption), alarm(1e-4 + 0.03 * trial / trials):
            plan(twin.cells[0])
        assert_nothing_is_left(random_state)
        assert_close(twin(x)[0], want)
        assert refusal(twin.cells[0]) is None


class Hanging(unfading.STARCell):
    """A projection that does not end."""

    def project(self, x, start=0):
        while self.hangs:
            x = x + 0
        return super().project(x, start)


def test_a_cell_that_hangs_can_be_interrupted(monkeypatch):
    monkeypatch.setattr(isolation, "PATIENCE", 0.1)
    cell, threads = Hanging(I, 5), set(sys._current_frames())
    cell.hangs = True
    with pytest.raises(Interruption), alarm(0.1):
        plan(cell)
    deadline = time.monotonic() + 20
    while set(sys._current_frames()) - threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    cell.hangs = False
    assert not isinstance(plan(cell), Refusal)


def test_a_trial_waits_for_no_other_thread():
    """Neither for the caller, which holds a lock while torch.compile traces it, nor for the thread of gradients on a GPU."""
    from torch._dynamo.convert_frame import compile_lock

    def trial():
        taken = compile_lock.acquire(timeout=1)
        if taken:
            compile_lock.release()
        return taken, torch._C._is_multithreading_enabled()

    for times in range(3):
        for _ in range(times):
            compile_lock.acquire()
        assert isolation.apart(trial) == (True, False)
        for _ in range(times):
            compile_lock.release()
    assert torch._C._is_multithreading_enabled()


# -- inside the caller's hooks, modes and transforms --------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_first_call_inside_a_checkpoint(reentrant):
    layer, x = unfading.STAR(I, 5), torch.randn(T, B, I, requires_grad=True)
    checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant).sum().backward()
    assert refusal(layer.cells[0]) is None
    gradient, x.grad = x.grad, None
    with unfading.use_backend("reference"):
        layer(x)[0].sum().backward()
    assert_close(gradient, x.grad)


def test_hooks_for_saved_tensors_see_the_tensors_of_the_call():
    layer, x, packed = unfading.STAR(I, 5), torch.randn(T, B, I, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.device.type) or t, lambda t: t):
        layer(x)
    assert set(packed) == {"cpu"}
    layer = unfading.STAR(I, 5)
    with torch.autograd.graph.save_on_cpu():
        layer(x)[0].sum().backward()
    assert refusal(layer.cells[0]) is None


class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        assert not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves)
        return func(*args, **(kwargs or {}))


class LogFunctions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert not any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "context",
    [
        Log,
        LogFunctions,
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("cpu"),
        torch.autograd.graph.save_on_cpu,
    ],
    ids=["dispatch", "function", "inference", "no_grad", "autocast", "device", "save_on_cpu"],
)
def test_a_first_plan_inside_a_mode(context):
    cell = unfading.STARCell(I, 5)
    with context():
        first = plan(cell)
    assert first.with_project
    assert plan(cell) is first


def test_a_first_plan_in_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    try:
        layer, x = unfading.STAR(I, 5, zoneout=0.1), torch.randn(T, B, I)
        layer(x)
        assert refusal(layer.runners[0]) is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_first_call_inside_vmap():
    models = [unfading.STAR(I, 5) for _ in range(3)]
    layer, x = copy.deepcopy(models[0]), torch.randn(T, B, I)
    parameters, buffers = torch.func.stack_module_state(models)

    def call(parameters):
        return torch.func.functional_call(layer, (parameters, buffers), (x,))[0]

    outputs = torch.func.vmap(call)(parameters)
    with unfading.use_backend("reference"):
        assert_close(outputs, torch.stack([model(x)[0] for model in models]))
    gradients = torch.func.grad(lambda p: call(p).sum())({name: p[0] for name, p in parameters.items()})
    assert gradients.keys() == parameters.keys()
    assert refusal(layer.cells[0]) is None


def test_a_first_call_inside_torch_compile():
    torch.compiler.reset()
    layer, x = unfading.STAR(I, 5), torch.randn(T, B, I, requires_grad=True)
    output = torch.compile(layer, backend="eager")(x)[0]
    with unfading.use_backend("reference"):
        assert_close(output, layer(x)[0])
    assert not any(p.is_meta for p in layer.parameters())
    assert refusal(layer.cells[0]) is None


def test_a_first_call_inside_torch_export():
    layer, x = unfading.STAR(I, 5), torch.randn(T, B, I)
    program = torch.export.export(layer, (x,))
    with unfading.use_backend("reference"):
        assert_close(program.module()(x)[0], layer(x)[0])
    assert all(type(p) is nn.Parameter and not p.is_meta for p in layer.parameters())


# -- what a cell writes ---------------------------------------------------------------------------------------------------


def everything(cell):
    """The tensors and numbers that a cell holds."""
    attributes = {name: value for name, value in vars(cell).items() if isinstance(value, torch.Tensor | int | float)}
    return {**attributes, **cell.state_dict()}


CELLS = [
    impure.Normalised,
    impure.LazyConstant,
    impure.LazyNumber,
    impure.PositionTable,
    impure.StoresLast,
    impure.StoresInStep,
    impure.Spectral,
    impure.Cached,
]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.sample(4)
def test_a_cell_that_writes_is_as_after_the_reference(cell, grad):
    states = []
    for backend in ("auto", "reference"):
        impure.constant.cache_clear()
        torch.manual_seed(0)
        layer, outputs = unfading.Recurrent(cell, I, backend=backend), []
        for steps in (T, 3, 2 * T):
            x = torch.randn(steps, B, I)
            with torch.set_grad_enabled(grad):
                outputs.append(layer(x)[0].detach())
        assert not any(isinstance(value, torch.Tensor) and value.is_meta for value in everything(layer.cells[0]).values())
        states.append((outputs, everything(layer.cells[0])))
    assert_close(*states)


def test_what_only_project_writes_leaves_the_step_compiled():
    for cell in (impure.Normalised, impure.PositionTable, impure.StoresLast, impure.Spectral, impure.Cached):
        layer, x = unfading.Recurrent(cell, I), torch.randn(T, B, I)
        layer(x)
        layer(x)
        assert refusal(layer.cells[0]) is None, cell
        first = plan(layer.cells[0])
        layer(x)
        assert plan(layer.cells[0]) is first, cell


def test_what_a_step_writes_is_refused_with_its_name():
    layer = unfading.Recurrent(impure.StoresInStep, I)
    layer(torch.randn(T, B, I))
    assert "step writes the attribute last, which a compiled loop would not do" in refusal(layer.cells[0])


def test_planning_draws_no_random_numbers():
    layer = unfading.Recurrent(impure.Draws, I)
    cell = layer.cells[0]
    noisy = unfading.STAR(I, 5, recurrent_dropout=0.3, zoneout=0.1).runners[0]

    def streams():
        own = (cell.own.getstate(), str(cell.numpy.bit_generator.state), cell.torch.get_state().tolist())
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), own

    before = streams()
    assert not isinstance(plan(cell), str)
    plan(noisy)
    assert streams() == before


def test_hooks_are_called_by_calls_only():
    layer, x, calls = unfading.Recurrent(impure.Plain, I), torch.randn(T, B, I), []
    layer.cells[0].W.register_forward_hook(lambda module, inputs, output: calls.append((output.device.type, output.shape)))
    layer(x)
    assert calls == [("cpu", (T, B, impure.H))]
    assert "a hook is registered on the Linear of the cell" in refusal(layer.cells[0])
    handle = register_module_forward_hook(lambda module, inputs, output: calls.append(type(module)))
    try:
        layer = unfading.STAR(I, 5)
        layer(x)
    finally:
        handle.remove()
    assert calls[1:] == [nn.Linear, unfading.STAR]
    layer(x)
    assert refusal(layer.cells[0]) is None


# -- gradients of what is not used, and lines of refusals -----------------------------------------------------------------


class UnusedWeights(impure.Plain):
    def __init__(self, input_size):
        super().__init__(input_size)
        self.unused = nn.Parameter(torch.ones(impure.H))

    def weights(self):
        return impure.Weights(self.U), self.unused

    def step(self, inputs, state, weights):
        return super().step(inputs, state, weights[0])


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_an_unused_weight_has_no_gradient(backend):
    layer = unfading.Recurrent(UnusedWeights, I, backend=backend)
    layer(torch.randn(T, B, I))[0].sum().backward()
    assert layer.cells[0].unused.grad is None
    assert layer.cells[0].U.grad is not None


def test_a_refusal_of_a_cell_without_a_file_names_its_line():
    names = {}
    text = "import unfading\nclass Branch(unfading.ElmanCell):\n  def step(self, i, s, w):\n    return float(s.h.sum())\n"
    exec(compile(text, "<string>", "exec"), names)
    layer = unfading.Recurrent(lambda n: names["Branch"](n, 5), I)
    assert refusal(layer.cells[0]).endswith("(<string>:4)")

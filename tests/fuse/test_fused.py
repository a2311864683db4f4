"""The compiled loop equals the reference loop for every cell: outputs, final state, all gradients; and it works with torch."""

import copy
import math
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from functools import cache

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import unfading
from tests.helpers import laws
from tests.helpers.compiled import TOLERANCE, AppliedCell, agree, agrees_with_the_reference, built, everything
from tests.helpers.variants import hidden_size, name, sampled
from tests.user.quiet import QuietCell
from unfading import catalogue
from unfading.fuse.fused import refusal
from unfading.fuse.plan import PROGRAMS, plan
from unfading.fuse.refusal import Refusal

CELLS = [*catalogue.cells(), QuietCell]
each = pytest.mark.parametrize("cell", CELLS, ids=name)
# Where the number of features does not matter, it is that of the laws, so that tests share kernels.


@each
@pytest.mark.sample(30)
def test_every_cell_agrees_with_the_reference(cell):
    agrees_with_the_reference(cell, 7, 5, hidden_size(cell), torch.float64, features=laws.I, bidirectional=True)


@pytest.mark.parametrize("cell", sampled(CELLS))
@pytest.mark.sample(4)
def test_every_cell_agrees_with_the_reference_in_float32(cell):
    agrees_with_the_reference(cell, 9, 27, hidden_size(cell), torch.float32, features=laws.I)


def size_for(cell, H):
    """EURNN and GORU in their FFT style need powers of two."""
    return 1 << (H - 1).bit_length() if hidden_size(cell) == 8 else H


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(1, 1, 1), (7, 5, 33), (63, 2, 65), (3, 50, 100)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@each
def test_every_cell_agrees_at_sizes_that_divide_nothing(cell, dtype, sizes):
    T, B, H = sizes
    agrees_with_the_reference(cell, T, B, max(2, size_for(cell, H)) if hidden_size(cell) == 8 else H, dtype, bidirectional=True)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (63, 2, 65), (3, 50, 100), (5, 131, 16)], ids=str)
@pytest.mark.parametrize("cell", sampled([unfading.LSTMCell, unfading.STARCell, unfading.IncrementalRNNCell], ["LSTM"]))
@pytest.mark.sample(2)
def test_sizes_that_divide_nothing(cell, sizes):
    T, B, H = sizes
    agrees_with_the_reference(cell, T, B, H, torch.float64)


@pytest.mark.parametrize("cell", [unfading.STARCell, unfading.IncrementalRNNCell], ids=name)
def test_more_units_than_a_vector_holds(cell):
    agrees_with_the_reference(cell, 9, 2, 65, torch.float64)


def test_memory_that_was_not_written_is_not_read():
    torch.use_deterministic_algorithms(True)  # fills the memory of torch.empty with NaN
    try:
        assert torch.empty(3).isnan().all()
        for cell in (unfading.LSTMCell, unfading.IncrementalRNNCell, unfading.NRUCell, QuietCell):
            agrees_with_the_reference(cell, 6, 29, 5, torch.float64, features=laws.I, bidirectional=True)
    finally:
        torch.use_deterministic_algorithms(False)


@each
@pytest.mark.sample(10)
def test_every_cell_is_compiled_with_its_projection_but_one(cell):
    cell_plan = plan(cell(3, hidden_size(cell)))
    assert not isinstance(cell_plan, Refusal), cell_plan
    assert cell_plan.with_project == (name(cell) not in ("EquilibriumRNN", "Quiet"))


@pytest.mark.parametrize("bidirectional", [True, pytest.param(False, marks=pytest.mark.long)])
def test_long_sequences_in_pieces(bidirectional, monkeypatch):
    from unfading.fuse import fused
    from unfading.fuse.c import backward

    monkeypatch.setattr(fused, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(backward, "CHUNK_BYTES", 1 << 10)
    for cell in (unfading.LSTMCell, unfading.IncrementalRNNCell, QuietCell):
        table = {"steps": 30} if cell is unfading.IncrementalRNNCell else {}
        layer = built(cell, 5, features=laws.I, bidirectional=bidirectional, **table)
        x, lengths = torch.randn(50, 7, laws.I, dtype=torch.float64), torch.randint(1, 51, (7,))
        for own in (None, lengths):
            agree(everything(layer, x, "fused", own), everything(layer, x, "reference", own), torch.float64)
            layer.eval()
            with torch.no_grad():
                with unfading.use_backend("reference"):
                    want = layer(x, lengths=own)
                assert_close(layer(x, lengths=own), want, rtol=1e-11, atol=1e-11)
            layer.train()


def test_two_threads_do_as_one():
    layer, x = built(unfading.LSTMCell, 64), torch.randn(100, 50, 3, dtype=torch.float64)
    one = everything(layer, x, "fused")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        agree(everything(layer, x, "fused"), one, torch.float64)
    finally:
        torch.set_num_threads(threads)


# -- NaN, infinity and denormals ----------------------------------------------------------------------------------------------

SPECIAL = [
    0.0,
    -0.0,
    1e-310,
    -1e-310,
    1e-40,
    -1e-40,
    5.0,
    -5.0,
    88.0,
    89.5,
    -88.0,
    -104.5,
    709.5,
    711.0,
    -746.0,
    1e30,
    math.inf,
    -math.inf,
    math.nan,
]
FUNCTIONS = [
    "exp",
    "expm1",
    "log",
    "log1p",
    "tanh",
    "sigmoid",
    "relu",
    "abs",
    "sqrt",
    "sign",
    "sin",
    "cos",
    "erf",
    "reciprocal",
    "neg",
]


class FunctionsCell(AppliedCell):
    """h = f(x) for every function f, one after the other: one kernel for all."""

    def __init__(self, size):
        super().__init__("", size)
        self.output_size = len(FUNCTIONS) * size

    def step(self, inputs, state, weights):
        return type(state)(torch.cat([getattr(torch, function)(inputs.a) * weights.a for function in FUNCTIONS], dim=-1))


@cache
def results_at_special_numbers(dtype):
    x = torch.tensor(SPECIAL, dtype=dtype)
    sizes = torch.logspace(-40, 38, 79, dtype=torch.float64).to(dtype)
    small = sizes[30:45]
    x = torch.cat([x, torch.linspace(-20, 20, 77, dtype=dtype), sizes, -sizes, 1 + small, 1 - small, small - 1])
    layer = unfading.Recurrent(FunctionsCell, len(x), dtype=dtype, backend="fused")
    with torch.no_grad():
        parts = layer(x.reshape(1, 1, -1))[0].reshape(len(FUNCTIONS), -1)
    return x, dict(zip(FUNCTIONS, parts, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.sample(8)
def test_infinities_nan_and_denormals_are_as_in_torch(function, dtype):
    x, results = results_at_special_numbers(dtype)
    got, want = results[function], getattr(torch, function)(x)
    assert_close(got, want, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny, equal_nan=True)
    zero = want == 0
    assert torch.equal(got[zero].signbit(), want[zero].signbit())


# -- copies, processes, compilers and torch -----------------------------------------------------------------------------------


def test_a_changed_option_is_noticed():
    layer, x = built(unfading.STARCell, 5), torch.randn(6, 2, 3, dtype=torch.float64)
    before = layer(x)[0]
    layer.cells[0].shift = 1.0
    with unfading.use_backend("reference"):
        want = layer(x)[0]
    assert not torch.equal(before, want)
    assert_close(layer(x)[0], want, rtol=1e-11, atol=1e-11)


class RatedCell(AppliedCell):
    def rate(self):
        return 0.5

    def step(self, inputs, state, weights):
        return type(state)(self.rate() * super().step(inputs, state, weights)[0])


def test_a_replaced_method_is_noticed(monkeypatch):
    layer = unfading.Recurrent(lambda size: RatedCell("tanh", size), 3, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    agree(everything(layer, x, "fused"), everything(layer, x, "reference"), torch.float64)
    for function in (lambda self: 0.1, lambda self: 0.2):
        monkeypatch.setattr(RatedCell, "rate", function)
        agree(everything(layer, x, "fused"), everything(layer, x, "reference"), torch.float64)


class IdleCell(unfading.STARCell):
    """Its weights have a matrix that the step does not read, and its inputs a field."""

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.idle = torch.nn.Parameter(torch.eye(hidden_size))

    def weights(self):
        used = super().weights()
        return (used, self.idle)

    def step(self, inputs, state, weights):
        return super().step(inputs, state, weights[0])


@pytest.mark.parametrize("checkpoint_every", [None, 3])
def test_what_a_step_does_not_read_has_no_gradient(checkpoint_every):
    layer = unfading.Recurrent(
        lambda size: IdleCell(size, 4), 3, dtype=torch.float64, checkpoint_every=checkpoint_every, backend="fused"
    )
    output, _ = layer(torch.full((7, 2, 3), 0.5, dtype=torch.float64))
    output.sum().backward()
    assert layer.cells[0].idle.grad is None
    assert all(p.grad is not None for name, p in layer.named_parameters() if "idle" not in name)


def test_copies_casts_and_pickles_after_a_kernel_was_built():
    layer, x = built(unfading.LSTMCell, 5, torch.float32, backend="fused"), torch.randn(6, 2, 3)
    want = layer(x)[0]
    assert torch.equal(copy.deepcopy(layer)(x)[0], want)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], want)
    assert_close(layer.double()(x.double())[0], want.double(), rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.float()(x)[0], want)


def _last(layer, x):
    """One number of the output. Nothing here makes torch start threads, which do not survive a fork."""
    with torch.no_grad():
        return layer(x)[0][-1, -1, -1].item()


def _forked(layer, x, queue):
    queue.put(_last(layer, x))


def test_a_forked_process_runs_it():
    layer, x = built(unfading.LSTMCell, 64, backend="fused"), torch.randn(100, 50, 3, dtype=torch.float64)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # so that the pool has threads, which a fork does not copy
    try:
        want = _last(layer, x)
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=_forked, args=(layer, x, queue))
        process.start()
        assert queue.get(timeout=60) == want
        process.join()
    finally:
        torch.set_num_threads(threads)


class _Encoded(torch.utils.data.Dataset):
    def __init__(self, layer):
        self.layer = layer

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            return self.layer(torch.full((5, 1, 3), float(index), dtype=torch.float64))[0][-1, 0]


def test_it_runs_in_workers_of_a_data_loader():
    data = _Encoded(built(unfading.STARCell, 5, backend="fused"))
    got = torch.cat(list(DataLoader(data, batch_size=2, num_workers=2)))
    assert torch.equal(got, torch.stack([data[i] for i in range(4)]))
    assert len(TensorDataset(got)) == 4


def test_without_a_compiler_auto_takes_the_reference(tmp_path):
    script = (
        "import torch, unfading\n"
        "layer = unfading.STAR(2, 3)\n"
        "print(layer(torch.ones(4, 1, 2))[0].shape)\n"
        "try:\n"
        "    unfading.STAR(2, 3, backend='fused')(torch.ones(4, 1, 2))\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "CC": "no-such-compiler", "UNFADING_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "torch.Size([4, 1, 3])" in done.stdout
    assert "STARCell cannot run fused: CC='no-such-compiler' names" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_both_compilers(compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    environment = {**os.environ, "CC": compiler, "UNFADING_CACHE": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "agrees_with_the_reference or infinities",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_export_holds_one_opaque_operator():
    layer, x = built(unfading.STARCell, 5), torch.randn(6, 2, 3, dtype=torch.float64)
    exported = torch.export.export(layer, (x,))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum("fused_forward" in target for target in called) == 1
    assert_close(exported.module()(x), layer(x))


def test_forward_mode_goes_to_the_reference_and_is_right():
    layer, x = built(unfading.LSTMCell, 5), torch.randn(6, 2, 3, dtype=torch.float64)
    direction = torch.randn_like(x)

    def output(x):
        assert "forward-mode" in (refusal(layer.cells[0]) or "")
        return layer(x)[0]

    _, tangent = torch.func.jvp(output, (x,), (direction,))
    step = 1e-6
    with torch.no_grad():
        want = (layer(x + step * direction)[0] - layer(x - step * direction)[0]) / (2 * step)
    assert_close(tangent, want, rtol=1e-6, atol=1e-8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        assert_close(torch.autograd.forward_ad.unpack_dual(output(dual)).tangent, tangent)


def test_a_program_is_small_and_readable():
    text = str(PROGRAMS[plan(unfading.STARCell(3, 8)).key])
    assert len(text.splitlines()) < 25
    assert "tanh(" in text
    assert "next0[0:] <- " in text


MEMORY = """
import resource, torch, unfading
torch.set_num_threads(1)
layer = unfading.LSTM(1, 128, checkpoint_every=316)
x = torch.randn(100_000, 8, 1)
output, _ = layer(x)
output[-1].sum().backward()
assert all(p.grad.isfinite().all() for p in layer.parameters())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)
"""


@pytest.mark.long
def test_a_hundred_thousand_steps_in_two_gigabytes():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2.0


# -- errors that must not be silent -------------------------------------------------------------------------------------------


def test_a_wrong_output_size_is_a_sentence_without_a_gradient_too():
    cell = unfading.STARCell(3, 5)
    cell.output_size = 2
    layer = unfading.Recurrent(lambda size: cell, 3)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), pytest.raises((ValueError, RuntimeError)):
            layer(torch.ones(4, 2, 3))


def test_recorders_of_operations_get_the_reference():
    from torch.utils.flop_counter import FlopCounterMode

    layer, x = built(unfading.STARCell, 5), torch.randn(6, 2, 3, dtype=torch.float64)
    want = layer(x)[0]
    with FlopCounterMode(display=False) as counted:
        layer(x)
    assert counted.get_total_flops() > 0
    assert_close(make_fx(lambda x: layer(x)[0])(x)(x), want)


class Viewed(unfading.STARCell):
    def output(self, state):
        return state.h[..., :]


def test_outputs_of_a_stream_are_its_users_own():
    cell, x = Viewed(3, 5), torch.randn(6, 2, 3)
    layer = unfading.Recurrent(lambda size: cell, 3)
    stream = layer.stream(2)
    got = torch.stack([stream.push(step) for step in x])
    assert_close(got, layer(x)[0].detach())


def test_a_stream_goes_on_as_it_began_whatever_becomes_of_the_layer():
    layer, x = built(unfading.STARCell, 5, torch.float32, learn_initial_state=True), torch.randn(6, 2, 3)
    want = layer(x)[0].detach()
    stream = layer.stream(2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(1.0)
    for _ in range(2):
        assert_close(torch.stack([stream.push(step) for step in x]), want)
        stream.reset()


@pytest.mark.parametrize("cell", sampled(CELLS))
@pytest.mark.sample(3)
def test_a_stream_is_the_layer(cell):
    features = hidden_size(cell)  # so that both layers have one kernel
    layer = built(cell, hidden_size(cell), features=features, num_layers=2, zoneout=0.1).eval()
    x = torch.randn(9, 2, features, dtype=torch.float64)
    with torch.no_grad():
        want, state = layer(x[:4], start=2)
        rest, _ = layer(x[4:], state, start=6)
    stream = layer.stream(2, start=2)
    assert_close(torch.stack([stream.push(step) for step in x[:4]]), want, rtol=1e-11, atol=1e-11)
    again = layer.stream(2, state, start=6)
    assert_close(torch.stack([again.push(step) for step in x[4:]]), rest, rtol=1e-11, atol=1e-11)


def test_bad_input_of_a_stream():
    layer = unfading.STAR(3, 5)
    with pytest.raises(ValueError, match=r"push takes torch.float32 \[1, 3\] .* got torch.float32 \[1, 4\]"):
        layer.stream().push(torch.ones(1, 4))
    with pytest.raises(ValueError, match="bidirectional"):
        unfading.STAR(3, 5, bidirectional=True).stream()
    with pytest.raises(ValueError, match="call eval"):
        unfading.STAR(3, 5, zoneout=0.5).stream()
    with pytest.raises(ValueError, match="batch"):
        layer.stream(0)


def test_numbers_that_differ_in_the_eighth_digit_are_two_programs():
    keys = {plan(unfading.AntisymmetricRNNCell(3, 5, epsilon=epsilon)).key for epsilon in (0.1, 0.10000001)}
    assert len(keys) == 2


def test_a_compiled_layer_follows_training_and_evaluation():
    layer, x = built(unfading.STARCell, 5, zoneout=0.5), torch.randn(6, 2, 3, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    compiled(x)
    layer.eval()
    assert_close(compiled(x)[0], layer(x)[0])

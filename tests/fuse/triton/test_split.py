"""Loops whose units are divided among programs that wait for each other, under Triton's interpreter."""

import copy
import os
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple

import pytest
import torch
import triton
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.testing import assert_close

import unfading
from tests.helpers.against_autograd import Numbers, by_autograd, named_results, some_numbers, some_settings, wrong
from tests.helpers.compiled import built
from tests.helpers.cooperative import cooperative
from tests.helpers.random_steps import some
from tests.helpers.triton_laws import CELLS, agree, everything
from tests.helpers.variants import hidden_size, name, sampled
from unfading.fuse.ir.program import Op, Store, TensorKind
from unfading.fuse.plan import TensorNames, interpreted, plan, triton_kernel
from unfading.fuse.trace.recorder import trace
from unfading.fuse.triton import emit_split, split_kernel, stages
from unfading.fuse.triton import kernel as module
from unfading.fuse.triton.frame import OWN
from unfading.fuse.triton.launch_settings import (
    CHUNK,
    H200,
    SUMMED_UNITS,
    Candidate,
    Gpu,
    LaunchSettings,
    LoopShape,
    Matrices,
    SplitShape,
    candidates,
    shares_of,
)
from unfading.fuse.triton.source import triton_missing
from unfading.fuse.triton.split_frame import SplitFrame
from unfading.fuse.triton.split_kernel import SplitLoops
from unfading.fuse.triton.split_tiles import pieces
from unfading.fuse.triton.summed_tiles import chunks
from unfading.loop_options import LoopOptions

pytestmark = [
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="TRITON_INTERPRET is off"),
    pytest.mark.skipif(triton_missing() is not None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the contents of the padding
]


def units_of_a_program(n):
    return [Candidate(1.0, LaunchSettings(16, 4, None, 0, n))]


@pytest.fixture(autouse=True)
def divided(monkeypatch):
    """Every loop has its units divided, 16 to a program, and several blocks of rows run at the same time."""
    monkeypatch.setattr(module, "SPLIT_FROM", 0)
    monkeypatch.setattr(module, "gpu", lambda device: Gpu(16, 1 << 20))
    monkeypatch.setattr(module, "candidates", lambda *given, **options: units_of_a_program(16))
    with interpreted():
        yield


@pytest.fixture
def streamed(divided, monkeypatch):
    """Matrices are loaded at every step, 32 entries at a time."""
    monkeypatch.setattr(module, "candidates", lambda *given, **options: [Candidate(1.0, LaunchSettings(16, 4, 32, 0, 16))])


@pytest.fixture
def summed(divided, monkeypatch):
    """Programs sum up products of each other."""
    setting = LaunchSettings(16, 4, None, 0, 16, summed=True)
    monkeypatch.setattr(module, "candidates", lambda *given, **options: [Candidate(1.0, setting)])


def compared(layer, x, lengths):
    exact = copy.deepcopy(layer).double()
    kernels = {triton_kernel(plan(runner).key) for runner in layer.runners}
    for kernel in kernels:
        for loops in ("split", "streamed", "summed"):
            vars(kernel).pop(loops, None)
        kernel._prepared.clear()
        kernel._settings.clear()
        with ExitStack() as programs:
            for loops in filter(None, (kernel.split, kernel.streamed, kernel.summed)):
                programs.enter_context(cooperative(loops.launcher.module))
            for some in (None,) if lengths is None else (None, lengths):
                agree(everything(layer, x, some, "fused"), everything(exact, x, some, "reference"))
        kernel._settings.clear()


@pytest.mark.parametrize("cell", sampled(CELLS, ["LSTM"]))
def test_every_cell_agrees_with_the_reference_in_float64(cell):
    size = max(hidden_size(cell), 35) if hidden_size(cell) % 2 else 32
    layer = built(cell, size, torch.float32)
    compared(layer, torch.randn(3, 19, 3), torch.randint(1, 4, (19,)))


@pytest.mark.parametrize("cell", sampled(CELLS, ["LSTM"]))
def test_matrices_may_be_loaded_at_every_step(cell, streamed):
    size = max(hidden_size(cell), 35) if hidden_size(cell) % 2 else 32
    compared(built(cell, size, torch.float32), torch.randn(2, 5, 3), torch.tensor([1, 2, 2, 1, 2]))


@pytest.mark.parametrize("cell", [unfading.LSTMCell, pytest.param(unfading.GRUCell, marks=pytest.mark.long)], ids=name)
@pytest.mark.parametrize(("size", "batch"), [(35, 5), pytest.param(150, 19, marks=pytest.mark.long)])
def test_programs_may_sum_up_products_of_each_other(cell, size, batch, summed):
    layer = built(cell, size, torch.float32)
    assert triton_kernel(plan(layer.runners[0]).key).summed is not None
    compared(layer, torch.randn(3, batch, 3), torch.randint(1, 4, (batch,)))


@pytest.mark.parametrize("way", ["divided", "streamed", "summed"])
@pytest.mark.sample(1)
def test_one_step_of_one_row(way, request):
    request.getfixturevalue(way)
    compared(unfading.Recurrent(lambda size: TwiceCell(size, 35), 3), torch.randn(1, 1, 3), torch.tensor([1]))


@pytest.mark.parametrize("lengths", [None, pytest.param([1, 3, 2, 3, 1], marks=pytest.mark.long)], ids=str)
def test_the_gradient_of_an_input_of_one_feature_is_a_sum_over_all_programs(summed, lengths):
    lengths = None if lengths is None else torch.tensor(lengths)
    compared(built(unfading.LSTMCell, 35, torch.float32, features=1), torch.randn(3, 5, 1), lengths)


def test_a_vector_may_be_read_twice_in_chunks(streamed):
    compared(unfading.Recurrent(lambda size: TwiceCell(size, 35), 3), torch.randn(2, 5, 3), None)


@pytest.mark.long
def test_a_head_is_divided_among_fewer_programs():
    layer = unfading.Elman(3, 140, heads=2)
    assert triton_kernel(plan(layer.runners[0]).key).split.functions["train"].shape.parts(16) == 5
    compared(layer, torch.randn(2, 5, 3), torch.tensor([1, 2, 2, 1, 2]))


@pytest.mark.long
def test_the_other_direction():
    compared(unfading.LSTM(3, 35, bidirectional=True), torch.randn(3, 19, 3), torch.randint(1, 4, (19,)))


class Inputs(NamedTuple):
    a: torch.Tensor


class Weights(NamedTuple):
    U: torch.Tensor


class State(NamedTuple):
    h: torch.Tensor


class PlainCell(unfading.Cell):
    """a = W x, a state h and a matrix U; the step is that of each subclass."""

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.W = nn.Linear(input_size, hidden_size)
        self.U = nn.Parameter(torch.randn(hidden_size, hidden_size) / hidden_size**0.5)

    def project(self, x, start=0):
        return Inputs(self.W(x))

    def weights(self):
        return Weights(self.U)

    def initial_state(self, batch):
        return State(self.U.new_zeros(batch, self.output_size))


class AttentiveCell(PlainCell):
    """h' = softmax(h) * tanh(W x + U h), which reads the largest unit and a sum over all units."""

    def step(self, inputs, state, weights):
        return State(torch.softmax(10 * state.h, -1) * torch.tanh(inputs.a + state.h @ weights.U.T))


def test_maxima_and_sums_are_taken_over_all_programs():
    layer = unfading.Recurrent(lambda size: AttentiveCell(size, 35), 3)
    functions = triton_kernel(plan(layer.runners[0]).key).split.functions
    assert (functions["train"].partial, functions["back"].partial) == (2, 2)
    compared(layer, torch.randn(2, 5, 3), torch.tensor([1, 2, 2, 1, 2]))


class TwoStates(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


class LateCell(PlainCell):
    """c' = tanh(c + a) and h' = tanh(U (a h) + U c): c' is exchanged before the dot that reads c."""

    def initial_state(self, batch):
        return TwoStates(*(self.U.new_zeros(batch, self.output_size) for _ in range(2)))

    def step(self, inputs, state, weights):
        h = torch.tanh((inputs.a * state.h) @ weights.U.T + state.c @ weights.U.T)
        return TwoStates(h, torch.tanh(state.c + inputs.a))


class TwiceCell(PlainCell):
    """h' = tanh(W x + U h + U^T h): a dot that reads one vector twice."""

    def step(self, inputs, state, weights):
        return State(torch.tanh(inputs.a + state.h @ weights.U.T + state.h @ weights.U))


class TableInputs(NamedTuple):
    a: torch.Tensor
    p: torch.Tensor


class TableCell(PlainCell):
    """h' = tanh(W x + U h) sum(tanh(p p^T)) for p = (W x)[:8]: the table, which is saved, has more entries than the state."""

    def project(self, x, start=0):
        a = self.W(x)
        return TableInputs(a, a[..., :8])

    def step(self, inputs, state, weights):
        table = torch.tanh(inputs.p.unsqueeze(2) * inputs.p.unsqueeze(1))
        return State(torch.tanh(inputs.a + state.h @ weights.U.T) * table.sum((1, 2)).unsqueeze(1))


class TimedInputs(NamedTuple):
    a: torch.Tensor
    t: torch.Tensor


class TimedWeights(NamedTuple):
    U: torch.Tensor
    V: torch.Tensor
    v: torch.Tensor


class TimedCell(PlainCell):
    """h' = tanh(W x + U h + V tanh(v t)): a dot of one entry that all rows share."""

    shared = ("t",)

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.V, self.v = nn.Parameter(torch.randn(hidden_size, 8)), nn.Parameter(torch.randn(8, 1))

    def project(self, x, start=0):
        return TimedInputs(self.W(x), torch.arange(start, start + len(x)).to(x).reshape(-1, 1, 1))

    def weights(self):
        return TimedWeights(self.U, self.V, self.v)

    def step(self, inputs, state, weights):
        time = torch.tanh(inputs.t @ weights.v.T)
        return State(torch.tanh(inputs.a + state.h @ weights.U.T + time @ weights.V.T))


@pytest.mark.parametrize("cell", sampled([LateCell, TimedCell, TwiceCell, TableCell], ["Twice"]))
def test_every_kind_of_step_agrees_with_the_reference(cell):
    compared(unfading.Recurrent(lambda size: cell(size, 35), 3), torch.randn(3, 5, 3), torch.tensor([1, 3, 2, 2, 3]))


class HeadsCell(PlainCell):
    """Tables of several axes: a softmax of each line, their transpose, lines behind other lines, their largest entries."""

    lines = 6

    def step(self, inputs, state, weights):
        k, n = self.lines, self.output_size // self.lines
        table = (inputs.a + state.h @ weights.U.T).reshape(-1, k, n)
        spread = torch.softmax(table, -1) * state.h.reshape(-1, k, n) + 0.1 * table.sum(1, keepdim=True)
        turned = torch.tanh(spread.transpose(1, 2)).reshape(-1, k, n)
        largest = torch.cat([turned[:, 2:], 2 * table[:, :2]], 1).amax(2, keepdim=True)
        return State(torch.tanh(turned * largest).reshape(-1, k * n))


class LinesCell(HeadsCell):
    """The same with more lines and fewer columns."""

    lines = 12


@pytest.fixture
def divided_tables(monkeypatch):
    """Small tables are divided too, and so are dots of short vectors."""
    monkeypatch.setattr(stages, "TABLE", 32)
    monkeypatch.setattr(emit_split, "SHORT_MATRICES", 512)
    return monkeypatch


@pytest.mark.long
@pytest.mark.parametrize("cell", [HeadsCell, LinesCell], ids=name)
@pytest.mark.parametrize("short", [5, 6])
def test_tables_are_divided_or_spread(cell, short, divided_tables):
    divided_tables.setattr(stages, "SHORT", short)
    divided_tables.setattr(module, "candidates", lambda *given, **options: units_of_a_program(4))
    compared(unfading.Recurrent(lambda size: cell(size, 36), 3), torch.randn(2, 5, 3), None)


@pytest.mark.parametrize(("short", "memory"), [(14, 36), (21, 100)])
@pytest.mark.long
def test_the_memory_of_an_nru_is_divided(short, memory, divided_tables):
    divided_tables.setattr(stages, "SHORT", short)
    layer = unfading.NRU(3, 35, memory_size=memory)
    kernel = triton_kernel(plan(layer.runners[0]).key)
    functions = SplitLoops(kernel.programs, kernel.names, Matrices.ON_CHIP).functions
    assert functions["train"].shape.exchanges == 5
    assert functions["back"].shape.exchanges == 4
    assert all(by_unit for f in functions.values() for _, _, by_unit in f.shape.matrices)
    compared(layer, torch.randn(2, 5, 3), None if memory == 36 else torch.tensor([1, 2, 2, 1, 2]))


def by_divided_loops(kernel, signature, numbers, setting):
    """The results of one model."""
    inputs, states, weights, *cotangents = ([x if x is None else x.unsqueeze(0) for x in group] for group in numbers)
    lengths = None if setting.lengths is None else torch.tensor([setting.lengths])
    arguments, options = (inputs, states, weights), LoopOptions(lengths, setting.reverse)
    with cooperative(kernel.split.launcher.module):
        in_evaluation, end, _ = kernel.forward(*arguments, options, keep=False)
        trajectory, final, saved = kernel.forward(*arguments, options, keep=True)
        wanted = [True] * sum(map(len, arguments))
        gradients = kernel.backward(cotangents, arguments, (trajectory, saved), options, wanted)
    outputs = [*trajectory, *final, *in_evaluation, *end]
    return named_results(*([x.squeeze(0) for x in group] for group in (outputs, chain(*gradients))), signature)


class SummedCell(PlainCell):
    """h' = tanh(U h + c) with the sum c of a table of h."""

    def step(self, inputs, state, weights):
        table = torch.tanh(state.h.reshape(-1, 12, 3))
        return State(torch.tanh(inputs.a + state.h @ weights.U.T + table.sum((1, 2)).unsqueeze(1)))


def test_a_stored_table_does_not_read_what_others_may_already_replace(divided_tables):
    divided_tables.setattr(stages, "SHORT", 8)
    divided_tables.setattr(stages, "TABLE", 16)
    layer = unfading.Recurrent(lambda size: SummedCell(size, 36), 3)
    program = triton_kernel(plan(layer.runners[0]).key).program
    (total,) = (value for value in program.values() if value.op is Op.SUM)
    (table,) = total.args
    storing = program._replace(stores=(*program.stores, Store(TensorKind.SAVED, 0, 0, table)))
    cut = stages.Stages(storing)
    assert cut.shared == {0: [total]}  # computed before the first exchange
    assert cut.of[table.id] == 1
    compared(layer, torch.randn(2, 5, 3), None)


@pytest.mark.long
def test_random_steps_have_the_results_and_gradients_of_autograd(monkeypatch):
    monkeypatch.setattr(stages, "SHORT", 2)
    monkeypatch.setattr(stages, "TABLE", 8)
    monkeypatch.setattr(module, "candidates", lambda *given, **options: units_of_a_program(4))
    divided = 0
    for number, step in enumerate(some(30, 12)):
        signature = step.signature(torch.float32)
        if max(signature.states) < 4:
            continue
        parts = {"x": signature.inputs, "h": signature.states, "W": signature.weights}
        names = TensorNames(*([f"{letter}{i}" for i in range(len(sizes))] for letter, sizes in parts.items()))
        kernel = module.TritonKernel(trace(step.function(), signature), names)
        setting = some_settings(signature, number)[1]
        numbers = some_numbers(signature, setting)
        exact = Numbers(*([x if x is None else x.double() for x in group] for group in numbers))
        want = by_autograd(step.function(), step.signature(torch.float64), exact, setting)
        errors = wrong(by_divided_loops(kernel, signature, numbers, setting), want, 2e-3)
        assert not errors, f"{errors}\n{setting}\n\n{step}"
        divided += 1
    assert divided > 15


def test_no_tensor_has_the_name_of_an_argument():
    assert all(OWN.fullmatch(own) for own in (*SplitFrame.arguments, *SplitFrame.constants))


def test_models_of_one_launch_are_the_models_alone():
    layers = [unfading.STAR(3, 35) for _ in range(2)]
    parameters, _ = stack_module_state(layers)
    x = torch.randn(2, 17, 3)

    def loss(parameters):
        return functional_call(layers[0], parameters, (x,))[0].square().sum()

    kernel = triton_kernel(plan(layers[0].runners[0]).key)
    with cooperative(kernel.split.launcher.module), unfading.use_backend("fused"):
        together = vmap(grad(loss))(parameters)
    for i, layer in enumerate(layers):
        with unfading.use_backend("reference"):
            alone = grad(loss)(dict(layer.named_parameters()))
        for key, value in alone.items():
            assert_close(together[key][i], value, rtol=1e-4, atol=1e-4)


def test_values_that_only_dots_read_are_exchanged_as_these_round_them(monkeypatch):
    layer, x = built(unfading.LSTMCell, 35, torch.float32), torch.randn(2, 5, 3)
    kernel = triton_kernel(plan(layer.runners[0]).key)
    dtypes = []
    launch = kernel.split.launcher.launch
    monkeypatch.setattr(
        kernel.split.launcher, "launch", lambda *given, **options: (dtypes.append(given[3][4].dtype), launch(*given, **options))
    )
    with cooperative(kernel.split.launcher.module), torch.autocast("cpu", torch.float16):
        rounded = everything(layer, x, None, "fused")
        monkeypatch.setattr(split_kernel, "HALVES", {})
        agree(rounded, everything(layer, x, None, "fused"), tolerance=0)
    assert dtypes == [torch.float16] * 2 + [torch.float32] * 2


def test_values_of_which_sums_are_taken_are_exchanged_in_float32():
    layer = unfading.Recurrent(lambda size: AttentiveCell(size, 35), 3)
    assert not any(function.for_dots for function in triton_kernel(plan(layer.runners[0]).key).split.functions.values())


def test_rows_that_do_not_fit_go_in_turns(monkeypatch):
    monkeypatch.setattr(module, "gpu", lambda device: Gpu(4, 1 << 20))
    compared(unfading.STAR(3, 35), torch.randn(2, 40, 3), torch.randint(1, 3, (40,)))


def test_programs_that_wait_in_vain_are_reported():
    layer = unfading.STAR(3, 35)
    kernel = triton_kernel(plan(layer.runners[0]).key)
    names = kernel.split.launcher.module.wait.fn.__globals__
    names["PATIENCE"], before, peek = 2, names["PATIENCE"], names["peek"]
    names["peek"] = lambda counter: triton.language.load(counter)
    try:
        with torch.no_grad(), unfading.use_backend("fused"):
            layer(torch.randn(2, 5, 3))  # the interpreter runs one program after the other: no barrier is met
            with pytest.raises(RuntimeError, match="waited for each other in vain"):
                layer(torch.randn(2, 5, 3))
    finally:
        names["PATIENCE"], names["peek"] = before, peek


@pytest.mark.parametrize("n", [16, 17, 96, 200, 256, 300, 520, 650, 1024, 1500])
def test_pieces_of_a_row_vector_need_little_padding(n):
    cut = pieces(n)
    assert [start for start, _ in cut] == [0, *(stop for _, stop in cut[:-1])]
    assert cut[-1][1] == n
    padded = sum(max(16, 1 << (stop - start - 1).bit_length()) for start, stop in cut)
    assert padded <= 4 / 3 * n + 16


LSTM = SplitShape(((256, 4, True),), 256, 1, 256)
WHOLE_LSTM = LoopShape("train", 256, 4 * 256 * 256, 4 * 256 * 256, 1, True, 13)


def test_units_are_divided_where_that_is_estimated_to_be_faster():
    def chosen(shape, split, B, gpu=H200, whole=True):
        every = candidates(shape, split, "tf32", (1, B), gpu, whole)
        return every[0].setting if every else None

    assert chosen(WHOLE_LSTM, LSTM, 128).units == 16
    assert chosen(WHOLE_LSTM, SplitShape(((256, 1, True),), 256, 1, 256), 128).units == 32
    assert chosen(WHOLE_LSTM, LSTM, 1000).rows > 16
    assert chosen(WHOLE_LSTM, LSTM._replace(longest=1), 128).units is None  # nothing is divided
    assert (
        chosen(LoopShape("train", 64, 64 * 64, 64 * 64, 1, True, 9), SplitShape(((64, 1, True),), 64, 1, 64), 128).units is None
    )
    assert chosen(WHOLE_LSTM, LSTM, 128, Gpu(8, 232448)).units in (None, 32)  # 16 programs do not run at the same time
    assert chosen(WHOLE_LSTM, LSTM, 128, Gpu(132, 20_000), whole=False) is None


def test_matrices_that_do_not_fit_on_chip_are_loaded_in_chunks():
    units, n = 1024, 4 * 1024 * 1024
    whole, split = LoopShape("train", units, n, n, 1, True, 13), SplitShape(((512, 4, True), (512, 4, True)), units, 1, units)
    few, many = (candidates(whole, split, "tf32", (1, B), H200, whole=False)[0].setting for B in (1, 128))
    assert (few.width, few.units) == (None, 8)  # 128 programs have room for 16 MB
    assert many.width == CHUNK
    assert many.rows * many.units == 1024  # all multiprocessors but four have a part of the 128 rows


def test_products_are_summed_where_rows_would_go_in_turns():
    units, n = 1024, 4 * 1024 * 1024
    whole = LoopShape("train", units, n, n, 1, True, 13)
    split = SplitShape(((512, 4, True), (512, 4, True)), units, 1, units, ((units, 4),))
    few, many = (candidates(whole, split, "tf32", (1, B), H200, whole=False)[0].setting for B in (16, 128))
    assert not few.summed
    assert many == LaunchSettings(128, 8, None, 0, 8, summed=True)
    assert split.parts(8, summed=True) == 128
    assert split._replace(longest=650).parts(8, summed=True) == 84  # 82 programs and two more in the last team of four
    assert not any(each.setting.summed for each in candidates(whole, split, "tf32x3", (1, 128), H200, whole=False))


@pytest.mark.parametrize(("length", "columns"), [(1024, 4), (1024, 2), (1024, 1), (4096, 1), (3072, 1), (650, 4), (35, 4)])
def test_teams_read_and_store_as_little_as_possible(length, columns):
    cost = {n: length / n + 2 * n * columns * SUMMED_UNITS for n in (2, 4, 8, 16)}
    assert cost[shares_of(length, columns)] == min(cost.values())


@pytest.mark.parametrize("size", [16, 48, 64, 176, 256])
def test_chunks_of_a_share_are_powers_of_two(size):
    cut = chunks(size)
    assert [entry for a, b in cut for entry in range(a, b)] == list(range(size))
    assert all((b - a).bit_count() == 1 and 16 <= b - a <= 64 for a, b in cut)


def test_a_single_unit_is_not_divided():
    layer = unfading.LSTM(3, 1)
    compared(layer, torch.randn(2, 5, 3), torch.tensor([1, 2, 2, 1, 2]))

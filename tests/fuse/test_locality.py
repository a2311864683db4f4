"""A projection is cut in time only where it is local: whatever cuts a sequence gives the result of the whole, or refuses."""

import inspect
import time

import pytest
import torch
from torch.testing import assert_close
from torch.utils import _pytree

import unfading
from tests.helpers import laws
from tests.helpers.variants import defaults_of, every_cell, few_iterations, hidden_size, name, sampled
from tests.user import along_time
from tests.user.along_time import ALONG_TIME, FORWARD_ONLY, LOCAL
from tests.user.quiet import QuietCell
from unfading import catalogue
from unfading.fuse import fused, locality
from unfading.fuse.c.kernel import Kernel
from unfading.fuse.contents import Contents
from unfading.fuse.locality import Locality

STEPS, I = 23, 3
CLOSE = {torch.float64: {"rtol": 1e-9, "atol": 1e-10}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}

along_time_cells = pytest.mark.parametrize("cell", ALONG_TIME, ids=name)
LENGTHS = torch.tensor([23, 9, 1, 14])
BOTH = {"bidirectional": True}
settings = pytest.mark.parametrize(
    ("form", "lengths", "backend"),
    [
        pytest.param({}, None, "auto", id="one-full-auto"),
        pytest.param(BOTH, LENGTHS, "reference", id="two-lengths-reference"),
        *(
            pytest.param(*setting, id=f"{i}", marks=pytest.mark.long)
            for i, setting in enumerate(
                [
                    ({}, LENGTHS, "auto"),
                    (BOTH, None, "auto"),
                    (BOTH, LENGTHS, "auto"),
                    ({}, None, "reference"),
                    ({}, LENGTHS, "reference"),
                    (BOTH, None, "reference"),
                ]
            )
        ),
    ],
)
VARIANTS = [*every_cell(), pytest.param(QuietCell, {}, id="Quiet")]
all_cells = pytest.mark.parametrize("cell", [*ALONG_TIME, *LOCAL], ids=name)


def layer_of(cell, **options):
    torch.manual_seed(0)
    dtype = torch.float32 if cell is along_time.SinglePrecision else torch.float64
    layer = unfading.Recurrent(cell, I, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in layer.parameters():  # what is zero at the start is not zero after training
            parameter.add_(0.1)
    return layer


def sequence(layer, T=STEPS, B=4):
    # Tokens take the first feature as 0 or 1.
    x = torch.randn(T, B, I, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[..., 0] = (x[..., 0] > 0).double()
    return x.to(next(layer.parameters()).dtype)


def everything(layer, x, **keywords):
    """Output, final state and all gradients, with the same random numbers at every call."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(3)
    output, state = layer(x, **keywords)
    (output.square().sum() + sum(part.sin().sum() for part in state)).backward()
    return [output, *state, x.grad, *(p.grad for p in layer.parameters())]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, **CLOSE[a.dtype])


def redraws(cell):
    """Whether each segment calls for random numbers, so that a seed gives others than for the whole sequence."""
    return cell in (along_time.Dropped, along_time.ConstantMask)


# -- every way of cutting -----------------------------------------------------------------------------------------------------


@settings
@all_cells
@pytest.mark.sample(18)
def test_checkpoints_change_nothing(cell, form, lengths, backend):
    layer = layer_of(cell, backend=backend, **form).train(not redraws(cell))
    x = sequence(layer)
    want = everything(layer, x, lengths=lengths, start=2)
    for every in (5, 23):
        layer.checkpoint_every = every
        same(everything(layer, x, lengths=lengths, start=2), want)


@pytest.mark.parametrize(
    ("form", "lengths"),
    [pytest.param({}, None, marks=pytest.mark.long), pytest.param(BOTH, None, marks=pytest.mark.long), (BOTH, LENGTHS)],
    ids=["one", "two", "two-lengths"],
)
@all_cells
@pytest.mark.sample(9)
def test_outputs_without_a_gradient_are_those_with_one(cell, form, lengths, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_BYTES", 1 << 10)
    layer = layer_of(cell, **form)
    x = sequence(layer)
    for training in (True, False):
        layer.train(training)
        with unfading.use_backend("reference"):
            torch.manual_seed(3)
            want = layer(x, lengths=lengths, start=2)
        with torch.no_grad():
            torch.manual_seed(3)
            got = layer(x, lengths=lengths, start=2)
        same(_pytree.tree_leaves(got), [leaf.detach() for leaf in _pytree.tree_leaves(want)])


@all_cells
@pytest.mark.sample(9)
def test_a_long_sequence_without_a_gradient(cell):
    if cell in (along_time.Table, along_time.Attention):
        return  # the one has 50 steps, the other grows with their square
    layer = layer_of(cell).float()
    x = sequence(layer, 1500, 32)
    with torch.no_grad():
        torch.manual_seed(3)
        got = layer(x)
        with unfading.use_backend("reference"):
            torch.manual_seed(3)
            want = layer(x)
    same(_pytree.tree_leaves(got), _pytree.tree_leaves(want))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@along_time_cells
@pytest.mark.sample(10)
def test_streams_and_truncation_refuse_what_they_cannot_cut(cell, backend):
    layer, T = layer_of(cell, backend=backend), 200
    line = inspect.getsourcelines(cell.project)[1]
    model = unfading.Model(torch.nn.Identity(), layer, unfading.EveryStep(along_time.H, 1).double())
    x = sequence(layer, T)
    calls = {
        "in a stream": lambda: layer.stream(4),
        "in chunks of 150 steps": lambda: unfading.truncated(layer, x, 150),
        "in chunks of 30 steps": lambda: model(x, truncate=30),
    }
    for how, call in calls.items():
        with pytest.raises(ValueError, match=f"{name(cell)} cannot run {how}: project is not local in time") as refused:
            call()
        assert f"along_time.py:{line}: def project(self, x, start=0):" in str(refused.value)
    assert len(list(unfading.truncated(layer, x, T))) == 1  # one chunk is the whole


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("cell", LOCAL, ids=name)
@pytest.mark.sample(8)
def test_streams_and_truncation_run_what_they_can_cut(cell, backend):
    layer = layer_of(cell, backend=backend)
    x = sequence(layer)
    if cell is along_time.Dropped:
        assert len(list(unfading.truncated(layer, x, 5))) == 5  # with noise for every step, in training
    if cell is along_time.ConstantMask:  # one draw in each run
        x = x[:1].repeat(STEPS, 1, 1)
        torch.manual_seed(3)
        stream = layer.stream(4)
        torch.manual_seed(3)
        want = layer(x)[0].detach()
        same([torch.stack([stream.push(row) for row in x])], [want])
        return
    layer.eval()
    want, _ = layer(x)
    chunks = list(unfading.truncated(layer, x, 5))
    same([torch.cat([chunk.output for chunk in chunks])], [want])
    stream = layer.stream(4)
    same([torch.stack([stream.push(row) for row in x])], [want.detach()])


def test_a_layer_with_statistics_runs_in_a_stream_in_evaluation():
    layer = layer_of(along_time.Statistics).eval()
    x = sequence(layer)
    stream = layer.stream(4)
    same([torch.stack([stream.push(row) for row in x])], [layer(x)[0].detach()])
    with pytest.raises(ValueError, match="not local"):
        layer.train().stream(4)


# -- what is shown, and at what cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cell", "options"), defaults_of(VARIANTS))
@pytest.mark.sample(12)
def test_every_cell_of_the_library_is_local(cell, options):
    built = cell(I, hidden_size(cell, options), **options)
    for reverse in (False, True):
        assert locality.locality(built, STEPS, reverse=reverse) == Locality(None)


@pytest.mark.parametrize("noise", [{"recurrent_dropout": 0.5}, {"zoneout": 0.3}], ids=str)
def test_the_noise_of_layers_is_local(noise):
    (cell,) = unfading.LSTM(I, 5, **noise).runners
    for reverse in (False, True):
        assert locality.locality(cell, STEPS, reverse=reverse) == Locality(None, random=True)


@all_cells
@pytest.mark.sample(7)
def test_what_is_shown_of_users_cells(cell):
    (runner,) = layer_of(cell).runners
    assert (locality.locality(runner, 200).refusal is None) == (cell in LOCAL)
    assert (locality.locality(runner, 200, reverse=True).refusal is None) == (cell in LOCAL and cell not in FORWARD_ONLY)


def test_a_projection_that_remembers_is_not_local():
    assert locality.locality(along_time.Memory(I), STEPS).refusal is not None


class StoredTable(along_time.Along):
    """Its first call decides: a table of the whole sequence, or of the first piece."""

    table = None

    def mixed(self, a, x, start):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.linspace(0.5, 1, 1 + len(x), dtype=a.dtype)
        return a * self.table[1]


class TwoSteps(along_time.Along):
    def mixed(self, a, x, start):
        return 2 * a if len(x) == 2 else a


class OddRows(along_time.Along):
    """Along time, with an odd number of rows alone."""

    def mixed(self, a, x, start):
        return a + (x.shape[1] % 2) * a.cumsum(0)


class ZeroTimes(along_time.Along):
    """NaN or infinity in one step reaches the others."""

    def mixed(self, a, x, start):
        return a + 0 * a.mean(0)


class Branch(along_time.Along):
    form = None

    def mixed(self, a, x, start):
        return 2 * a if type(self).form(start, len(x)) else a


# Conditions on the index of the first step of a piece, which the piece before it does not meet.
CONDITIONS = [
    lambda start, T: start == 5, lambda start, T: start in (17, 45), lambda start, T: start > 5000,
    lambda start, T: not 3 <= start <= 300, lambda start, T: start // 2000, lambda start, T: start - 41 == 0,
]  # fmt: skip


@pytest.mark.parametrize("form", CONDITIONS, ids=range(len(CONDITIONS)))
def test_a_branch_on_the_index_of_the_first_step_is_not_local(form):
    cell = type("Branched", (Branch,), {"form": staticmethod(form)})(I)
    assert locality.locality(cell, STEPS).refusal is not None


class GrowingTable(along_time.Along):
    """A condition on the index of the last step that changes nothing."""

    def __init__(self, input_size):
        super().__init__(input_size)
        self.table = torch.linspace(0, 1, 100, dtype=torch.float64)

    def mixed(self, a, x, start):
        if start + len(x) > len(self.table):
            raise IndexError(f"the table has {len(self.table)} rows")
        return a + self.table[start : start + len(x)].reshape(-1, 1, 1) * torch.arange(start, start + len(x)).reshape(-1, 1, 1)


def test_a_condition_on_the_index_of_the_last_step_may_be_local():
    assert locality.locality(GrowingTable(I), STEPS).refusal is None


@pytest.mark.parametrize("cell", [StoredTable, TwoSteps, OddRows, ZeroTimes], ids=name)
def test_what_depends_on_lengths_and_rows_is_not_local(cell):
    for steps in (2, 8, STEPS):
        assert locality.locality(cell(I), steps).refusal is not None


def test_a_longer_sequence_is_tested_anew():
    cell = along_time.LongReach(I)
    assert locality.locality(cell, 50).refusal is None
    assert locality.locality(cell, 100).refusal is not None


@all_cells
@pytest.mark.sample(7)
def test_a_test_leaves_the_cell_and_the_random_numbers_as_they_are(cell):
    (runner,) = layer_of(cell).runners
    before = {key: value.clone() for key, value in runner.state_dict().items()}
    attributes, numbers = dict(vars(runner)), torch.get_rng_state()
    locality.locality(runner, STEPS, reverse=True)
    assert all(torch.equal(value, before[key]) for key, value in runner.state_dict().items())
    assert vars(runner) == attributes
    assert torch.equal(torch.get_rng_state(), numbers)


def test_a_cell_is_tested_once(monkeypatch):
    layer = layer_of(QuietCellOfFive, bidirectional=True, checkpoint_every=5)
    x, tests = sequence(layer), []
    everything(layer, x)
    monkeypatch.setattr(locality, "_tested", lambda cell, *rest: (tests.append(cell) or Contents(cell), Locality(None)))
    everything(layer, x)
    assert tests == []
    everything(layer.eval(), x)
    assert len(tests) == 2


class QuietCellOfFive(QuietCell):
    def __init__(self, input_size):
        super().__init__(input_size, 5)


@pytest.mark.parametrize("cell", [*catalogue.cells(), QuietCell], ids=name)
@pytest.mark.sample(8)
def test_a_test_takes_little_time(cell):
    built = cell(I, hidden_size(cell))
    begin = time.thread_time()  # other processes take their share of the clock
    locality.locality(built, 256)
    assert time.thread_time() - begin < 1.0  # 3 ms, and 0.2 s for EquilibriumRNN, which solves an equation at every step


# -- what can be cut is cut ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", sampled([*catalogue.cells(), QuietCell]))
@pytest.mark.sample(3)
def test_projections_of_the_library_stay_in_pieces(cell, monkeypatch):
    """So that a long sequence needs no memory for the projection of all its steps."""
    monkeypatch.setattr(fused, "CHUNK_BYTES", 1 << 10)
    layer = unfading.layer(cell)(laws.I, hidden_size(cell), bidirectional=True, dtype=torch.float64, **few_iterations(cell))
    x, steps = torch.randn(80, 4, laws.I, dtype=torch.float64), []
    project, bind_inputs = cell.project, fused.bind_inputs

    def counted(self, x, start=0):
        if self in layer.cells:  # and not a copy that is tested
            steps.append(len(x))
        return project(self, x, start)

    def bound(cell_plan, cell, x, *rest):
        steps.append(len(x))
        return bind_inputs(cell_plan, cell, x, *rest)

    layer(x[:50])  # planned and tested
    layer.checkpoint_every = 7
    layer(x[:50])
    monkeypatch.setattr(cell, "project", counted)
    monkeypatch.setattr(fused, "bind_inputs", bound)
    with unfading.use_backend("reference"):
        layer(x[:50])  # tested again, since project is another one
        steps.clear()
        layer(x[:50])
    assert max(steps) == 7
    monkeypatch.setattr(cell, "project", project)
    with torch.no_grad():
        layer(x)
        steps.clear()
        layer(x)
    assert steps
    assert max(steps) < 80


def test_a_projection_along_time_runs_once_and_its_loop_in_pieces(monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_BYTES", 1 << 10)
    layer, steps = layer_of(along_time.CausalConvolution), []
    x, forward = sequence(layer), Kernel.forward

    def counted(self, inputs, *rest, **keywords):
        steps.append(len(inputs[0]))
        return forward(self, inputs, *rest, **keywords)

    with torch.no_grad():
        layer(x)
        monkeypatch.setattr(Kernel, "forward", counted)
        layer(x)
    assert sum(steps) == STEPS
    assert len(steps) > 1


def test_a_hook_on_a_module_of_project_is_not_called_by_the_test_and_hinders_no_stream():
    layer, calls = layer_of(along_time.Along), []
    layer.cells[0].W.register_forward_hook(lambda module, arguments, output: calls.append(output.shape[0]))
    x = torch.randn(6, 2, I, dtype=torch.float64)
    stream = layer.stream(2)
    assert not calls
    with torch.no_grad():
        whole = layer(x)[0]
        assert_close(torch.stack([stream.push(step) for step in x]), whole, **CLOSE[torch.float64])
    assert sum(calls) >= len(x)


class StartWhereLarge(along_time.Along):
    """Depends on the index of the first step only where the sigmoid is exactly 0."""

    def mixed(self, a, x, start):
        return (torch.sigmoid(a) + 0.5 * start > 0) * 1.0


def test_a_projection_that_depends_on_start_for_large_numbers_is_not_cut():
    assert locality.locality(StartWhereLarge(3), 20).refusal is not None


class SingleStartWhereLarge(along_time.SinglePrecision):
    def mixed(self, a, x, start):
        super().mixed(a, x, start)
        return StartWhereLarge.mixed(self, a, x, start)


def test_rounding_of_large_numbers_in_float32_is_no_dependence_on_other_steps():
    for seed in range(20):
        torch.manual_seed(seed)
        assert locality.locality(along_time.SinglePrecision(3), 20).refusal is None
        assert locality.locality(SingleStartWhereLarge(3), 20).refusal is not None

"""Threads divide the rows or the units of a loop. The results do not depend on the division, to the last bit."""

import multiprocessing

import pytest
import torch

import unfading
from tests.helpers.variants import name, sampled
from unfading import catalogue
from unfading.fuse.c import kernel, threads
from unfading.fuse.c.threads import Division, by_rows, team
from unfading.fuse.fused import refusal
from unfading.layers.factory import layer

T, B, I, H = 6, 7, 3, 20  # of none of them a multiple of a vector
LENGTHS = torch.tensor([1, 3, 6, 6, 2, 5, 4])
# Tile, threads, and how many run a tile together: rows, one team, two teams, a team and a thread that is left over.
DIVISIONS = (Division(2, 4, 1), Division(7, 4, 4), Division(4, 4, 2), Division(3, 5, 3))
POWERS_OF_TWO = {"EURNN": 8, "GORU": 8}  # hidden sizes of cells that take no other
FEW = ("LSTM", "FastRNN")  # the second has weights that are used entry by entry


@pytest.fixture
def divided(monkeypatch):
    """A function that runs with a division. Torch has as many threads in all of them: its own products depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(division.threads for division in DIVISIONS))

    def run(division, function):
        monkeypatch.setattr(kernel, "divide", lambda *_: division)
        monkeypatch.setattr(kernel, "threads_for", lambda *_: division.threads)
        monkeypatch.setattr("unfading.fuse.c.backward.threads_for", lambda *_: division.threads)
        return function()

    yield run
    torch.set_num_threads(before)


def built(cell):
    torch.manual_seed(0)
    module = layer(cell)(I, POWERS_OF_TWO.get(name(cell), H), backend="fused")
    if (reason := refusal(module.cells[0])) is not None:
        pytest.skip(reason)
    return module


def everything(module, lengths):
    """Outputs with and without a graph, final states and all gradients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, B, I, generator=generator, requires_grad=True)
    with torch.no_grad():
        results = [module(x, lengths=lengths)[0]]
    output, state = module(x, lengths=lengths)
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    cotangents = torch.randn(output.shape, generator=generator)
    results += [output, *state] if isinstance(state, tuple) else [output, state]
    return results + list(torch.autograd.grad(output, [x, *weights], cotangents, materialize_grads=True))


@pytest.mark.parametrize("cell", sampled(catalogue.cells(), FEW))
def test_results_do_not_depend_on_the_division(cell, divided):
    module = built(cell)
    for lengths in (None, LENGTHS):
        want = divided(by_rows(B, 1), lambda lengths=lengths: everything(module, lengths))
        for division in DIVISIONS:
            results = divided(division, lambda lengths=lengths: everything(module, lengths))
            for result, one in zip(results, want, strict=True):
                # Weights that a step uses entry by entry are summed tile by tile, in double.
                tolerance = 1e-6 if one.dim() < 2 else 0.0
                torch.testing.assert_close(result, one, rtol=tolerance, atol=tolerance)


def test_threads_of_our_own_do_the_same_where_there_is_no_openmp(divided):
    module = built(unfading.LSTMCell)
    want = divided(DIVISIONS[2], lambda: everything(module, None))
    team().use(None, None)
    try:
        assert all(map(torch.equal, divided(DIVISIONS[2], lambda: everything(module, None)), want))
    finally:
        team().use(*threads._openmp())


def _forked(module, queue):
    with torch.no_grad():
        queue.put(module(torch.ones(T, B, I))[0][-1, -1, -1].item())


def test_a_team_runs_in_a_forked_process(divided):
    module = built(unfading.LSTMCell)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def parent_and_child():
        with torch.no_grad():
            want = module(torch.ones(T, B, I))[0][-1, -1, -1].item()
        process = context.Process(target=_forked, args=(module, queue))
        process.start()
        assert queue.get(timeout=60) == want
        process.join()

    divided(Division(7, 2, 2), parent_and_child)


def test_few_rows_with_large_matrices_are_run_by_teams_and_small_work_by_one_thread(monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: 16)
    divide = threads.divide.__wrapped__  # without its cache
    gates = 4 * 512 * 512
    assert divide(200, 1, gates, 4 * gates, 16).together > 4
    assert divide(200, 32, gates, 4 * gates, 16).together > 1
    assert divide(200, 128, 64 * 64, 4 * 64 * 64, 16).together == 1
    assert divide(1, 1, 64 * 64, 4 * 64 * 64, 16) == Division(1)
    for rows in (1, 2, 31, 32, 100, 1000, 5000):
        for size in (64, 128, 256, 512, 1024):
            division = divide(200, rows, size * size, 4 * size * size, 16)
            assert 1 <= division.tile <= min(rows, max(threads.ROWS, threads.TEAM_ROWS))
            assert division.together <= division.threads
    monkeypatch.setattr(threads, "cores", lambda: 8)
    assert divide(200, 1, gates, 4 * gates, 16).together == 1


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_each_thread_has_as_many_tiles(count):
    for rows in (1, 7, 48, 49, 128, 1000):
        tile, number, together = by_rows(rows, count)
        tiles = -(-rows // tile)
        assert (number, together) == (count, 1)
        assert tile <= threads.ROWS
        assert tiles <= -(-rows // threads.ROWS) + count


def test_a_step_that_is_a_list_of_calls_is_not_compiled_for_teams(monkeypatch):
    module = built(unfading.ElmanCell)
    plan = unfading.fuse.fused.plan_or_raise(module.cells[0])
    own = kernel.compiled([unfading.fuse.operator.PROGRAMS[plan.key]], torch.float32)[0]
    monkeypatch.setattr(kernel, "divide", lambda *_: Division(2, 4, 4))
    assert own.division(T, B).together == 4
    assert isinstance(own.team_entries["infer_0"], int)
    own.loops = own.loops._replace(infer=own.infer._replace(long=True))
    del own.team_entries
    assert own.division(T, B) == by_rows(B, 4)

"""Recorded loops equal the reference loop, for every cell, with a replacement for CUDA graphs; and refusals on a CPU."""

import copy
import os
from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close

import unfading
from tests.helpers.compiled import built
from tests.helpers.graph_laws import *  # noqa: F403
from tests.helpers.graph_laws import REFUSED, OwnCell, State, same_as_the_reference
from tests.helpers.variants import every_cell, hidden_size, name
from tests.user.quiet import QuietCell
from unfading import catalogue
from unfading.backends.choose import choose
from unfading.backends.cuda_graph import capture
from unfading.backends.cuda_graph.backend import graph, graph_if_possible, unrecordable
from unfading.backends.cuda_graph.chunks import cut
from unfading.fuse.plan import interpreted
from unfading.fuse.triton.source import triton_missing
from unfading.reference import reference


class Called:
    """In place of a CUDA graph: the function itself. Its results are overwritten as soon as another one is replayed."""

    kind = "cpu"
    lent = ()

    def __init__(self, function, buffers, pool):
        self.function, self.buffers = function, buffers
        function(torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, buffers))

    def replay(self):
        for tensor in Called.lent:
            tensor.fill_(torch.nan)
        with capture.undisturbed("cpu"):  # a real graph does not depend on the caller's settings either
            results = [None if each is None else each.clone() for each in self.function(self.buffers)]
        Called.lent = [each for each in results if each is not None]
        return results

    @staticmethod
    def pool():
        return None

    @staticmethod
    def under_way():
        return False

    @staticmethod
    def turn(device):
        return nullcontext()


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(capture, "CapturedGraph", Called)
    # Else "auto" would run every cell fused.
    monkeypatch.setattr("unfading.fuse.fused.runnable", lambda cell, batch=1, **options: "the compiler is at rest")
    return "cpu"


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1" or triton_missing() is not None, reason="no interpreter of Triton")
@pytest.mark.parametrize("cell", catalogue.convolutional_cells(), ids=name)
@pytest.mark.sample(1)
def test_a_compiled_step_with_convolutions_is_recorded(cell, monkeypatch):
    """The kernels for a GPU in Triton's interpreter, in chunks of four steps, against the reference loop in float64."""
    monkeypatch.setattr(capture, "CapturedGraph", Called)
    monkeypatch.setattr("unfading.backends.cuda_graph.chunks.CHUNK", 4)
    torch.manual_seed(0)
    layer = unfading.layer(cell)(2, 5, bidirectional=True)
    exact = copy.deepcopy(layer).double()
    x, lengths = torch.randn(7, 3, 2, 4, 3), torch.tensor([7, 2, 5])
    results = []
    for module, frames, target in ((exact, x.double(), nullcontext), (layer, x, interpreted)):
        frames = frames.requires_grad_()
        with target(), unfading.use_backend("reference" if module is exact else "fused"):
            assert module is exact or choose(module.runners[0], "fused").keywords["plan"] is not None
            output, state = module(frames, lengths=lengths)
            (output.sin().sum() + sum(part.square().sum() for part in state)).backward()
        gradients = [frames.grad, *(parameter.grad for parameter in module.parameters())]
        results.append([part.detach().double() for part in (output, *state, *gradients)])
    for got, want in zip(*reversed(results), strict=True):
        assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("cell", [*catalogue.cells(), QuietCell], ids=name)
@pytest.mark.sample(12)
def test_every_cell_agrees_with_the_reference(cell, device):
    same_as_the_reference(built(cell, hidden_size(cell), bidirectional=True), device)


@pytest.mark.long
@pytest.mark.parametrize(("cell", "options"), every_cell())
def test_every_variant_agrees_with_the_reference(cell, options, device):
    same_as_the_reference(built(cell, hidden_size(cell, options), bidirectional=True, **options), device)


@pytest.mark.parametrize("T", [1, 2, 3, 31, 32, 33, 75, 1000])
def test_pieces_make_the_whole(T, monkeypatch):
    monkeypatch.setattr("unfading.backends.cuda_graph.chunks.CHUNK", 32)
    pieces = cut(T)
    assert [begin for begin, _ in pieces] == [sum(steps for _, steps in pieces[:p]) for p in range(len(pieces))]
    assert sum(steps for _, steps in pieces) == T
    assert {steps for _, steps in pieces} <= {32, 16, 8, 4, 2, 1}
    assert len(pieces) <= T // 32 + 5


def test_memory_that_was_not_written_is_not_read(device):
    torch.use_deterministic_algorithms(True)  # fills the memory of torch.empty with NaN
    try:
        for cell in (unfading.LSTMCell, unfading.IncrementalRNNCell, QuietCell):
            same_as_the_reference(built(cell, 5, bidirectional=True), device)
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto_takes_graphs_where_fused_refuses(device):
    cell = unfading.STARCell(3, 5)
    assert choose(cell, "auto") is graph_if_possible
    assert choose(cell, "graph") is graph
    assert choose(cell, "reference") is reference


def test_nothing_changes_on_a_cpu(monkeypatch):
    layer, x = unfading.STAR(3, 5, backend="graph"), torch.randn(4, 2, 3)
    with pytest.raises(
        RuntimeError, match="STARCell cannot run as CUDA graphs: a CUDA graph needs a GPU, and the cell is on cpu"
    ):
        layer(x)
    monkeypatch.setattr("unfading.fuse.fused.runnable", lambda cell, batch=1, **options: "the compiler is at rest")
    assert choose(layer.cells[0], "auto") is reference


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_recording_holds_is_known_without_one(reason):
    assert reason in unrecordable(OwnCell(REFUSED[reason]))
    assert unrecordable(OwnCell(lambda cell, a, s, U: State(a @ U, s.h))) is None


@pytest.mark.parametrize("cell", [*catalogue.cells(), QuietCell], ids=name)
def test_every_cell_can_be_recorded(cell):
    assert unrecordable(cell(3, hidden_size(cell))) is None

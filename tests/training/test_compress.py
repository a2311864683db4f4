"""Compression in training: exact shares of zeros, a support that moves and then stays, rounded matrices, honest records."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import unfading
from tests.helpers.trained import OWN, outcome, small, stopped_after, tensors, train_outcome, weights
from tests.helpers.variants import hidden_size, name
from unfading import Run, catalogue, train
from unfading.cells.sparse import stored_bytes
from unfading.export.int8 import int8_of
from unfading.training import weights as weight_files
from unfading.training.active_run import ActiveRun
from unfading.training.compress import Compression, CompressionStages, kept_entries, stages
from unfading.training.loop import train_together
from unfading.training.training_state import TrainingState

BOTH = {"sparsity": 0.6, "bits": 8}
CELLS = pytest.mark.parametrize("cell", catalogue.cells(), ids=name)
STEPS = 12  # three of each stage


class NothingRead(TorchDispatchMode):
    """Fails where the host reads an entry of a tensor, for which it would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))


def compressed(**fields):
    return small(**{"compress": BOTH, "steps": STEPS, "valid_every": 2, **fields})


def history(run, monkeypatch):
    """The record of a run, its compression, and after each step the weights of the models and those of the optimiser."""
    steps, compressions = [], []
    apply = Compression.apply

    def noted(self, step, movable):
        apply(self, step, movable)
        compressions[:] = [self]
        steps.append((self.fleet.w.clone(), self.w.clone()))

    with monkeypatch.context() as patch:
        patch.setattr(Compression, "apply", noted)
        record = train(run)
    return record, compressions[0], steps


@CELLS
@pytest.mark.sample(8)
def test_every_cell_goes_through_all_stages(cell, monkeypatch):
    run = compressed(cell=name(cell), hidden=hidden_size(cell))
    _, compression, steps = history(run, monkeypatch)
    view = compression.fleet.view
    assert len(steps) == STEPS
    assert compression.sparse
    assert any(name.startswith("head.") for name in compression.rounded)
    for matrix in compression.sparse:
        support = view(steps[6][1], matrix) != 0
        size = support.numel()
        for step, (models, exact) in enumerate(steps):
            entries, own = view(models, matrix), view(exact, matrix)
            if step < 3:
                assert torch.equal(entries, own)
            elif step < 9:
                assert (entries != 0).sum() == kept_entries(size, 0.6), (matrix, step)
                assert torch.equal(entries, own.where(entries != 0, 0.0))
                assert own.abs().where(entries == 0, 0.0).max() <= entries.abs().where(entries != 0, torch.inf).min()
            if step >= 6:
                assert torch.equal(own != 0, support), (matrix, step)
                assert not (entries != 0)[~support].any()
    for matrix in compression.rounded:
        models, exact = (view(part, matrix).double() for part in steps[-1])
        unit = exact.abs().max() / 127
        assert torch.allclose(models / unit, torch.round(exact / unit), atol=1e-4)
        assert (models - exact).abs().max() <= 0.501 * unit
        moved = view(steps[-1][1], matrix) - view(steps[-2][1], matrix)
        assert moved.any()  # the entries before rounding go on
    others = [each for each in compression.fleet.names if each not in compression.rounded]
    for other in others:
        assert torch.equal(view(steps[-1][0], other), view(steps[-1][1], other))


def test_the_support_changes_while_it_is_thresholded(monkeypatch):
    run = compressed(hidden=12, rate=0.05, steps=80, valid_every=40, compress={"sparsity": 0.5})
    _, compression, steps = history(run, monkeypatch)
    first, last = (compression.fleet.view(steps[i][0], compression.sparse[0]) != 0 for i in (27, 52))
    assert first.sum() == last.sum()
    assert not torch.equal(first, last)


def test_stages_divide_the_steps_evenly():
    never = stages({}, 12).threshold
    assert stages({"rank": 2}, 12) == CompressionStages(never, never, never)
    assert stages({"rank": 2}, 12).last == 0
    assert stages({"sparsity": 0.5}, 12) == CompressionStages(4, 8, never)
    assert stages({"bits": 8}, 12) == CompressionStages(never, never, 6)
    assert stages(BOTH, 12) == CompressionStages(3, 6, 9)
    assert stages(BOTH, 12).last == 9
    for total in range(4, 30):
        begin = (0, *stages(BOTH, total), total)
        assert min(b - a for a, b in pairwise(begin)) >= 1
    with pytest.raises(ValueError, match=r"^compress: the stages dense, threshold, fixed, rounded take .*; got 3 steps\.$"):
        stages(BOTH, 3)


@pytest.mark.parametrize("compress", [{"sparsity": 0.6}, {"bits": 8}, BOTH], ids=str)
@pytest.mark.sample(1)
def test_a_run_that_is_stopped_in_every_stage_resumes_bit_for_bit(compress, tmp_path, monkeypatch):
    run = compressed(compress=compress)
    expected = train_outcome(run, tmp_path / "whole")
    for _ in range(5):
        stopped_after(2, monkeypatch, lambda: train(run, tmp_path, resume=True))
    train(run, tmp_path, resume=True)
    assert outcome(tmp_path / run.key) == expected


def test_only_a_compressed_model_is_the_best(tmp_path):
    run = compressed(task=f"{OWN}:Worsens", task_options={})  # validation is best at the beginning
    record = train(run, tmp_path)
    assert record["best"]["step"] == 10  # the first evaluation of the last stage, which begins with step 9
    assert record["best"]["valid"] != next(row["valid"] for row in record["curve"] if "valid" in row)
    assert train(compressed(task=f"{OWN}:Worsens", task_options={}, compress={}))["best"]["step"] == 2
    early = compressed(stop_at=1e9)  # reached at every evaluation
    assert train(early)["steps"] == 10


def test_record_and_card_tell_the_size(tmp_path):
    run = compressed(cell="FastGRNN", hidden=16, compress={"rank": 4, **BOTH})
    record = train(run, tmp_path)
    path = weight_files.save(tmp_path / run.key, tmp_path / "w.safetensors")
    parts = {key.removeprefix("model."): part for key, part in weights(tmp_path / run.key, "best").items()}
    matrices = [part.numpy() for key, part in parts.items() if "factors" in key or key == "head.answer.weight"]
    others = [part for key, part in parts.items() if "factors" not in key and key != "head.answer.weight"]
    assert len(matrices) == 4
    size = record["compressed"]
    assert size["entries"] == sum(each.size for each in matrices)
    assert size["nonzeros"] == sum(int((each != 0).sum()) for each in matrices)
    assert size["bytes"] == sum(min(stored_bytes(each, 1)) for each in matrices) + 2 * sum(each.numel() for each in others)
    assert unfading.load(path).rnn.cells[0].U.factors[0].shape == (16, 4)
    assert weight_files._read(path)[1]["compressed"] == size
    assert "compressed" not in train(small())


def test_a_model_that_returns_to_earlier_weights_is_still_compressed(tmp_path):
    run = compressed(task=f"{OWN}:Breaks", task_options={"at": 8, "times": 3}, retries=5)
    record = train(run, tmp_path)
    assert record["returns"] == 3
    matrix = tensors(tmp_path / run.key)["model.rnn.cells.0.W_h"]
    assert 0 < (matrix != 0).sum() <= kept_entries(matrix.numel(), 0.6)


def test_rank_is_the_option_of_the_cell():
    by_compress, by_cell = (
        compressed(cell="FastGRNN", hidden=6, **fields)
        for fields in ({"compress": {"rank": 2}}, {"compress": {}, "cell_options": {"rank": 2}})
    )
    assert by_compress.key != by_cell.key
    assert train(by_compress)["test"] == train(by_cell)["test"]
    assert train(by_compress)["compressed"]["entries"] == 6 * 2 + 6 * 2 + 6 * 2 + 6 * 1


def test_a_step_that_a_gpu_counts_is_the_same_step():
    """On a GPU the number of the step is a tensor, and nothing may depend on reading it."""
    runs = [compressed(steps=steps, seed=steps) for steps in (8, 12)]
    for step in range(12):
        results = []
        for given in (step, torch.tensor(step)):
            state = TrainingState([ActiveRun(run, run.make_task()) for run in runs], together=False)
            compression = state.update.compression
            movable = compression.movable(given)
            with torch.no_grad():
                compression.w += 0.1 * torch.rand(compression.w.shape, generator=torch.Generator().manual_seed(step))
                compression.apply(given, movable)
            results.append((compression.w, compression.fleet.w))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with NothingRead():
        compression.apply(torch.tensor(3), compression.movable(torch.tensor(3)))


def test_a_fleet_of_different_lengths_has_stages_of_its_own(tmp_path):
    runs = [compressed(steps=steps, seed=1, dtype="float64") for steps in (12, 16)]
    together = train_together(runs)
    for run, record in zip(runs, together, strict=True):
        alone = train(run)
        assert record["test"] == pytest.approx(alone["test"], rel=1e-8)
        assert record["compressed"] == alone["compressed"]


def test_int8_keeps_a_rounded_matrix():
    generator = np.random.default_rng(0)
    for _ in range(50):
        entries = generator.integers(-127, 128, (5, 7))
        entries[0, 0] = 127
        unit = np.float32(generator.uniform(1e-4, 10))
        matrix = (entries.astype(np.float32) * unit).astype(np.float64)
        for block in (matrix, matrix[1:], matrix[:, 1:3]):
            integers, scale = int8_of(block)
            assert np.abs(integers).max() <= 127
            assert np.abs(integers * scale - block).max() <= 3e-5 * unit
    plain = generator.normal(size=(5, 7))
    assert int8_of(plain)[1] == np.abs(plain).max() / 127


BAD = [
    ({"sparsty": 0.5}, ValueError, r"^unknown option of compress 'sparsty'\. Did you mean 'sparsity'\?$"),
    (
        {"sparsity": 1.0},
        ValueError,
        r"^compress: sparsity is the share of zeros .* above 0 and below 1; got 1\.0\. Leave it out",
    ),
    ({"sparsity": 0}, ValueError, r"^compress: sparsity is the share of zeros .* got 0\."),
    ({"sparsity": "most"}, TypeError, r"^compress: sparsity must be a number; got 'most' \(str\)\.$"),
    ({"bits": 4}, ValueError, r"^compress: bits must be 8, the size of an entry of an exported matrix; got 4\. Write bits=8"),
    ({"bits": True}, ValueError, r"^compress: bits must be 8, .* got True\."),
    ({"rank": 0}, ValueError, r"^compress: rank must be at least 1; got 0\."),
    ({"rank": 2.0}, TypeError, r"^compress: rank must be an int of at least 1; got 2\.0 \(float\)\.$"),
    (
        {"rank": 2},
        ValueError,
        r"^compress: STAR has no low-rank form; got rank=2\. Leave rank out, or .*: FastGRNN, Incremental",
    ),
]


@pytest.mark.parametrize(("compress", "error", "sentence"), BAD, ids=[str(bad[0]) for bad in BAD])
def test_a_wrong_option_is_refused_in_one_sentence(compress, error, sentence):
    with pytest.raises(error, match=sentence):
        small(compress=compress)


def test_other_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"^the rank is given twice: 2 in compress and 3 in cell_options\. Leave one out\.$"):
        small(cell="FastGRNN", compress={"rank": 2}, cell_options={"rank": 3})
    with pytest.raises(ValueError, match=r"rank=9 for size 3"):
        train(small(cell="FastGRNN", compress={"rank": 9}), tmp_path)
    with pytest.raises(ValueError, match=r"got 3 steps"):
        train(small(compress=BOTH, steps=3), tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_compression_leaves_json_and_key_as_they_were():
    assert "compress" not in small().to_json()
    assert small(compress={}).key == small().key
    assert Run.from_json(compressed().to_json()) == compressed()


def test_a_fixed_support_stays_however_large_a_step_is():
    run = compressed()
    compression = TrainingState([ActiveRun(run, run.make_task())], together=False).update.compression
    compression.apply(6, compression.movable(6))
    before = compression.w != 0
    for step in range(7, STEPS):
        movable = compression.movable(step)
        compression.w += 100 * torch.rand(compression.w.shape, generator=torch.Generator().manual_seed(step))
        compression.apply(step, movable)
    for matrix in compression.sparse:
        view = compression.fleet.view
        assert torch.equal(view(compression.w, matrix) != 0, view(before, matrix))
        assert not view(compression.fleet.w, matrix)[~view(before, matrix)].any()


def test_gradients_of_fixed_zeros_do_not_count_for_clipping():
    run = compressed(compress={"sparsity": 0.6})
    state = TrainingState([ActiveRun(run, run.make_task())], together=False)
    update, compression = state.update, state.update.compression
    compression.apply(8, compression.movable(8))
    movable = compression.movable(9)
    compression.fleet.g.copy_(torch.where(movable, 0.0, 1e6))
    update.apply(torch.zeros(1), torch.ones(1, 1, dtype=torch.float64), 9, torch.ones(1, 1, dtype=torch.bool))
    assert not compression.fleet.g.any()

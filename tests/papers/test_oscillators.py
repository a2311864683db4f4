"""The rows of coRNN, UnICORNN and LEM: the authors' settings, their logs, and that they train."""

from dataclasses import replace

import pytest

from unfading import machine
from unfading.cli import reproduce_command as cli_reproduce
from unfading.papers import ledger
from unfading.papers.oscillators.logs import LOGS, log
from unfading.papers.oscillators.tables import cornn, first_epochs, lem, unicornn

ROWS = {row.name: row for row in (*cornn(), *unicornn(), *lem())}
PUBLISHED = {
    "permuted MNIST CoRNN": 97.34, "pixel MNIST CoRNN": 99.4, "noisy CIFAR CoRNN": 59.0, "HAR-2 CoRNN": 97.2,
    "permuted MNIST UnICORNN": 98.4, "noisy CIFAR UnICORNN": 62.4, "permuted MNIST LEM": 96.6, "pixel MNIST LEM": 99.5,
    "noisy CIFAR LEM": 60.5, "adding 10,000 LEM": 0.0,
}  # fmt: skip


def test_every_published_result_is_a_row():
    assert {name: row.published for name, row in ROWS.items()} == PUBLISHED
    assert all(row.run.optimiser == "adam" and not row.retrain and not row.rates for row in ROWS.values())
    assert {name for name, row in ROWS.items() if row.run.clip_norm is not None} == {"permuted MNIST LEM", "pixel MNIST LEM"}


@pytest.mark.parametrize(("name", "rows"), [("MNIST", 57_000), ("CIFAR CoRNN", 47_000), ("CIFAR LEM", 48_000)])
def test_the_rate_falls_once_to_a_tenth_after_the_authors_epoch(name, rows):
    after = {"permuted MNIST UnICORNN": 650, "noisy CIFAR UnICORNN": 250}
    for row in (row for each, row in ROWS.items() if name in each):
        steps, schedule = rows // row.run.batch, row.run.make_schedule()
        epochs = after.get(row.name, 100)
        factors = {epoch: schedule.factor(epoch * steps, row.run.epochs * steps) for epoch in (0, epochs - 1, epochs)}
        assert factors == pytest.approx({0: 1.0, epochs - 1: 1.0, epochs: 0.1})
        assert schedule.factor(row.run.epochs * steps - 1, row.run.epochs * steps) == pytest.approx(0.1)


def test_the_first_epochs_are_those_of_the_full_run():
    """All else is equal, so that they can be compared with the authors' log; they claim no published number."""
    rows = first_epochs()
    assert len(rows) == len(LOGS)
    for row in rows:
        full = ROWS[row.name.partition(",")[0]].run
        assert row.run == replace(full, epochs=row.run.epochs)
        assert row.run.epochs in log(row.run.task, row.run.cell)
        assert row.published is None


def test_a_log_ends_within_the_epochs_of_its_run():
    for (task, cell), scores in LOGS.items():
        (run,) = (row.run for row in ROWS.values() if (row.run.task, row.run.cell) == (task, cell))
        assert list(scores) == sorted(scores)
        assert max(scores) <= run.epochs
        assert all(0 < score < 100 for score in scores.values())
    assert log("har2", "CoRNN") == {}


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(("item", "rows"), [("cornn", "HAR-2"), pytest.param("lem", "adding", marks=pytest.mark.long)])
def test_a_row_trains_and_is_recorded(item, rows, tmp_path, capsys):
    name = f"oscillators/{item}"
    cli_reproduce.run_items((name,), output=tmp_path, budget="smoke", rows=(rows,), runs=tmp_path / "runs")
    assert ": ran" in capsys.readouterr().out
    (line,) = ledger.read(tmp_path / f"papers-{machine.slug()}.jsonl")
    assert (line["item"], line["steps"], line["test"] is not None) == (name, 2, True)

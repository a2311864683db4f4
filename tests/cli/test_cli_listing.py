"""`unfading cells list`, `tasks` and `data`: tables, JSON, and what is refused."""

import json

import pytest

from tests.helpers.command import run, run_apart
from tests.helpers.paths import ROOT
from unfading import catalogue
from unfading.cli import listing
from unfading.data import store
from unfading.data.datasets import DATASETS
from unfading.training import names


def test_cells_as_a_table_and_as_json():
    sizes = ("--hidden-size", "16", "--input-size", "3", "--length", "100")
    table = run("cells", *sizes)
    assert table.returncode == 0
    assert "…" not in table.stdout  # nothing is cut
    assert max(len(line) for line in table.stdout.splitlines()) <= 80
    answer = run("cells", "--json", *sizes)
    entries = {entry["name"]: entry for entry in json.loads(answer.stdout)}
    cells = [*catalogue.cells(), *catalogue.convolutional_cells()]
    assert set(entries) == {cell.__name__.removesuffix("Cell") for cell in cells}
    assert entries["ConvSTAR"]["multiply_adds_per_step"] == 32 * 32 * 9 * (2 * 3 * 16 + 16 * 16)
    for name in entries:
        assert name in table.stdout
    lstm = entries["LSTM"]
    assert lstm["state"] == {"h": 16, "c": 16}
    assert lstm["recurrent_matrices"] == 4
    assert lstm["parameters"] == 4 * 16 * (16 + 3 + 1)
    assert lstm["multiply_adds_per_step"] == 4 * 16 * (16 + 3)
    assert lstm["multiply_adds_per_sequence"] == 100 * 4 * 16 * (16 + 3)
    # K = 5 inner steps of two thin dots at rank 2, and P (W x + b).
    assert entries["IncrementalRNN"]["multiply_adds_per_step"] == 5 * 2 * 16 * 2 + 16 * 3 + 2 * 16 * 2
    # Five scales of 64 statistics: r, phi, and the output, which is no part of the recurrence.
    assert entries["StatisticalRNN"]["multiply_adds_per_step"] == 320 * 16 + 64 * (16 + 3) + 320 * 16


def test_tasks_as_a_table_and_as_json(made):
    table = run("tasks")
    assert table.returncode == 0
    assert max(len(line) for line in table.stdout.splitlines()) <= 80
    entries = {entry["name"]: entry for entry in json.loads(run("tasks", "--json").stdout)}
    assert set(entries) == set(catalogue.tasks())
    for name in entries:
        assert name in table.stdout
    assert entries["adding"]["options"] == {"T": 200}
    assert entries["adding"]["guess"] == pytest.approx(1 / 6)
    assert entries["adding"]["found"] is None
    assert entries["pixel_mnist"]["dataset"] == "mnist"
    assert entries["pixel_mnist"]["found"] is True


@pytest.mark.parametrize("name", ["adding", "har2", "ptb_words", "noisy_cifar", "digits"])
def test_a_task_is_described_with_its_options_and_an_example(made, capsys, name):
    listing.tasks(name)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for option, default in catalogue.task_entry(name, catalogue.tasks()[name]).options.items():
        assert f"{option}={default!r}" in text
    example = next(line.split()[1:] for line in text.splitlines() if line.startswith("example"))
    task, options = names.parse(example[example.index("--task") + 1])
    names.build("task", task, catalogue.tasks()[task], options)
    listing.tasks(name, json=True)
    described = json.loads(capsys.readouterr().out)
    assert all(option["help"] for option in described["options"].values())


def test_an_unknown_task_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"unknown task 'addin'\. Did you mean 'adding'"):
        listing.tasks("addin")


def test_the_prose_about_a_cell_fits_80_columns(capsys):
    listing.show_cell("STAR")
    lines = capsys.readouterr().out.splitlines()
    assert "    h_t = tanh((1 - k_t) * h_{t-1} + k_t * z_t)" in lines
    assert max(len(line) for line in lines if not line.startswith("    ")) <= 80


def test_every_cell_has_a_page_that_describes_it():
    index = (ROOT / "docs" / "cells" / "index.md").read_text()
    for cell in (*catalogue.cells(), *catalogue.convolutional_cells()):
        page = listing._page_of(cell).rpartition("/")[2]
        row = next(line for line in index.splitlines() if line.startswith(f"| `{cell.__name__.removesuffix('Cell')}` |"))
        assert f"]({page})" in row


def test_every_task_has_a_page_that_describes_it():
    for name, task in catalogue.tasks().items():
        assert f"`{name}`" in (ROOT / listing._page_of_task(task)).read_text(), name


def test_a_cell_is_shown_with_an_example_and_its_page(capsys):
    listing.show_cell("STAR")
    text = capsys.readouterr().out
    assert "unfading train --task adding,T=200 --cell STAR\n" in text
    assert "Its page is docs/cells/star.md." in text


def test_datasets_are_listed_and_verified(made, tmp_path):
    table = run("data", "list")
    assert table.returncode == 0
    assert max(len(line) for line in table.stdout.splitlines()) <= 80
    entries = {entry["name"]: entry for entry in json.loads(run("data", "list", "--json").stdout)}
    assert set(entries) == set(DATASETS)
    for name, dataset in DATASETS.items():
        assert name in table.stdout
        assert entries[name]["home"] == dataset.home
        assert entries[name]["licence"] == dataset.licence
        assert entries[name]["found"] is store.present(name)
    elsewhere = json.loads(run("data", "list", "--json", "--data", str(tmp_path)).stdout)
    assert not any(entry["found"] for entry in elsewhere if entry["name"] != "digits")
    # The generated files differ from the published ones. Checksums are disabled in this process, but not in another one.
    verified, empty, refused = run_apart(
        ["data", "verify"], ["data", "verify", "--data", str(tmp_path)], ["data", "fetch", "mnist", "--quiet"]
    )
    assert verified.returncode == 2
    assert "mnist: 4 altered" in verified.stdout
    assert "not as published: mnist: train-images-idx3-ubyte.gz (altered)" in verified.stderr
    assert empty.returncode == 0
    assert refused.returncode == 2
    assert "train-images-idx3-ubyte.gz is altered or cut short" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["data", "fetch", "nmist"], "unknown dataset 'nmist'. Did you mean 'mnist'?"),
        (["data", "fetch", "yelp"], "dataset 'yelp' has to be got by hand"),
        (["data", "verify", "yelp"], "dataset 'yelp' is not in"),
        (["data", "fech"], "fetch"),
        (["cells", "--hidden-size", "0"], "--hidden-size must be at least 1; got 0"),
        (["cells", "--hiden-size", "3"], "--hidden-size"),
        (["cels"], "cells"),
        (["report"], "a report needs at least one folder of runs"),
        (["report", "nowhere"], "no such file or folder: nowhere"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments, sentence):
    answer = run(*arguments)
    assert answer.returncode == 2
    assert sentence in answer.stderr
    assert "Traceback" not in answer.stderr
    assert "tyro" not in answer.stderr

"""The command line as a whole: help, commands with verbs, and the old forms of commands."""

import inspect
import json
import re
import resource
import subprocess
import sys
from contextlib import suppress
from platform import python_version

import pytest
import torch

import unfading
from tests.helpers.command import run
from unfading import catalogue
from unfading.cli import main
from unfading.cli.main import CommandGroup, commands
from unfading.cli.old_forms import current_form
from unfading.training import freed_memory

# Parameters that are structures, which describe their own flags.
STRUCTURES = {(command, part) for command in ("train", "compare") for part in ("training", "output")}
STRUCTURES |= {("train", "own_data"), ("sweep", "training"), ("sweep", "own_data")}


def all_commands():
    for name, command in commands().items():
        if isinstance(command, CommandGroup):
            yield from ((f"{name} {verb}", each) for verb, each in command.commands.items())
        else:
            yield name, command


@pytest.mark.parametrize(("name", "command"), list(all_commands()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_and_every_flag_is_described(name, command):
    own = inspect.getdoc(command)
    assert own, name
    for flag in inspect.signature(command).parameters:
        if (name.split()[0], flag) not in STRUCTURES:
            text = re.search(rf"^    {flag}: (.+)$", own, re.MULTILINE)
            assert text, f"{name}: {flag}"
            assert text[1][0].isupper() or text[1].split()[0] == "A", f"{name}: {flag}"


def test_the_package_is_the_command():
    result = subprocess.run([sys.executable, "-m", "unfading", "--help"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("usage: unfading")


def test_help_imports_neither_torch_nor_what_draws():
    code = """if True:
        import sys
        from unfading.cli.main import main
        heavy = ("torch", "numpy", "pydantic", "rich", "pooch", "sklearn", "altair", "vl_convert")
        for words in {forms}:
            sys.argv = ["unfading", *words]
            try:
                main()
            except SystemExit as ended:
                assert ended.code == 0
            assert not [m for m in heavy if m in sys.modules], words"""
    forms = [["--help"], ["--version"], ["cells", "--help"], *([*name.split(), "--help"] for name, _ in all_commands())]
    answer = subprocess.run([sys.executable, "-c", code.format(forms=forms)], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_help_takes_less_than_half_a_second_of_cpu_time():
    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "unfading", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5  # a busy machine takes longer now and then


def test_help_fits_80_columns():
    for words in ("", "cells", "data", "reproduce"):
        assert max(map(len, run(*words.split(), "--help").stdout.splitlines())) <= 80


def test_the_command_line_imports_nothing_heavy_before_it_runs():
    code = """if True:
        import sys, unfading.cli.main
        print([m for m in ("torch", "numpy", "tyro", "pydantic", "rich") if m in sys.modules])"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_help_ends_quietly_where_its_reader_has_gone():
    command = f"{sys.executable} -c 'from unfading.cli.main import main; main()' --help | head -1"
    answer = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert answer.stdout.startswith("usage: unfading")
    assert answer.stderr == ""


OLD_FORMS = {
    "cells": "cells list",
    "cells --json --hidden-size 8": "cells list --json --hidden-size 8",
    "cells --explain": "cells explain",
    "cells --explain --json --length 9": "cells explain --json",
    "cells --program STAR --hidden-size 8": "cells program STAR --hidden-size 8",
    "cells --hidden-size 8 --program=STAR --length 3 --json": "cells program STAR --hidden-size 8",
    "reproduce --list": "reproduce list",
    "reproduce --list --json": "reproduce list --json",
    "reproduce --page": "reproduce page",
    "reproduce incremental/fig4 --draw -o results": "reproduce draw incremental/fig4 -o results",
    "reproduce --draw incremental/fig4 --runs=a --processes 2": "reproduce draw incremental/fig4",
    "reproduce incremental/table1 star/fig2 --rows K=1": "reproduce run incremental/table1 star/fig2 --rows K=1",
    "reproduce --budget smoke incremental/fig5": "reproduce run --budget smoke incremental/fig5",
}


@pytest.mark.parametrize(("old", "new"), OLD_FORMS.items())
def test_an_old_form_names_the_current_one(old, new, capsys):
    assert current_form(old.split()) == new.split()
    assert capsys.readouterr().err == f"unfading: `unfading {old}` is an old form; the current one is `unfading {new}`.\n"


@pytest.mark.parametrize(
    "form",
    [*OLD_FORMS.values(), "", "--help", "cells --help", "cells show STAR", "cells lst", "reproduce", "reproduce -h",
     "reproduce lst", "train --task adding --cell STAR", "data list"],
)  # fmt: skip
def test_a_current_form_stays_as_it_is(form, capsys):
    assert current_form(form.split()) == form.split()
    assert capsys.readouterr().err == ""


def test_old_forms_give_what_the_current_ones_give():
    for old, new in {
        "cells --program STAR --hidden-size 8": "cells program STAR --hidden-size 8",
        "reproduce --list": "reproduce list",
    }.items():
        before, now = run(*old.split()), run(*new.split())
        assert (before.returncode, now.returncode) == (0, 0)
        assert before.stdout == now.stdout != ""
        assert before.stderr == f"unfading: `unfading {old}` is an old form; the current one is `unfading {new}`.\n"
        assert now.stderr == ""


def test_a_cell_is_shown_with_equation_options_and_sizes(capsys):
    from unfading.cli.listing import show_cell

    show_cell("STAR", hidden_size=8, input_size=3)
    text = capsys.readouterr().out
    assert text.startswith("STAR: Stackable recurrent cell. Turkoglu 2019.")
    assert "h_t = tanh((1 - k_t) * h_{t-1} + k_t * z_t)" in text
    assert "max_lag=None\n      longest dependency expected" in text
    assert "h:8" in text
    assert f"parameters           {2 * 8 * (3 + 1) + 8 * 8}" in text
    show_cell("NRU", json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["options"]["heads"]["default"] == inspect.signature(catalogue_cell("NRU")).parameters["heads"].default
    assert shown["paper"] == "Chandar 2019"
    with pytest.raises(ValueError, match=r"unknown cell 'STRA'\. Did you mean 'STAR'\?"):
        show_cell("STRA")


def catalogue_cell(name):
    return next(cell for cell in catalogue.cells() if cell.__name__ == f"{name}Cell")


@pytest.mark.parametrize("cell", catalogue.cells(), ids=lambda cell: cell.__name__)
def test_every_cell_can_be_shown_and_its_options_are_described(cell, capsys):
    from unfading.cli.listing import show_cell

    show_cell(cell.__name__.removesuffix("Cell"), hidden_size=16, json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["summary"]
    assert shown["equation"]
    assert [option for option, each in shown["options"].items() if not each["help"] and option != "bias"] == []


def test_a_group_without_a_verb_names_its_verbs():
    answer = run("reproduce")
    assert answer.returncode == 2
    assert "unfading reproduce needs a command: list, run, draw, page." in answer.stderr
    assert run("reproduce", "lst").stderr.startswith(
        "unfading: unknown command of unfading reproduce 'lst'. Did you mean 'list'?"
    )
    assert run().returncode == 2


def test_a_name_after_cells_shows_that_cell():
    shown = run("cells", "STAR", "--hidden-size", "8")
    assert shown.returncode == 0
    assert shown.stdout == run("cells", "show", "STAR", "--hidden-size", "8").stdout != ""
    assert shown.stderr == ""
    assert "unknown cell 'lstm'. Did you mean 'LSTM'?" in run("cells", "lstm").stderr


def test_the_version_names_the_packages_that_matter():
    assert run("--version").stdout == f"unfading {unfading.__version__}, torch {torch.__version__}, Python {python_version()}\n"


@pytest.mark.parametrize(
    ("terminal", "arguments", "announced"),
    [(True, ["train", "--task", "adding"], True), (True, ["train", "--quiet"], False), (True, ["cells"], False),
     (False, ["train"], False)],
)  # fmt: skip
def test_a_slow_command_says_on_a_terminal_what_it_does_first(monkeypatch, capsys, terminal, arguments, announced):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    main._announce(arguments)
    assert capsys.readouterr().err.startswith("unfading: loading torch") == announced


def test_every_slow_command_exists():
    assert set(main.SLOW_STARTS) <= set(main.commands())


def test_commands_that_train_keep_freed_memory(monkeypatch, tmp_path, capsys):
    kept = []
    monkeypatch.setattr(freed_memory, "keep_freed_memory", lambda: kept.append(sys.argv[1]))
    monkeypatch.chdir(tmp_path)
    train = ["--task", "adding,T=3", "--cell", "Elman", "--hidden", "2", "--batch", "2", "--steps", "1", "--quiet"]
    smoke = ["incremental/fig2", "--budget", "smoke"]
    for arguments in (
        ["cells", "list"],
        ["train", *train],
        ["reproduce", "list"],
        ["reproduce", "run", *smoke],
        ["train", "-h"],
    ):
        monkeypatch.setattr(sys, "argv", ["unfading", *arguments])
        with suppress(SystemExit):
            main.main()
    assert kept == ["train", "reproduce"]
    every = main.commands()
    for words in map(str.split, main.TRAINING):
        assert len(words) == 1 or words[1] in every[words[0]].commands

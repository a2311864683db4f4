"""Commands that describe the library and the machine: `unfading cells`, `unfading tasks`, `unfading doctor`."""

import re
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from unfading.cli.tables import plain_table, print_table
from unfading.errors import check_count

if TYPE_CHECKING:
    from unfading import doctor as diagnosis
    from unfading.catalogue import Entry
    from unfading.cells.base import Cell

Name = Annotated[str, arg(metavar="NAME")]
WIDTH = 80
ARGUMENTS = "Args:\n"
RECURRENCES = {
    "dense": "dense, every unit may read every other",
    "block": "block, units of a group read each other",
    "diagonal": "diagonal, no unit reads another",
    "linear": "linear, no unit reads another; runs as a scan on a GPU",
}
# Modules of tasks that docs/tasks/index.md describes.
FIRST_TASKS = ("synthetic", "images", "moving_digits")
# Pages of docs/cells that are not named like the module of the cell.
PAGES = {
    "antisymmetric": "continuous",
    "bistable": "memories",
    "deep": "incremental",
    "equilibrium": "incremental",
    "stable": "incremental",
    "elman": "plain",
    "rotation": "unitary",
    "janet": "forget-gate",
    "ugrnn": "forget-gate",
    "conv_gru": "conv",
    "conv_lstm": "conv",
    "conv_star": "conv",
    "exponential": "unitary",
    "independent": "diagonal",
    "input_candidate": "light",
    "legendre": "memories",
    "lem": "oscillators",
    "light_gru": "light",
    "linear_unit": "linear",
    "lipschitz": "oscillators",
    "minimal": "diagonal",
    "multiplicative": "lstm",
    "nas": "lstm",
    "oscillator": "oscillators",
    "slow_context": "light",
    "twin_gate": "light",
    "slstm": "memories",
}


def list_cells(
    input_size: int = 1, hidden_size: int = 128, length: int = 784, frame_size: int = 32, json: bool = False
) -> None:
    """List every cell: state sizes, recurrent matrices per step, parameters, multiply-adds, paper.

    Args:
        input_size: Number of input features, or channels of convolutional cells.
        hidden_size: Hidden size, or channels, at which the cells are measured.
        length: Sequence length, in time steps.
        frame_size: Height and width of the frames of convolutional cells.
        json: Print JSON instead of a table.
    """
    from unfading import catalogue

    _check_sizes(input_size, hidden_size, length)
    check_count("--frame-size", frame_size)
    frame = (frame_size, frame_size)
    measured = [(cell, ()) for cell in catalogue.cells()] + [(cell, frame) for cell in catalogue.convolutional_cells()]
    entries = [
        catalogue.entry(cell, input_size=input_size, hidden_size=hidden_size, length=length, frame=of_cell)
        for cell, of_cell in measured
    ]
    if json:
        print(dumps([entry._asdict() for entry in entries], indent=2))
        return
    table = plain_table(
        f"{len(entries)} cells at input size {input_size}, hidden size {hidden_size}, {length} steps, default options",
        "units: those that a step mixes, all (dense), those of a group (block) or none (diagonal; linear where the step is "
        "linear in its state), and its matrix products, in units of one hidden x hidden matrix. MAC: multiply-adds of all "
        "matrix products, including the input projection. `unfading cells NAME` has those of a sequence, and the bytes that a "
        "step saves for the backward pass. Convolutional cells: channels for features, "
        f"frames of {frame_size} x {frame_size}, and convolutions for matrices.",
    )
    table.add_column("cell", style="bold", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("units", no_wrap=True)
    for heading in ("params", "MAC/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("paper", min_width=12, overflow="fold")
    for entry in entries:
        table.add_row(
            entry.name,
            _state(entry),
            _units(entry),
            f"{entry.parameters:,}",
            f"{entry.multiply_adds_per_step:,}"
            if entry.multiply_adds_per_step < 1e8
            else _millions(entry.multiply_adds_per_step),
            entry.paper,
        )
    print_table(table)


def show_cell(
    name: Name,
    /,
    input_size: int = 1,
    hidden_size: int = 128,
    length: int = 784,
    frame_size: int = 32,
    json: bool = False,
) -> None:
    """Show one cell: its equation, its options with their defaults, its recipe of training settings, and its sizes.

    Args:
        name: Name of a cell, as printed by `unfading cells list`, or a class of your own: my.py:MyCell.
        input_size: Number of input features, or channels of a convolutional cell.
        hidden_size: Hidden size, or channels, at which the cell is measured.
        length: Sequence length, in time steps.
        frame_size: Height and width of the frames of a convolutional cell.
        json: Print JSON instead of text.
    """
    import sys
    from inspect import cleandoc, getdoc
    from textwrap import fill

    from unfading import catalogue
    from unfading.cells.convolution import ConvolutionalCell
    from unfading.training.names import layer_class

    _check_sizes(input_size, hidden_size, length)
    check_count("--frame-size", frame_size)
    cell = layer_class(name).cell
    frame = (frame_size, frame_size) if issubclass(cell, ConvolutionalCell) else ()
    entry = catalogue.entry(cell, input_size=input_size, hidden_size=hidden_size, length=length, frame=frame)
    summary = (getdoc(cell) or "").partition("\n")[0]
    equation = cleandoc(sys.modules[cell.__module__].__doc__ or "")
    options = _options(cell)
    if json:
        values = {option: {"default": default, "help": text} for option, (default, text) in options.items()}
        print(
            dumps(
                {
                    "summary": summary,
                    "equation": equation,
                    "options": values,
                    "recipe": cell.recipe._asdict(),
                    **entry._asdict(),
                },
                indent=2,
                default=str,
            )
        )
        return
    saved = entry.bytes_kept_per_step
    sizes = {
        "state": _state(entry),
        "parameters": f"{entry.parameters:,}",
        "recurrence": RECURRENCES[entry.recurrence] if entry.recurrence else "not compiled",
        "recurrent matrices": f"{entry.recurrent_matrices:.3g}, in units of hidden x hidden{' convolutions' if frame else ''}",
        "multiply-adds": f"{entry.multiply_adds_per_step:,} per step, {entry.multiply_adds_per_sequence:,} per sequence",
        "saved for backward": "-" if saved is None else f"{saved:,} bytes per step and batch row",
    }
    print(f"{fill(f'{entry.name}: {summary} {entry.paper}.', WIDTH)}\n\n{_wrapped(equation)}\n\nOptions")
    for option, (default, text) in options.items():
        print(f"  {option}={default!r}")
        if text:
            print(fill(text, WIDTH, initial_indent="      ", subsequent_indent="      "))
    print(f"\nRecipe (`unfading train` and `compare` use it where you give no other setting)\n{_recipe(cell)}")
    frames = f", frames of {frame_size} x {frame_size}" if frame else ""
    print(f"\nSizes at input size {input_size}, hidden size {hidden_size}, {length} steps{frames}, default options")
    print("\n".join(f"  {label:20} {value}" for label, value in sizes.items()))
    task = "moving_mnist" if frame else "adding,T=200"
    print(f"\nExample\n  unfading train --task {task} --cell {name}")
    if (page := _page_of(cell)) is not None:
        print(f"  layer = unfading.{entry.name}({input_size}, {hidden_size})\n\nIts page is {page}.")


def _wrapped(text: str) -> str:
    """The text with its paragraphs wrapped. Equations, which are indented, and lists stay as they are."""
    from textwrap import fill

    return "\n\n".join(
        each if any(line.startswith((" ", "- ")) for line in each.splitlines()) else fill(each, WIDTH)
        for each in text.split("\n\n")
    )


def _units(entry: "Entry") -> str:
    """Which units a step mixes, and by how many matrices."""
    products = f"{entry.recurrent_matrices:.3g}" if entry.recurrent_matrices else ""
    return f"{entry.recurrence or 'frames'} {products}".strip()


def _page_of(cell: "type[Cell]") -> str | None:
    """The page of a cell of the library; None for a user's own."""
    module = cell.__module__.rpartition(".")[2]
    own = f"unfading.cells.{module}" != cell.__module__
    return None if own else f"docs/cells/{PAGES.get(module, module)}.md"


def explain_cells(json: bool = False) -> None:
    """For every cell, say whether it runs fused on the CPU, and if not, why.

    Args:
        json: Print JSON instead of text.
    """
    from unfading import doctor as diagnosis

    explanations = diagnosis.explanations()
    if json:
        print(dumps([line._asdict() for line in explanations], indent=2))
        return
    for line in explanations:
        print(f"{line.name:24} {'fused' if line.fused else 'reference'}: {line.reason}")


def print_program(name: Name, /, input_size: int = 1, hidden_size: int = 128) -> None:
    """Print the program that is compiled from a cell's step, forward and backward.

    Args:
        name: Name of a cell, as printed by `unfading cells list`.
        input_size: Number of input features.
        hidden_size: Hidden size.
    """
    from unfading import doctor as diagnosis

    check_count("--input-size", input_size)
    check_count("--hidden-size", hidden_size)
    print(diagnosis.programs(name, input_size=input_size, hidden_size=hidden_size))


def tasks(name: Name = "", /, json: bool = False) -> None:
    """List every task, or describe one (`unfading tasks adding`): its options, the score of a guess, data, an example.

    Args:
        name: Name of a task; without it all tasks are listed.
        json: Print JSON instead of text.
    """
    from unfading import catalogue

    if name:
        _show_task(name, json=json)
        return
    entries = [catalogue.task_entry(name, task) for name, task in catalogue.tasks().items()]
    if json:
        print(dumps([entry._asdict() for entry in entries], indent=2))
        return
    table = plain_table(
        f"{len(entries)} tasks at their default options",
        "guess: score of a guess without memory; for a dataset, the share of its most common class.",
    )
    table.add_column("task", style="bold", no_wrap=True)
    table.add_column("description")
    table.add_column("guess", no_wrap=True)
    table.add_column("dataset")
    for entry in entries:
        description = f"{entry.what.split(' (')[0].rstrip('.')}. {entry.paper}"
        guess = entry.measure if entry.guess is None else f"{entry.guess:.4f} {entry.measure}"
        dataset = "generated" if entry.dataset is None else f"{entry.dataset}, {'present' if entry.found else 'missing'}"
        table.add_row(entry.name, description, guess, dataset)
    print_table(table)


def _show_task(name: str, *, json: bool) -> None:
    """Print the description of a task."""
    from inspect import getdoc
    from textwrap import fill

    from unfading import catalogue
    from unfading.training.names import task_class

    task = task_class(name)
    entry = catalogue.task_entry(name, task)
    texts = _descriptions(task)
    example = f"unfading train --task {_with_option(name, entry.options)} --cell STAR"
    page = _page_of_task(task)
    if json:
        options = {option: {"default": default, "help": texts.get(option, "")} for option, default in entry.options.items()}
        print(dumps({**entry._asdict(), "options": options, "example": example, "page": page}, indent=2))
        return
    paragraphs = f"{name}: {(getdoc(task) or '').partition(ARGUMENTS)[0].strip()}".split("\n\n")
    print("\n\n".join(fill(text, WIDTH) for text in paragraphs) + "\n\nOptions" + ("" if entry.options else ": none"))
    for option, default in entry.options.items():
        print(f"  {option}={default!r}")
        if option in texts:
            print(fill(texts[option], WIDTH, initial_indent="      ", subsequent_indent="      "))
    guess = "depends on the data; `unfading train` prints it" if entry.guess is None else f"{entry.guess:.4g}"
    if entry.dataset is not None and not entry.found:
        data = f"{entry.dataset}, missing; `unfading data fetch {entry.dataset}` gets it or says where to"
    else:
        data = "generated" if entry.dataset is None else f"{entry.dataset}, present"
    facts = {"metric": entry.measure, "guess": guess, "data": data, "paper": entry.paper, "example": example, "page": page}
    print("\n" + "\n".join(f"{label:8} {value}" for label, value in facts.items()))


def _page_of_task(task: type) -> str:
    package, _, module = task.__module__.rpartition(".")
    if package != "unfading.tasks":
        return "docs/guide/own-data.md"
    return f"docs/tasks/{'index' if module in FIRST_TASKS else 'real-data'}.md"


def _with_option(name: str, options: dict[str, Any]) -> str:
    """The task with its first option that is a number or a name, as the command line writes it."""
    option = next((option for option, value in options.items() if isinstance(value, int | str) and value != ""), None)
    return name if option is None else f"{name},{option}={options[option]}"


def doctor(
    clear_cache: bool = False,
    hidden_size: int | None = None,
    batch_size: int = 128,
    cell: str | None = None,
    tf32: bool = False,
    json: bool = False,
) -> None:
    """Check what speeds up the cells on this machine: compiler, kernel cache, GPU. Say what does not work, and why.

    With --hidden-size or --cell it also says which loop a GPU runs, with the estimated time of every loop. This needs no GPU:
    without one, the estimates are those for an H200.

    Args:
        clear_cache: Delete the compiled kernels. They are compiled again when needed.
        hidden_size: Hidden size for the report on how cells run on a GPU; 128 unless given.
        batch_size: Number of batch rows for that report.
        cell: Name of a cell: report on it alone.
        tf32: Whether matrix products may use tf32, as `torch.backends.cuda.matmul.fp32_precision = "tf32"` allows.
        json: Print JSON instead of text.
    """
    from unfading import doctor as diagnosis
    from unfading.fuse.c import cache

    check_count("--hidden-size", 128 if hidden_size is None else hidden_size)
    check_count("--batch-size", batch_size)
    if clear_cache:
        kernels, size = cache.clear()
        print(f"removed {kernels} kernels, {size / 1e6:.1f} MB, from {cache.folder()}")
        return
    checks, cells = diagnosis.checks(), diagnosis.explanations()
    present = diagnosis.present_gpu()
    on_gpu = []
    call = diagnosis.GpuCall(hidden_size or 128, batch_size, tf32, *(present or ())[1:])
    if present is not None or hidden_size is not None or cell is not None:
        on_gpu = diagnosis.explanations_on_gpu(call, cell)
    if json:
        sections: dict[str, list[Any]] = {"machine": checks, "cells": cells, "on_gpu": on_gpu}
        lines = {name: [line._asdict() for line in section] for name, section in sections.items()}
        for line in lines["on_gpu"]:
            line["loops"] = [loop._asdict() for loop in line["loops"]]
        print(dumps(lines, indent=2))
        return
    for check in checks:
        print(f"{'ok ' if check.good else 'BAD'} {check.name:10} {check.value}")
    works = all(check.good for check in checks if check.name == "compiling")
    fused = [each for each in cells if each.fused] if works else []
    print(f"{'ok ' if works else 'BAD'} cells      {len(fused)} of {len(cells)} can run fused on the CPU")
    for each in cells:
        if not each.fused:
            print(f"    {each.name} runs by the reference loop: {each.reason}")
    if on_gpu:
        name = "an H200, since this machine has no GPU" if present is None else present[0]
        _print_on_gpu(on_gpu, call, name, every=hidden_size is not None or cell is not None)


def _print_on_gpu(cells: "list[diagnosis.OnGPU]", call: "diagnosis.GpuCall", gpu: str, *, every: bool) -> None:
    from unfading.fuse.triton.estimates import duration

    phrases = {"fused": "fused", "graph": "as CUDA graphs", "reference": "by the reference loop", "none": "not at all"}
    numbers = {backend: sum(cell.backend == backend for cell in cells) for backend in phrases}
    counts = [f"{number} {phrases[backend]}" for backend, number in numbers.items() if number]
    print(
        f"ok  on a GPU   {', '.join(counts)}: {call.hidden_size} units, batch {call.batch}, dots in {call.precision}, on {gpu}"
    )
    for cell in cells:
        if every or cell.backend != "fused":
            print(f"    {cell.name} runs {phrases[cell.backend]}{f': {cell.reason}' if cell.reason else ''}")
        for loop in cell.loops if every else ():
            time = "cannot run" if loop.microseconds is None else f"{duration(loop.microseconds)} a step"
            print(f"        {loop.loop:24} {time}: {loop.detail}")


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count < 1e10 else f"{count / 1e9:,.1f} G"


def _check_sizes(input_size: int, hidden_size: int, length: int) -> None:
    check_count("--input-size", input_size)
    check_count("--hidden-size", hidden_size)
    check_count("--length", length)


def _state(entry: "Entry") -> str:
    """The parts of the state and their sizes: "h,c:128" where these are equal, else "h:128 m:64"."""
    sizes = set(entry.state.values())
    if len(sizes) == 1:
        return f"{','.join(entry.state)}:{sizes.pop()}"
    return " ".join(f"{name}:{size}" for name, size in entry.state.items())


def _options(cell: "type[Cell]") -> dict[str, tuple[Any, str]]:
    """Default and description of each option, from the constructor and the docstring of the class."""
    from inspect import Parameter, signature

    descriptions = _descriptions(cell)
    named = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    options = [each for each in list(signature(cell).parameters.values())[2:] if each.kind in named]
    return {each.name: (each.default, descriptions.get(each.name, "")) for each in options}


def _descriptions(kind: type) -> dict[str, str]:
    """What the docstrings of a class and of its bases say about each argument."""
    from inspect import cleandoc

    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        arguments = cleandoc(vars(each).get("__doc__") or "").partition(ARGUMENTS)[2]
        # An option starts at four spaces; its description may continue on lines that are indented further.
        entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", arguments, re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return texts


def _recipe(cell: "type[Cell]") -> str:
    """The recipe of a cell, one setting a line."""
    recipe = cell.recipe
    settings: dict[str, Any] = {"rate": recipe.rate, "clip_norm": recipe.clip_norm}
    settings |= {f"rate of {name}": f"x {factor:g}" for name, factor in recipe.rates.items()}
    settings |= {**recipe.options, **dict.fromkeys(recipe.length_options, "the length of the sequences")}
    return "\n".join(f"  {name:20} {value}" for name, value in {**settings, "if it diverges": recipe.if_diverged}.items())

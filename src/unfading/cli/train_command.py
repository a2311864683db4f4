"""`unfading train` and `unfading compare`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from unfading.cli.flags import FROM_RECIPE, OutputFlags, TrainingFlags, check_alone, training_flags
from unfading.cli.own_data_flags import OwnDataFlags
from unfading.errors import check_count
from unfading.training.stopping import Stopped, noted

if TYPE_CHECKING:
    from unfading.own_data.backtest import Backtest
    from unfading.training.options import Listener
    from unfading.training.run import Run

Training = Annotated[TrainingFlags, arg(constructor_factory=training_flags)]
MetricNames = Annotated[tuple[str, ...], arg(metavar="METRIC ...")]


def train(
    *,
    training: Training,
    task: Annotated[str, arg(help_behavior_hint="(required without --from)")] = "",
    cell: Annotated[str, arg(help_behavior_hint="(required without --from)")] = "",
    rate: Annotated[float | None, arg(help_behavior_hint=FROM_RECIPE)] = None,
    seed: int = 0,
    own_data: OwnDataFlags = OwnDataFlags(),  # noqa: B008, frozen
    output: OutputFlags = OutputFlags(),  # noqa: B008, frozen
    final: bool = False,
    threads: int = 1,
    record: Annotated[Path | None, arg(name="from")] = None,
    allow_code: bool = False,
    tensorboard: bool = False,
    watch: Literal["gradients"] | None = None,
    metrics: MetricNames = (),
) -> None:
    """Train a cell on a task, or on a file of your own (--data). Ctrl-C stops with a checkpoint, and --resume continues.

    The exit code is 0 for a run that has finished, 1 for one that has diverged, and 2 for an error.

    Args:
        task: Task and its options: adding,T=200. `unfading tasks` lists them. Your own class: my.py:MyTask.
        cell: Cell and its options: STAR,max_lag=200. `unfading cells list` lists them. Your own class: my.py:MyCell.
        rate: Learning rate.
        seed: Seed of weights, data and noise.
        final: Afterwards train once more on training and validation data together, and test the result.
        threads: Number of torch threads.
        record: A record.json or run.json, to repeat that run.
        allow_code: Let the file of --from execute code that it names. The source in its folder is used, or else your own file.
        tensorboard: Also write events for TensorBoard into the folder of the run.
        watch: Record the gradient of each layer and through time every hundred steps; `unfading report` draws them.
        metrics: Further scores of validation and test: accuracy, f1, confusion_matrix, mae, rmse, mase, my.py:function.
    """
    import torch
    from rich.console import Console

    from unfading.diagnostics.watch import gradients
    from unfading.training.earlier_source import with_earlier_source
    from unfading.training.progress import Display
    from unfading.training.recipes import recipe_of
    from unfading.training.run_dir import finished, read_run, stopped_at
    from unfading.training.tensorboard import tensorboard_events
    from unfading.training.train import train as train_run
    from unfading.training.user_metrics import read_metrics

    check_count("--threads", threads)
    own_data.check_used()
    names = read_metrics(metrics).numbers
    torch.set_num_threads(threads)
    output, first = _in_process(output)
    note = _silent if output.quiet else _note
    if record is not None:
        check_alone(record)
        run = read_run(record, allow_code=allow_code)
    elif own_data.data is not None:
        output = own_data.output(output)
        with _interruptible():
            run = own_data.run(training, task, cell, rate=rate, seed=seed, say=note)
    elif not task or not cell:
        raise ValueError(
            "--task and --cell say what to train, e.g. --task adding,T=200 --cell STAR; or --data FILE for your own data; or "
            "--from a record."
        )
    else:
        with _interruptible():
            run = training.run(task, cell, rate=rate, seed=seed, say=note)
    folder = output.folder(run)
    runs = [run, run.on_all_rows()] if final else [run]
    runs = with_earlier_source(runs, folder, resume=output.resume, again=output.again, say=_note if first else _silent)
    with Display(runs, Console(stderr=True, quiet=not first), names) as display, _reported_stop(folder, output):
        for each in runs:
            earlier = None if output.again or output.quiet else finished(folder, each)
            if earlier is not None:
                date = str(earlier["about"]["date"]).partition("T")[0]
                display.say(f"{each.cell} seed {each.seed}: already finished on {date}; --again trains it again.")
            listen: Listener | None = None if output.quiet else display.listen
            with ExitStack() as stack:
                if tensorboard and first:
                    first_step = 0 if output.again else stopped_at(folder, each)
                    listen = stack.enter_context(tensorboard_events(folder / each.key, listen, first_step))
                watcher = None if watch is None else gradients
                result = train_run(
                    each, folder, listen=listen, say=display.say, watch=watcher, metrics=metrics, **output.options()
                )
    if first:
        _print_result(result, folder, runs[-1], json=output.json, report=own_data.data is not None)
    if result["status"] == "diverged":
        reason, advice = result["reason"], recipe_of(run).if_diverged
        (_note if first else _silent)(f"the run diverged: {reason}. Its record is complete. Try {advice}.")
        sys.exit(1)


def compare(
    *,
    training: Training,
    task: str,
    cells: Annotated[tuple[str, ...], arg(metavar="CELL ...")],
    seeds: int = 3,
    rate: Annotated[tuple[float, ...], arg(metavar="FLOAT ...", help_behavior_hint=FROM_RECIPE)] = (),
    output: OutputFlags = OutputFlags(),  # noqa: B008, frozen
    final: bool = False,
    processes: Annotated[int | None, arg(help_behavior_hint="(default: 2 on a CPU, 1 on a GPU)")] = None,
    together: int = 16,
    metrics: MetricNames = (),
    storage: str | None = None,
) -> None:
    """Train several cells on a task with several seeds, print a table, and write a report with curves.

    Args:
        task: Task and its options: adding,T=200.
        cells: Cells and their options: IncrementalRNN,inner_steps=5 STAR LSTM.
        seeds: Number of seeds, 0 to N - 1.
        rate: Learning rates. Of several, each cell uses the one with the best validation score.
        final: Afterwards train the chosen runs once more on training and validation data together, and test the results.
        processes: Number of processes.
        together: Largest number of runs that are trained in one pass on a GPU.
        metrics: Further scores of validation and test: accuracy, f1, confusion_matrix, mae, rmse, mase, my.py:function.
        storage: Give the runs to workers through this storage; `unfading sweep work` starts workers on any machine that sees
            --runs, and --processes of them are started here (0: none).
    """
    import torch
    from rich.console import Console

    from unfading.report import summary
    from unfading.training.compare import by_last, chosen
    from unfading.training.earlier_source import with_earlier_source

    check_count("--seeds", seeds)
    if processes is not None:
        check_count("--processes", processes, least=1 if storage is None else 0)
    check_count("--together", together)
    if not cells:
        raise ValueError("--cells takes at least one cell, e.g. --cells STAR LSTM.")
    torch.set_num_threads(1)
    with _interruptible():
        runs = training.runs(task, cells, rates=rate, seeds=seeds, say=_silent if output.quiet else _note)
    folder = output.folder(runs[0])
    runs = with_earlier_source(runs, folder, resume=output.resume, again=output.again, say=_note)
    training_options = {"processes": processes, "together": together, "metrics": metrics, "storage": storage}
    records = _compare(runs, folder, output, training_options)
    best = chosen([by_last(record) for record in records] if final else records)
    if final:
        by_key = {run.key: run for run in runs}
        on_all_rows = [by_key[record["key"]].on_all_rows() for record in best]
        best = _compare(on_all_rows, folder, output, training_options)
    diverged = sum(record["status"] == "diverged" for record in records)
    if diverged:
        print(f"unfading: {diverged} of {len(records)} runs diverged; their records give the reasons.", file=sys.stderr)
    if output.json:
        for record in best:
            print(dumps(record))
        return
    Console().print(summary.summary(best))
    _print_metrics(best)
    if len(rate) > 1:
        rates = {record["run"]["cell"]: record["run"]["rate"] for record in best}
        print("rate chosen by validation: " + ", ".join(f"{cell} {value:g}" for cell, value in rates.items()))
    _write_report(folder)


def _compare(runs: "Sequence[Run]", folder: Path, output: OutputFlags, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train runs with a progress display and these options of `compare`; returns their records."""
    from rich.console import Console

    from unfading.training.compare import compare as compare_runs
    from unfading.training.progress import Display
    from unfading.training.user_metrics import read_metrics

    names = read_metrics(options["metrics"]).numbers
    with Display(runs, Console(stderr=True), names) as display, _reported_stop(folder, output):
        listen = None if output.quiet else display.listen
        say = _silent if output.quiet else display.say
        return compare_runs(runs, folder, listen=listen, say=say, **options, **output.options())


def _in_process(output: OutputFlags) -> tuple[OutputFlags, bool]:
    """The flags of one of the processes that torchrun may have started, and whether it is the first, which alone prints."""
    from unfading.training.data_parallel import rank, restarted

    if restarted():  # torchrun repeats the command, whatever it says
        output = replace(output, resume=True, again=False)
    return (replace(output, quiet=True), False) if rank() else (output, True)


@contextmanager
def _reported_stop(folder: Path, output: OutputFlags) -> Iterator[None]:
    """If training is stopped, say how to continue, and exit with the code of the signal."""
    try:
        with _interruptible():
            yield
    except Stopped as stopped:
        from unfading.training.data_parallel import rank

        flag = "--resume in place of --again" if output.again else "--resume"
        tell = _silent if rank() else _note
        tell(f"{stopped}; everything is in {folder}. The same command with {flag} continues.")
        sys.exit(128 + stopped.signal)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C outside the training loop, while data are read or a model is built, or a second Ctrl-C, which acts at once."""
    try:
        yield
    except KeyboardInterrupt:
        when = "at once; steps after the last checkpoint are lost" if noted() else "before the first step"
        print(f"unfading: stopped {when}.", file=sys.stderr)
        sys.exit(130)


def _silent(sentence: str) -> None:
    """Show nothing."""


def _note(sentence: str) -> None:
    """Show a message on stderr, before there is a display."""
    print(f"unfading: {sentence}", file=sys.stderr)


def _print_result(result: dict[str, Any], folder: Path, run: "Run", *, json: bool, report: bool) -> None:
    """Print the record of a run and how to load its model, or the record as JSON; write the report of the folder if asked."""
    from unfading.own_data.forecast_task import ForecastTask

    forecasts = _forecasts(result, folder, run)
    if json:
        print(dumps(result if forecasts is None else {**result, "forecasts": forecasts.scores}))
        return
    task = run.make_task()
    standardised = isinstance(task, ForecastTask) and task.scale != "none"
    _print_record(result, folder, " (standardised values)" if standardised else "")
    if forecasts is not None:
        scored = "test" if task.has_test else "validation"
        print(f"  forecasts of {len(forecasts.target):,} {scored} windows, in the units of the file")
        print("\n".join(f"    {line}" for line in str(forecasts).splitlines()))
    if report:
        _write_report(folder)
    where = str(folder / result["key"])
    if isinstance(task, ForecastTask):
        load = f"unfading.estimators.RecurrentForecaster.load({where!r})"
        print(f"load it: {load}; `unfading predict {where} --data FILE` forecasts the steps after the end of a file")
    else:
        print(f"load it: unfading.load({where!r}); `unfading predict --help` applies it to a file")


def _forecasts(result: dict[str, Any], folder: Path, run: "Run") -> "Backtest | None":
    """The forecasts of a run beside the naive ones, on windows that it was not trained on; None for other tasks."""
    from unfading.own_data.forecast_task import ForecastTask
    from unfading.own_data.forecasts import backtest_task
    from unfading.training.weights import load_with_code

    task = run.make_task()
    if not isinstance(task, ForecastTask) or result["status"] == "diverged":
        return None
    data = task.data
    origins = data.test if task.has_test else data.origins[data.held_out] if run.split == "train" else data.test
    if not len(origins):
        return None
    # The source of a user's cell is that which this command has just trained.
    model = load_with_code(folder / result["key"])
    return backtest_task(model, task, run.cell.rpartition(":")[2], origins)


def _print_record(record: dict[str, Any], folder: Path, unit: str) -> None:
    """Print the result of a run in a few lines, and what to try if it did not train.

    Args:
        record: of the run.
        folder: parent of its folder.
        unit: added to the scores.
    """
    from unfading.report import records, summary
    from unfading.report.metric_tables import confusion_lines, further_scores

    run, sizes = record["run"], record["parameters"]
    print(f"{run['cell']} on {run['task']}: " + ", ".join(filter(None, [record["status"], record["reason"]])))
    if record["test"] is not None:
        score = record["test"][record["measure"]]
        number = "not finite" if score is None else f"{score:.5g}"
        print(f"  test {record['measure']}: {number}; a guess has {record['guess']:.5g}{unit}")
    for name, (split, value) in further_scores(record).items():
        print(f"  {split} {name}: {'not finite' if value is None else f'{value:.5g}'}{unit}")
    if "confusion_matrix" in record:
        print("\n".join(f"  {line}".rstrip() for line in confusion_lines(record["confusion_matrix"])))
    if record["best"] is not None:
        print(f"  weights of step {record['best']['step']} of {record['steps']}, chosen by validation")
    print(f"  {sizes['all']:,} parameters, {sizes['recurrent']:,} of them recurrent, {record['kilobytes']} kB")
    if "compressed" in record:
        size = record["compressed"]
        print(f"  {size['nonzeros']:,} of {size['entries']:,} entries of matrices are not zero; {size['bytes']:,} bytes in all")
    pace = record["milliseconds_per_sequence"]
    print(f"  {record['seconds']:.1f} s of training" + ("" if pace is None else f", {pace:.3g} ms per test sequence"))
    print(f"  {folder / record['key']}")
    if summary.failure(*records.read([record])) == "did not train":
        print(f"  did not train: the score is not a tenth better than a guess. {summary.NEXT['did not train']}")


def _print_metrics(records: "Sequence[dict[str, Any]]") -> None:
    """Print the further metrics of a comparison, if some were asked for."""
    from rich.console import Console

    from unfading.report import records as of_report
    from unfading.report.groups import group_by_task
    from unfading.report.metric_tables import terminal

    for task in group_by_task(of_report.read(records)):
        if (table := terminal(task)) is not None:
            Console().print(table)


def _write_report(folder: Path) -> None:
    """Write the page beside the runs, or say why it cannot be written, e.g. if the plotting packages are missing."""
    from unfading.report import page, records

    try:
        page.write(records.load([folder]), folder / "report.html")
    except ValueError as error:
        print(f"no report was written: {error}", file=sys.stderr)
    else:
        print(f"report: {folder / 'report.html'}")

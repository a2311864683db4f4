"""Verbs of the command line that train: `train` and `compare`. Imported when the command runs, since it needs tyro."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.console import Console
from tyro.conf import arg

from unfading.cli.settings import FLAGS, Keeping, TrainingFlags, check_alone
from unfading.diagnostics.watch import gradients
from unfading.errors import check_count
from unfading.report import page, records
from unfading.report import summary as tables
from unfading.training.compare import by_last, chosen
from unfading.training.compare import compare as compare_runs
from unfading.training.loop import Listener
from unfading.training.progress import Display
from unfading.training.run import Run
from unfading.training.run_dir import read_run, stopped_at
from unfading.training.stopping import Stopped, noted
from unfading.training.tensorboard import also_written
from unfading.training.train import train as train_run


def train(
    task: str = "",
    cell: str = "",
    rate: float = 1e-3,
    seed: int = 0,
    settings: Annotated[TrainingFlags, arg(constructor=FLAGS)] = FLAGS(),  # noqa: B008, frozen
    keeping: Keeping = Keeping(),  # noqa: B008, frozen
    final: bool = False,
    threads: int = 1,
    record: Annotated[Path | None, arg(name="from")] = None,
    tensorboard: bool = False,
    watch: Literal["gradients"] | None = None,
) -> None:
    """Train a cell on a task; Ctrl-C stops with a checkpoint, --resume goes on.

    Args:
        task: name and options: adding,T=200. `unfading tasks` lists them; your own is my.py:MyTask.
        cell: name and options: STAR,max_lag=200. `unfading cells` lists them; your own is my.py:MyCell.
        rate: of learning.
        seed: of weights, data and noise.
        final: then train once more on training and validation rows together, and test that.
        threads: of torch.
        record: a record.json or run.json: run it again, as it was.
        tensorboard: write events for TensorBoard into the run's folder too.
        watch: gradients: those of each layer, and back through time, every hundred steps; the report draws them.
    """
    check_count("--threads", threads)
    torch.set_num_threads(threads)
    if record is not None:
        check_alone(record)
        run = read_run(record)
    elif not task or not cell:
        raise ValueError("--task and --cell say what to train, e.g. --task adding,T=200 --cell STAR; or --from a record.")
    else:
        with _interruptible():
            run = settings.run(task, cell, rate=rate, seed=seed)
    runs = [run, run.on_all_rows()] if final else [run]
    where = keeping.where(run)
    console = Console(stderr=True)
    with Display(runs, console) as display, _stops_tell(where, keeping):
        for each in runs:
            listen: Listener | None = None if keeping.quiet else display.listen
            with ExitStack() as stack:
                if tensorboard:
                    begun = 0 if keeping.again else stopped_at(where, each)
                    listen = stack.enter_context(also_written(where / each.key, listen, begun))
                seen = None if watch is None else gradients
                result = train_run(each, where, listen=listen, watch=seen, **keeping.options())
    if keeping.json:
        print(dumps(result))
    else:
        _tell(result, where)


def compare(
    task: str,
    cells: tuple[str, ...],
    seeds: int = 3,
    rate: tuple[float, ...] = (1e-3,),
    settings: Annotated[TrainingFlags, arg(constructor=FLAGS)] = FLAGS(),  # noqa: B008, frozen
    keeping: Keeping = Keeping(),  # noqa: B008, frozen
    final: bool = False,
    processes: int | None = None,
    together: int = 16,
) -> None:
    """Train several cells on a task with several seeds; table, curves and a report at the end.

    Args:
        task: name and options: adding,T=200.
        cells: names and options: IncrementalRNN,inner_steps=5 STAR LSTM.
        seeds: so many, 0 to N - 1.
        rate: of learning; of several, each cell gets the one that does best on validation.
        final: then train the chosen ones once more on training and validation rows together, and test those.
        processes: so many at a time: two on a CPU if not said, one on a GPU.
        together: at most so many runs in one pass on a GPU.
    """
    check_count("--seeds", seeds)
    if processes is not None:
        check_count("--processes", processes)
    check_count("--together", together)
    if not cells or not rate:
        raise ValueError("--cells takes at least one cell, and --rate at least one rate, e.g. --cells STAR LSTM --rate 0.001.")
    torch.set_num_threads(1)
    with _interruptible():
        runs = settings.runs(task, cells, rates=rate, seeds=seeds)
    where = keeping.where(runs[0])
    compared = _compared(runs, where, keeping, processes, together)
    best = chosen([by_last(record) for record in compared] if final else compared)
    if final:
        full = [Run.from_json(record["run"]).on_all_rows() for record in best]
        best = _compared(full, where, keeping, processes, together)
    if keeping.json:
        for record in best:
            print(dumps(record))
        return
    Console().print(tables.summary(best))
    if len(rate) > 1:
        rates = {record["run"]["cell"]: record["run"]["rate"] for record in best}
        print("rate chosen by validation: " + ", ".join(f"{cell} {value:g}" for cell, value in rates.items()))
    _write_report(where)


def _compared(runs: Sequence[Run], where: Path, keeping: Keeping, processes: int | None, together: int) -> list[dict[str, Any]]:
    console = Console(stderr=True)
    with Display(runs, console) as display, _stops_tell(where, keeping):
        listen = None if keeping.quiet else display.listen
        say = (lambda sentence: None) if keeping.quiet else display.say
        return compare_runs(runs, where, processes=processes, together=together, listen=listen, say=say, **keeping.options())


@contextmanager
def _stops_tell(where: Path, keeping: Keeping) -> Iterator[None]:
    """A run that was asked to stop says where it can go on, and the exit code says which signal it was."""
    try:
        with _interruptible():
            yield
    except Stopped as stopped:
        how = "--resume in place of --again" if keeping.again else "--resume"
        print(f"unfading: {stopped}; all is in {where}. The same command with {how} goes on.", file=sys.stderr)
        sys.exit(128 + stopped.signal)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C where no step waits for it: while data are read or a model is built; or the second one, which acts at once."""
    try:
        yield
    except KeyboardInterrupt:
        told = "at once; what came after the last checkpoint is lost" if noted() else "before the first step"
        print(f"unfading: stopped {told}.", file=sys.stderr)
        sys.exit(130)


def _tell(record: dict[str, Any], where: Path) -> None:
    """The end of a run, in a few lines."""
    run, sizes = record["run"], record["parameters"]
    print(f"{run['cell']} on {run['task']}: " + ", ".join(filter(None, [record["status"], record["reason"]])))
    if record["test"] is not None:
        score = record["test"][record["measure"]]
        told = "not finite" if score is None else f"{score:.5g}"
        print(f"  test {record['measure']}: {told}; a guess has {record['guess']:.5g}")
    if record["best"] is not None:
        print(f"  weights of step {record['best']['step']} of {record['steps']}, chosen by validation")
    print(f"  {sizes['all']:,} parameters, {sizes['recurrent']:,} of them recurrent, {record['kilobytes']} kB")
    print(f"  {record['seconds']:.1f} s of training, {record['milliseconds_per_sequence']:.3g} ms a test sequence")
    print(f"  {where / record['key']}")


def _write_report(where: Path) -> None:
    """The page beside the runs; without it, where what draws it is not installed, a sentence."""
    try:
        page.write(records.load([where]), where / "report.html")
    except ValueError as error:
        print(f"no report was written: {error}", file=sys.stderr)
    else:
        print(f"report: {where / 'report.html'}")

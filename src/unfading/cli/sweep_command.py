"""`unfading sweep run|work|list|report`: search settings with any number of workers, and serve the queues of `compare`."""

import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from unfading.cli.flags import FROM_RECIPE, TrainingFlags, training_flags, typed_command
from unfading.cli.own_data_flags import OwnDataFlags
from unfading.errors import check_count, check_number, check_positive
from unfading.training.stopping import Stopped

Storage = Annotated[str, arg(metavar="ADDRESS")]
Training = Annotated[TrainingFlags, arg(constructor_factory=training_flags)]


def run_sweep(
    *,
    training: Training,
    task: Annotated[str, arg(help_behavior_hint="(required without --data)")] = "",
    cell: Annotated[str, arg(help_behavior_hint="(required without --data)")] = "",
    search: Annotated[tuple[str, ...], arg(metavar="NAME=VALUES ...")],
    storage: Storage,
    name: str,
    trials: int = 50,
    workers: int = 1,
    prune: Literal["median", "hyperband", "none"] = "median",
    sampler: Literal["tpe", "random"] = "tpe",
    rate: Annotated[float | None, arg(help_behavior_hint=FROM_RECIPE)] = None,
    seed: int = 0,
    own_data: OwnDataFlags = OwnDataFlags(),  # noqa: B008, frozen
    runs: Path = Path("runs"),
    save_every: float = 60.0,
    lease: float = 120.0,
    attempts: int = 5,
    quiet: bool = False,
) -> None:
    """Search settings of a run on a task, or on a file (--data), by its validation score, with workers on any machines.

    Start the same command, or `unfading sweep work`, wherever there is room. Trials are counted in the storage, so workers may
    be added, stopped and killed at any time; a trial whose worker was killed is taken over by another. The same command
    continues a sweep, and a larger --trials extends it.

    Args:
        task: Task and its options: adding,T=200.
        cell: Cell and its options: STAR,max_lag=200.
        search: Settings to search: rate=1e-4..1e-2:log hidden=32,64,128 layers=1..4 cell.dropout=0..0.5.
        storage: Where trials are stored: sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE.
        name: Name of the study, and of its folder in --runs.
        trials: Number of trials of the sweep, over all workers.
        workers: Number of processes on this machine. If several GPUs are visible, each process has one of them, in turn.
        prune: Stop a trial whose validation score is worse than the median of the earlier trials at the same evaluation, or
            by Hyperband, or never.
        sampler: Draw settings by a tree-structured Parzen estimator, or at random.
        rate: Learning rate, if it is not searched.
        seed: Seed of weights, data and noise, and of the sampler.
        runs: Folder of all runs. If all workers see it, a trial that is taken over continues at its checkpoint.
        save_every: Seconds between checkpoints.
        lease: Seconds without a sign of life after which a trial is taken over. A study has that of its first command.
        attempts: A trial that has ended its worker this often at the same step is marked as failed.
        quiet: Show no progress.
    """
    import torch

    from unfading.training.sweep.queue import create_queue
    from unfading.training.sweep.storage import open_storage
    from unfading.training.sweep.sweep import Sweep

    check_count("--trials", trials)
    check_count("--workers", workers)
    check_count("--attempts", attempts)
    check_positive("--lease", lease)
    _check_name(name)
    torch.set_num_threads(1)
    own_data.check_used()
    say = _silent if quiet else _say
    if own_data.data is not None:
        run = own_data.run(training, task, cell, rate=rate, seed=seed, say=say)
    elif not task or not cell:
        raise ValueError("--task and --cell say what to train, e.g. --task adding,T=200 --cell STAR; or --data FILE.")
    else:
        run = training.run(task, cell, rate=rate, seed=seed, say=say)
    sweep = Sweep(run, search, prune, sampler)
    sweep.check()
    queue = create_queue(open_storage(storage), name, sweep.to_json(), maximise=sweep.objective.higher_is_better, lease=lease)
    queue.fill(trials)
    options = {"attempts": attempts, "save_every": save_every, "allow_code": True}
    _work(workers, quiet, storage=storage, runs=runs, names=(name,), **options)
    print(_summary(queue))


def work(
    *,
    storage: Storage,
    name: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="(default: all)")] = (),
    workers: int = 1,
    wait: float = 0.0,
    runs: Path = Path("runs"),
    save_every: float = 60.0,
    attempts: int = 5,
    allow_code: bool = False,
    quiet: bool = False,
) -> None:
    """Work on the trials of a storage: those of sweeps, and the runs of `compare` and `reproduce` with --storage.

    Args:
        storage: Where trials are stored: sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE.
        name: Names of studies to work on.
        workers: Number of processes on this machine. If several GPUs are visible, each process has one of them, in turn.
        wait: Minutes to wait for new trials after the last one has ended.
        runs: Folder of all runs. The runs of `compare` and `reproduce` need the one that these commands have.
        save_every: Seconds between checkpoints.
        attempts: A trial that has ended its worker this often at the same step is marked as failed.
        allow_code: Execute the source of your own tasks and cells that the storage holds.
        quiet: Show no progress.
    """
    import torch

    check_count("--workers", workers)
    check_count("--attempts", attempts)
    check_number("--wait", wait)
    torch.set_num_threads(1)
    options = {"wait": 60 * wait, "attempts": attempts, "save_every": save_every, "allow_code": allow_code}
    _work(workers, quiet, storage=storage, runs=runs, names=name, **options)


def list_studies(*, storage: Storage, json: bool = False) -> None:
    """List the studies of a storage, and how many of their trials have ended.

    Args:
        storage: Where trials are stored: sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE.
        json: Print JSON instead of text.
    """
    from unfading.training.sweep.queue import Queue, definitions
    from unfading.training.sweep.storage import open_storage

    opened = open_storage(storage, create=False)
    queues = [Queue(opened, name) for name in definitions(opened)]
    if json:
        print(dumps([{"name": queue.name, "trials": queue.counts()} for queue in queues]))
        return
    print("\n".join(map(_summary, queues)) or f"{opened.name} has no study.")


def report(
    *,
    storage: Storage,
    name: str,
    output: Annotated[Path, arg(aliases=["-o"])] = Path("sweep.html"),
    png: bool = False,
    json: bool = False,
) -> None:
    """Write one HTML page about a sweep: its best trials, the importance of each setting, and the score over settings and time.

    Args:
        storage: Where trials are stored: sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE.
        name: Name of the study.
        output: HTML file to write.
        png: Also write each figure beside the page as PNG.
        json: Print the trials as JSON instead of a table.
    """
    from unfading.report import sweep_page
    from unfading.training.sweep.queue import Queue
    from unfading.training.sweep.storage import open_storage
    from unfading.training.sweep.sweep_results import results

    rows = results(Queue(open_storage(storage, create=False), name))
    files = sweep_page.write(rows, output, png=png)
    if json:
        print(dumps({**rows, "files": list(map(str, files))}))
        return
    print(f"{sweep_page.title(rows)}\nwrote {', '.join(map(str, files))}")


def _work(count: int, quiet: bool, **options: Any) -> None:
    """Work in this process, or in several, until all trials have ended."""
    from unfading.training.sweep.local_workers import work_in_processes
    from unfading.training.sweep.work import WorkOptions
    from unfading.training.sweep.work import work as work_here

    say = _silent if quiet else _say
    work_options = WorkOptions(**options, command=typed_command(), quiet=quiet)
    try:
        if count > 1:
            work_in_processes(work_options, count, say)
        else:
            work_here(work_options, say)
    except Stopped as stopped:
        print("unfading: stopped; the trial in hand waits for another worker, with its checkpoint.", file=sys.stderr)
        sys.exit(128 + stopped.signal)


def _summary(queue: Any) -> str:
    counts = queue.counts()
    ended = ", ".join(f"{counts[state]} {word}" for state, word in _WORDS.items() if counts[state])
    text = f"{queue.name}: {sum(counts.values())} trials; {ended or 'none has begun'}"
    if queue.definition["kind"] != "search" or not counts["COMPLETE"]:
        return text
    best = queue.study().best_trial
    settings = " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in best.params.items()
    )
    return f"{text}\n  best on validation: {best.value:.5g} in trial {best.number} ({settings})"


_WORDS = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}


def _check_name(name: str) -> None:
    if not name or name in (".", "..") or "/" in name:
        raise ValueError(f"--name is the name of one folder in --runs; got {name!r}.")


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _silent(sentence: str) -> None:
    """Show nothing."""

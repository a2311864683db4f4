"""Runs in processes of their own, a few at a time: each worker trains one run, or one pass of many, after the other.

A worker reads jobs from its standard input, one JSON object a line, and answers with moments and ends. One whose parent has
gone stops as it does on Ctrl-C: with a checkpoint.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unfading.training.active_run import Moment
from unfading.training.loop import Listener
from unfading.training.run import Run
from unfading.training.run_dir import finished
from unfading.training.stopping import Stopped, asked_to_stop, noted

# The standard output is for the parent: before anything large is imported it gets another number, and what others print goes
# to stderr. What the parent can import, the worker can.
START = """import os, sys
told = os.dup(1)
os.dup2(2, 1)
os.write(told, b"\\n")  # ends a line that somebody else began
sys.path[:] = sys.argv[1:]
from unfading.training.workers import main
main(told)
"""
# What a worker tells: how a run goes, a sentence, and how its job ended.
TOLD = {"moment", "sentence", "done", "error"}

# Runs that are trained in one pass.
Job = Sequence[Run]


def train_apart(
    jobs: Sequence[Job],
    where: Path,
    *,
    processes: int,
    listen: Listener | None,
    say: Callable[[str], None],
    options: dict[str, Any],
) -> None:
    """Train all jobs, `processes` at a time; the records are in the folders of their runs.

    A job that fails does not stop the others; what went wrong is raised at the end. Ctrl-C and SIGTERM stop all of them, each
    with a checkpoint.
    """
    waiting = list(reversed(jobs))
    news: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    workers = [_Worker(i, news) for i in range(min(processes, len(jobs)))]
    failures: list[tuple[Run, str]] = []
    busy: dict[int, Job] = {}

    def next_job(worker: _Worker) -> None:
        if waiting:
            busy[worker.index] = waiting.pop()
            worker.send({"runs": [run.to_json() for run in busy[worker.index]], "where": str(where), **options})
        else:
            worker.close()

    try:
        with asked_to_stop() as asked:
            for worker in workers:
                next_job(worker)
            while busy and asked() is None:
                try:
                    index, told = news.get(timeout=0.25)
                except queue.Empty:
                    continue
                if told is not None and "moment" in told:
                    place, *rest = told["moment"]
                    if listen is not None:
                        listen(Moment(busy[index][place], *rest))
                    continue
                if told is not None and "sentence" in told:
                    say(told["sentence"])
                    continue
                if index not in busy:  # an idle one has gone, as it should
                    continue
                job = busy.pop(index)
                lost = [run for run in job if finished(where, run) is None]
                if told is None:
                    failures += [(run, f"its process ended with {workers[index].code()}") for run in lost]
                elif "error" in told:
                    failures += [(run, told["error"]) for run in lost]
                if told is None and waiting:
                    workers[index].stop()
                    workers[index] = _Worker(index, news)
                if told is not None or waiting:
                    next_job(workers[index])
            number = asked()
    finally:
        # All are asked before the first is waited for.
        for worker in workers:
            worker.close()
        for worker in workers:
            worker.stop()
    if number is not None:
        raise Stopped(number, None)
    if failures:
        raise ValueError(f"{len(failures)} of {sum(map(len, jobs))} runs failed: {'; '.join(_sentences(failures))}")


def _sentences(failures: list[tuple[Run, str]]) -> list[str]:
    """What went wrong; what several seeds of a cell have in common is said once."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for run, sentence in failures:
        seeds.setdefault((run.cell, sentence), []).append(run.seed)
    return [
        f"{cell}, {'seed' if len(set(found)) == 1 else 'seeds'} {', '.join(map(str, sorted(set(found))))}: {sentence}"
        for (cell, sentence), found in seeds.items()
    ]


class _Worker:
    """A process that trains, and a thread that reads what it tells; None when it has gone."""

    def __init__(self, index: int, news: "queue.Queue[tuple[int, dict[str, Any] | None]]"):
        self.index = index
        # A session of its own: Ctrl-C reaches the parent alone, which then asks its workers to stop.
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self.thread = threading.Thread(target=self._read, args=(news,), daemon=True)
        self.thread.start()

    def _read(self, news: "queue.Queue[tuple[int, dict[str, Any] | None]]") -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = _told(line)
            if told is not None:
                news.put((self.index, told))
            elif line.strip():
                sys.stderr.write(line)
        self.process.wait()
        news.put((self.index, None))

    def send(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        # One that has ended already cannot read it; the thread tells that it has.
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """No more jobs: the process ends, with a checkpoint of what it is at."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def code(self) -> str:
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"code {code}"

    def stop(self) -> None:
        """Let it end, and wait until it has written what it did."""
        self.close()
        self.process.wait()
        self.thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _told(line: str) -> dict[str, Any] | None:
    """What a line of a worker's standard output tells; None for one that somebody else wrote there."""
    try:
        told = json.loads(line)
    except json.JSONDecodeError:
        return None
    return told if isinstance(told, dict) and told.keys() & TOLD else None


def main(told: int) -> None:
    """Train what comes on the standard input, and tell of it on the file of that number."""
    import torch

    torch.set_num_threads(1)

    def tell(what: dict[str, Any]) -> None:
        # A parent that has gone hears nothing more, and the run must still come to its checkpoint. Opened for each line: what
        # could not be written is not tried again with the next.
        with suppress(BrokenPipeError), open(told, "w", encoding="utf-8", closefd=False) as parent:
            parent.write(json.dumps(what) + "\n")

    jobs: queue.Queue[dict[str, Any] | None] = queue.Queue()
    training, closed = threading.Event(), threading.Event()
    threading.Thread(target=_receive, args=(jobs, training, closed), daemon=True).start()
    signal.signal(signal.SIGTERM, _end)
    while (job := jobs.get()) is not None:
        training.set()
        if closed.is_set():
            break
        try:
            _train(job, tell)
            tell({"done": True})
        except Stopped as stopped:
            sys.exit(128 + stopped.signal)
        except torch.AcceleratorError as error:  # nothing runs on the GPU in this process any more: another one takes over
            sys.exit(f"unfading: {str(error).splitlines()[0]}")
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            tell({"error": str(error)})
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # others share the GPU
        training.clear()


def _train(job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Train what a job names, and tell how it goes; a moment says by its first number of which run it is."""
    from unfading.training.train import train_pass

    runs = [Run.from_json(run) for run in job.pop("runs")]
    places = {run.key: place for place, run in enumerate(runs)}

    def listen(moment: Moment) -> None:
        tell({"moment": [places[moment.run.key], *moment[1:]]})

    train_pass(runs, Path(job.pop("where")), listen, lambda sentence: tell({"sentence": sentence}), job)


def _end(number: int, frame: Any) -> None:
    """Between runs a signal ends the process; one more, after the run was asked to stop, lets it come to its checkpoint.

    Whoever ends a whole group of processes signals the worker, and so does its parent, in either order.
    """
    if not noted():
        sys.exit(128 + number)


def _receive(jobs: "queue.Queue[dict[str, Any] | None]", training: threading.Event, closed: threading.Event) -> None:
    """Pass jobs on; when the parent closes the pipe, or has gone, what is being trained is asked to stop."""
    for line in sys.stdin:
        jobs.put(json.loads(line))
    jobs.put(None)
    closed.set()
    if training.is_set():
        os.kill(os.getpid(), signal.SIGTERM)

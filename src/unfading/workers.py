"""Runs in processes of their own, a few at a time: each worker trains one run after the other, with one thread.

A worker reads runs from its standard input, one JSON object a line, and answers with moments and ends. One whose parent has
gone stops as it does on Ctrl-C: with a checkpoint.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unfading.member import Moment
from unfading.run import Run
from unfading.stopping import Stopped, asked_to_stop
from unfading.training import Listener


def train_apart(runs: Sequence[Run], where: Path, *, processes: int, listen: Listener | None, options: dict[str, Any]) -> None:
    """Train all runs, `processes` at a time; their records are in their folders.

    A run that fails does not stop the others; what went wrong is raised at the end. Ctrl-C and SIGTERM stop all of them, each
    with a checkpoint.
    """
    waiting = list(reversed(runs))
    by_key = {run.key: run for run in runs}
    news: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    workers = [_Worker(i, news) for i in range(min(processes, len(runs)))]
    failures: list[str] = []
    busy: dict[int, Run] = {}

    def next_run(worker: _Worker) -> None:
        if waiting:
            busy[worker.index] = waiting.pop()
            worker.send({"run": busy[worker.index].to_json(), "where": str(where), **options})
        else:
            worker.close()

    try:
        with asked_to_stop() as asked:
            for worker in workers:
                next_run(worker)
            while busy and asked() is None:
                try:
                    index, told = news.get(timeout=0.25)
                except queue.Empty:
                    continue
                if told is not None and "moment" in told:
                    if listen is not None:
                        listen(Moment(by_key[told["key"]], *told["moment"]))
                    continue
                if index not in busy:  # an idle one has gone, as it should
                    continue
                run = busy.pop(index)
                if told is None:
                    failures.append(f"{run.cell}, seed {run.seed}: its process ended with {workers[index].code()}")
                elif "error" in told:
                    failures.append(f"{run.cell}, seed {run.seed}: {told['error']}")
                if told is None and waiting:
                    workers[index].stop()
                    workers[index] = _Worker(index, news)
                if told is not None or waiting:
                    next_run(workers[index])
            number = asked()
    finally:
        for worker in workers:
            worker.stop()
    if number is not None:
        raise Stopped(number, None)
    if failures:
        raise ValueError(f"{len(failures)} of {len(runs)} runs failed: {'; '.join(failures)}")


class _Worker:
    """A process that trains, and a thread that reads what it tells; None when it has gone."""

    def __init__(self, index: int, news: "queue.Queue[tuple[int, dict[str, Any] | None]]"):
        self.index = index
        # A session of its own: Ctrl-C reaches the parent alone, which then asks its workers to stop.
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from unfading.workers import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.thread = threading.Thread(target=self._read, args=(news,), daemon=True)
        self.thread.start()

    def _read(self, news: "queue.Queue[tuple[int, dict[str, Any] | None]]") -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            news.put((self.index, json.loads(line)))
        self.process.wait()
        news.put((self.index, None))

    def send(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """No more runs: the process ends, with a checkpoint of what it is at."""
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


def main() -> None:
    """Train what comes on the standard input."""
    import torch

    from unfading.train import train

    torch.set_num_threads(1)
    # What user code prints goes to stderr; the standard output is for the parent.
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    jobs: queue.Queue[dict[str, Any] | None] = queue.Queue()
    training, closed = threading.Event(), threading.Event()
    threading.Thread(target=_receive, args=(jobs, training, closed), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    while (job := jobs.get()) is not None:
        run = Run.from_json(job.pop("run"))
        key = run.key

        def listen(moment: Moment, key: str = key) -> None:
            print(json.dumps({"key": key, "moment": moment[1:]}), file=told)

        training.set()
        if closed.is_set():
            break
        try:
            train(run, job.pop("where"), listen=listen, **job)
            print(json.dumps({"key": key, "done": True}), file=told)
        except Stopped as stopped:
            sys.exit(128 + stopped.signal)
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            print(json.dumps({"key": key, "error": str(error)}), file=told)
        training.clear()


def _receive(jobs: "queue.Queue[dict[str, Any] | None]", training: threading.Event, closed: threading.Event) -> None:
    """Pass runs on; when the parent closes the pipe, or has gone, what is being trained is asked to stop."""
    for line in sys.stdin:
        jobs.put(json.loads(line))
    jobs.put(None)
    closed.set()
    if training.is_set():
        os.kill(os.getpid(), signal.SIGTERM)

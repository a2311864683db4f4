"""Worker processes: each trains one job after the other. A job is a run, or several runs of one pass.

A worker reads jobs from its standard input, one JSON object per line, and writes progress and results, one per line. If its
parent ends, it stops as on Ctrl-C: with a checkpoint.

Why not `concurrent.futures.ProcessPoolExecutor`? A job takes minutes to days, and its process may be killed, run out of memory
or meet a CUDA error after which nothing runs on the GPU in that process. An executor then fails all other jobs as well; here
the job alone fails, its process is replaced, and the other jobs continue. An executor returns one result per job, whereas
progress must arrive while a job runs; and it has no way to ask a worker to write its checkpoint and stop. Workers are fresh
processes, not forks, because CUDA does not survive a fork, and each is its own client of NVIDIA's MPS.
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
from typing import Any

from unfading.training.freed_memory import keep_freed_memory
from unfading.training.options import ProgressUpdate, TrainOptions
from unfading.training.run import Run
from unfading.training.run_dir import finished
from unfading.training.stopping import Stopped, asked_to_stop, noted
from unfading.training.user_code import UserCode

# The standard output belongs to the parent. Before anything large is imported it moves to another file descriptor, and what
# others print goes to stderr. A worker can import what its parent can import.
START = """import os, sys
messages = os.dup(1)
os.dup2(2, 1)
os.write(messages, b"\\n")  # ends an incomplete line of another writer
sys.path[:] = sys.argv[1:]
from unfading.training.workers import main
main(messages)
"""
# Kinds of messages: progress of a run, a message for the user, and the two ends of a job.
KINDS = {"progress", "say", "done", "error"}

# Runs that are trained in one pass.
Job = Sequence[Run]
Message = dict[str, Any]
# Index of a worker and its message, or None when its process has ended.
Messages = queue.Queue[tuple[int, Message | None]]


def train_apart(jobs: Sequence[Job], options: TrainOptions) -> None:
    """Train all jobs in `options.processes` processes; the records are in the folders of the runs.

    A job that fails does not stop the others; its error is raised at the end. Ctrl-C and SIGTERM stop all jobs, each with a
    checkpoint.
    """
    pool = _Pool(jobs, options)
    try:
        with asked_to_stop() as asked:
            pool.train(asked)
            number = asked()
    finally:
        pool.stop()
    if number is not None:
        raise Stopped(number, None)
    if pool.failures:
        count = sum(map(len, jobs))
        raise ValueError(f"{len(pool.failures)} of {count} runs failed: {'; '.join(sentences(pool.failures))}")


class _Pool:
    """Workers, the jobs that they train, and the jobs that wait."""

    def __init__(self, jobs: Sequence[Job], options: TrainOptions):
        self.options = options
        self.sent = options.to_json()  # raises, before a process starts, for what cannot be sent
        self.waiting = list(reversed(jobs))
        self.messages: Messages = queue.Queue()
        self.workers = [_Worker(i, self.messages) for i in range(min(options.processes or 1, len(jobs)))]
        self.busy: dict[int, Job] = {}  # by the index of the worker
        self.failures: list[tuple[Run, str]] = []

    def train(self, asked: Callable[[], int | None]) -> None:
        """Train until all jobs have ended, or until asked to stop."""
        for worker in self.workers:
            self._give_job(worker)
        while self.busy and asked() is None:
            try:
                index, message = self.messages.get(timeout=0.25)
            except queue.Empty:
                continue
            self._receive(index, message)

    def stop(self) -> None:
        """Stop all workers; all are asked before the first is waited for."""
        for worker in self.workers:
            worker.close()
        for worker in self.workers:
            worker.stop()

    def _give_job(self, worker: "_Worker") -> None:
        if self.waiting:
            job = self.busy[worker.index] = self.waiting.pop()
            # The runs of a job have one source.
            code = {place: each.to_json() for place, each in job[0].code.items()}
            worker.send({"runs": [run.to_json() for run in job], "code": code, "options": self.sent})
        else:
            worker.close()

    def _receive(self, index: int, message: Message | None) -> None:
        if message is not None and "progress" in message:
            position, *rest = message["progress"]
            if self.options.listen is not None:
                self.options.listen(ProgressUpdate(self.busy[index][position], *rest))
        elif message is not None and "say" in message:
            self.options.say(message["say"])
        elif index in self.busy:
            self._end_job(index, message)
        # Otherwise an idle worker has ended, as it should.

    def _end_job(self, index: int, message: Message | None) -> None:
        """Note what failed, and give the worker its next job; a process that has ended is replaced if jobs wait."""
        unfinished = [run for run in self.busy.pop(index) if self._record(run) is None]
        if message is None:
            self.failures += [(run, f"its process ended with {self.workers[index].exit_code()}") for run in unfinished]
            if not self.waiting:
                return
            self.workers[index].stop()
            self.workers[index] = _Worker(index, self.messages)
        elif "error" in message:
            self.failures += [(run, message["error"]) for run in unfinished]
        self._give_job(self.workers[index])

    def _record(self, run: Run) -> dict[str, Any] | None:
        assert self.options.folder is not None
        return finished(self.options.folder, run)


def sentences(failures: list[tuple[Run, str]]) -> list[str]:
    """One sentence per error; the seeds of a cell that share an error share its sentence."""
    seeds: dict[tuple[str, str], set[int]] = {}
    for run, sentence in failures:
        seeds.setdefault((run.cell, sentence), set()).add(run.seed)
    return [
        f"{cell}, {'seed' if len(numbers) == 1 else 'seeds'} {', '.join(map(str, sorted(numbers)))}: {sentence}"
        for (cell, sentence), numbers in seeds.items()
    ]


class _Worker:
    """A process that trains, and a thread that reads its messages."""

    def __init__(self, index: int, messages: Messages):
        self.index = index
        # A session of its own: Ctrl-C reaches only the parent, which then asks its workers to stop.
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self.thread = threading.Thread(target=self._read, args=(messages,), daemon=True)
        self.thread.start()

    def _read(self, messages: Messages) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = _parse(line)
            if message is not None:
                messages.put((self.index, message))
            elif line.strip():
                sys.stderr.write(line)
        self.process.wait()
        messages.put((self.index, None))

    def send(self, job: Message) -> None:
        """Send a job."""
        assert self.process.stdin is not None
        # A process that has ended cannot read it; the thread reports its end.
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Send no more jobs: the process ends, with a checkpoint of its present job."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def exit_code(self) -> str:
        """How the process ended."""
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"code {code}"

    def stop(self) -> None:
        """Ask the process to end, and wait until it has written its checkpoint."""
        self.close()
        self.process.wait()
        self.thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _parse(line: str) -> Message | None:
    """The message in a line of a worker's standard output; None for a line of another writer."""
    try:
        message = json.loads(line)
    except json.JSONDecodeError:
        return None
    return message if isinstance(message, dict) and message.keys() & KINDS else None


def main(descriptor: int) -> None:
    """The program of a worker: train the jobs from standard input, and write messages to the file descriptor."""
    import torch

    torch.set_num_threads(1)
    keep_freed_memory()

    def send(message: Message) -> None:
        # If the parent has ended, nobody reads this, and the run must still reach its checkpoint. Opened for each message:
        # what could not be written is not written again with the next.
        with suppress(BrokenPipeError), open(descriptor, "w", encoding="utf-8", closefd=False) as parent:
            parent.write(json.dumps(message) + "\n")

    jobs: queue.Queue[Message | None] = queue.Queue()
    training, closed = threading.Event(), threading.Event()
    threading.Thread(target=_read_jobs, args=(jobs, training, closed), daemon=True).start()
    signal.signal(signal.SIGTERM, _on_sigterm)
    while (job := jobs.get()) is not None:
        training.set()
        if closed.is_set():
            break
        try:
            _train(job, send)
            send({"done": True})
        except Stopped as stopped:
            sys.exit(128 + stopped.signal)
        except torch.AcceleratorError as error:  # nothing runs on the GPU in this process any more; another takes over
            sys.exit(f"unfading: {str(error).splitlines()[0]}")
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            send({"error": str(error)})
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # others share the GPU
        training.clear()


def _train(job: Message, send: Callable[[Message], None]) -> None:
    """Train a job. A progress message starts with the position of its run in the job."""
    from unfading.training.loop import train_pass

    code = {place: UserCode.from_json(values) for place, values in job.get("code", {}).items()}
    runs = [Run.from_json(run, code) for run in job["runs"]]
    positions = {run.key: position for position, run in enumerate(runs)}

    def listen(update: ProgressUpdate) -> None:
        send({"progress": [positions[update.run.key], *update[1:]]})

    train_pass(runs, TrainOptions.from_json(job["options"], listen=listen, say=lambda text: send({"say": text})))


def _on_sigterm(number: int, frame: Any) -> None:
    """End the process between jobs; during one, which has been asked to stop, let it reach its checkpoint.

    Whoever ends a whole group of processes signals the worker, and so does its parent, in either order.
    """
    if not noted():
        sys.exit(128 + number)


def _read_jobs(jobs: "queue.Queue[Message | None]", training: threading.Event, closed: threading.Event) -> None:
    """Pass jobs on. When the parent closes the pipe, or ends, the present job is asked to stop."""
    for line in sys.stdin:
        jobs.put(json.loads(line))
    jobs.put(None)
    closed.set()
    if training.is_set():
        os.kill(os.getpid(), signal.SIGTERM)

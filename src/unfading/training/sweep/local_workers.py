"""Worker processes on this machine. They take their trials from the storage; one that is killed is replaced.

A worker stops with its parent: it reads its standard input, which ends when the parent does.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from unfading.training.stopping import Stopped, asked_to_stop
from unfading.training.sweep.work import WorkOptions, work

# A worker can import what its parent can import.
START = "import sys; sys.path[:] = sys.argv[1:]; from unfading.training.sweep.local_workers import main; main()"
ASK_EVERY = 0.2  # seconds between two looks at the processes


class LocalWorkers:
    """Processes that work on the trials of a storage.

    Args:
        options: how they work.
        count: number of processes. Each has one of the GPUs that are visible here, in turn.
        say: called with messages for the user.
    """

    def __init__(self, options: WorkOptions, count: int, say: Callable[[str], None]):
        self.options = options
        self.say = say
        self.processes = [self._start(i) for i in range(count)]
        self.failed: set[int] = set()

    def _start(self, index: int) -> "subprocess.Popen[str]":
        # A session of its own: Ctrl-C reaches only the parent, which then asks its workers to stop.
        process = subprocess.Popen(
            [sys.executable, "-c", START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=2,  # the descriptor: sys.stderr of a notebook has none
            text=True,
            start_new_session=True,
            env={**os.environ, **_one_gpu(index)},
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(self.options.to_json()) + "\n")  # not an argument: it may hold a password
            process.stdin.flush()
        return process

    def working(self) -> bool:
        """Whether a worker is at work. One that was killed is replaced; one that met an error has reported it."""
        for i, process in enumerate(self.processes):
            code = process.poll()
            if code is not None and code < 0:
                self.say(f"worker {i} ended with signal {-code}; another takes its place")
                self._close(process)
                self.processes[i] = self._start(i)
            elif code:
                self.failed.add(i)
        return any(process.poll() is None for process in self.processes)

    def stop(self) -> None:
        """Ask all workers to stop, and wait until they have written their checkpoints."""
        for process in self.processes:
            self._close(process)
        for process in self.processes:
            process.wait()

    @staticmethod
    def _close(process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()


def work_in_processes(options: WorkOptions, count: int, say: Callable[[str], None]) -> None:
    """Let `count` processes work until all trials have finished. Ctrl-C and SIGTERM stop them, each with a checkpoint."""
    workers = LocalWorkers(options, count, say)
    try:
        with asked_to_stop() as asked:
            while workers.working() and asked() is None:
                time.sleep(ASK_EVERY)
            number = asked()
    finally:
        workers.stop()
    if number is not None:
        raise Stopped(number, None)
    if len(workers.failed) == count:
        raise ValueError(f"{'the worker' if count == 1 else f'all {count} workers'} ended with an error, which stands above.")


def main() -> None:
    """The program of a worker: options on the first line of its standard input, whose end asks it to stop."""
    import torch

    torch.set_num_threads(1)
    options = WorkOptions.from_json(json.loads(sys.stdin.readline()))
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        work(options, _silent if options.quiet else _say)
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        _say(f"unfading: a worker ended: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        sys.exit(2)


def _stop_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _say(sentence: str) -> None:
    print(sentence, flush=True)


def _silent(sentence: str) -> None:
    """Say nothing."""


def _one_gpu(index: int) -> dict[str, str]:
    """The variable that shows a process one of several GPUs."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else list(map(str, range(torch.cuda.device_count())))
    return {"CUDA_VISIBLE_DEVICES": names[index % len(names)]} if len(names) > 1 else {}

"""Two processes that train together, as torchrun starts them, without the seconds that it takes."""

import os
import signal
import socket
from contextlib import suppress

import torch

from tests.helpers.trained import _processes as processes
from unfading import Run
from unfading.training import loop
from unfading.training.options import TrainOptions
from unfading.training.stepper import Stepper
from unfading.training.stopping import Stopped


def weights(runs, where, **options):
    """Train runs; their records, and the weights of the last step."""
    records, training = loop._train(runs, TrainOptions(where, **options), together=len(runs) > 1)
    return records, None if training is None else training.state.fleet.w.numpy().copy()


def _serve(rank, port, restarts, pipe):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    take, sent = Stepper.take, {}

    def take_or_signal(stepper, running):
        if stepper.state.step in sent:
            os.kill(os.getpid(), sent.pop(stepper.state.step))
        take(stepper, running)

    Stepper.take = take_or_signal
    while (job := pipe.recv()) is not None:
        fields, where, signals, options = job
        sent.clear()
        sent.update({step: number for process, step, number in signals if process == rank})
        try:
            pipe.send(weights([Run(**each) for each in fields[rank]], where / str(rank), say=str, **options))
        except Stopped as stopped:
            pipe.send((stopped.signal, stopped.step))
        except (ValueError, RuntimeError) as error:
            pipe.send(f"{type(error).__name__}: {error}")


class Pair:
    """Two processes. Each is given a folder of its own, so that a test can see which of them writes.

    Args:
        restarts: how often torchrun would have started them again.
    """

    def __init__(self, restarts=0):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(2):
            own, other = processes.Pipe()
            self.processes.append(processes.Process(target=_serve, args=(rank, port, restarts, other), daemon=True))
            self.processes[-1].start()
            other.close()
            self.pipes.append(own)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with suppress(BrokenPipeError):  # a process that was killed
                pipe.send(None)
            pipe.close()
            process.join(30)
            process.kill()

    def train(self, *runs, signals=(), **options):
        """What each process returns; None for one that was killed. Runs given as a list are those of each process.

        Args:
            signals: (process, step, signal) that it sends to itself before a step.
        """
        where = options.pop("where")
        each = runs if isinstance(runs[0], list) else [runs, runs]
        given = [[run.to_json() for run in own] for own in each]
        for pipe in self.pipes:
            pipe.send((given, where, signals, options))
        return [self._answer(pipe) for pipe in self.pipes]

    def _answer(self, pipe):
        assert pipe.poll(60), "a process waits for the other"
        try:
            return pipe.recv()
        except EOFError:
            return None


KILL, STOP = signal.SIGKILL, signal.SIGTERM

"""Small sweeps, their storages, and workers in processes that can be killed."""

import itertools
import json
import os
import signal
import sys
from contextlib import contextmanager

from tests.helpers import postgresql
from tests.helpers.trained import small
from unfading.training.sweep import work as working
from unfading.training.sweep.queue import create_queue
from unfading.training.sweep.storage import open_storage
from unfading.training.sweep.sweep import Sweep
from unfading.training.sweep.work import WorkOptions, work

STORAGES = ("journal", "sqlite", "postgresql")


@contextmanager
def address(kind, folder):
    """The address of an empty storage."""
    if kind == "postgresql":
        with postgresql.server() as url:
            yield url
    else:
        yield f"journal:{folder / 'sweep.log'}" if kind == "journal" else f"sqlite:///{folder / 'sweep.db'}"


def sweep(**options):
    """A sweep over tiny runs."""
    return Sweep(small(steps=16, valid_every=4), ("rate=1e-4..1e-1:log", "hidden=2,3,4"), **options)


def queue(storage, trials, name="tiny", lease=2.0, **options):
    """A queue of tiny trials."""
    opened = create_queue(open_storage(storage), name, sweep(**options).to_json(), maximise=False, lease=lease)
    opened.fill(trials)
    return opened


class Worker:
    """A worker in a fork of this process, which has imported torch already. It notes which trials it has finished."""

    names = itertools.count()

    def __init__(self, options: WorkOptions, folder):
        self.log = folder / f"worker-{next(self.names)}.jsonl"
        self.code = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._note_what_is_finished()
            work(options, lambda sentence: None)
            code = 0
        except BaseException as error:
            print(f"worker {os.getpid()}: {type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
        finally:
            os._exit(code)

    def _note_what_is_finished(self):
        class Noted(working.TakenTrial):
            def finish(taken, state, value, result):
                stored = super().finish(state, value, result)
                with open(self.log, "a") as log:
                    log.write(json.dumps([taken.number, stored, taken.stored().params]) + "\n")
                return stored

        sys.modules["unfading.training.sweep.queue"].TakenTrial = Noted

    def kill(self, number=signal.SIGKILL):
        if self.code is None:
            os.kill(self.pid, number)

    def end(self):
        """Wait for the end of the process; its exit code."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

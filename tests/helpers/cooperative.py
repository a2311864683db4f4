"""Run a cooperative kernel under Triton's interpreter, which runs the programs of a grid one after the other.

Each program runs in a thread of its own. One of them runs at a time, until it ends or looks at the counter of a barrier.
"""

import functools
import inspect
import threading
from contextlib import contextmanager
from itertools import product
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class Programs:
    """The programs of one launch."""

    def __init__(self, fn: Any, arguments: dict[str, Any], grid: tuple[int, int, int]):
        self.fn, self.arguments = fn, arguments
        self.places = list(product(*map(range, grid)))
        self.turns = [threading.Semaphore(0) for _ in self.places]
        self.ended = [False] * len(self.places)
        self.errors: list[BaseException] = []
        self.all_ended = threading.Event()
        self.current = 0

    def run(self) -> None:
        threads = [threading.Thread(target=self._program, args=(k,), daemon=True) for k in range(len(self.places))]
        for thread in threads:
            thread.start()
        self._go_to(0)
        self.all_ended.wait()
        if self.errors:
            raise self.errors[0]

    def pause(self) -> None:
        """Let the next program run until it pauses or ends."""
        own = self.current
        self._go_to(self._next())
        self.turns[own].acquire()

    def _program(self, k: int) -> None:
        self.turns[k].acquire()
        try:
            self.fn(**self.arguments)
        except BaseException as error:
            self.errors.append(error)
        self.ended[k] = True
        if all(self.ended) or self.errors:
            self.all_ended.set()
        else:
            self._go_to(self._next())

    def _next(self) -> int:
        n = len(self.places)
        return next(k % n for k in range(self.current + 1, self.current + 1 + n) if not self.ended[k % n])

    def _go_to(self, k: int) -> None:
        self.current = k
        interpreter.interpreter_builder.set_grid_idx(*self.places[k])
        self.turns[k].release()


@contextmanager
def cooperative(module: Any):
    """Run the kernels of a module of divided loops with all their programs at the same time."""
    names = module.wait.fn.__globals__
    peek, running = names["peek"], []

    def look(counter: Any) -> Any:
        running[-1].pause()
        return tl.load(counter)

    names["peek"] = look
    call = interpreter.GridExecutor.__call__

    def call_all(self: Any, *arguments: Any, **options: Any) -> Any:
        fn = self.fn
        if fn.__globals__ is not names:
            return call(self, *arguments, **options)

        @functools.wraps(fn)
        def once(**given: Any) -> None:
            if interpreter.interpreter_builder.grid_idx == (0, 0, 0):
                running.append(Programs(fn, given, interpreter.interpreter_builder.grid_dim))
                running[-1].run()
                running.pop()
                interpreter.interpreter_builder.grid_idx = None

        once.__signature__ = inspect.signature(fn)
        self.fn = once
        return call(self, *arguments, **options)

    interpreter.GridExecutor.__call__ = call_all
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = call
        names["peek"] = peek

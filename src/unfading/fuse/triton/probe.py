"""Test once, on the shortest sequence, whether the kernels of a cell run on a GPU, before any sequence of the user is passed to
them.

They are tested for each number of rows, since the settings depend on it, and only those that a call needs, since each takes
seconds to compile. Settings with which a kernel does not compile, does not fit or cannot be launched are not used again, and
the next best are tried.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from unfading.cells.base import Cell
from unfading.errors import FasterAsGraphs, NoKernel
from unfading.fuse.ir.program import InputKind
from unfading.fuse.plan import Plan, autocast_precision, float32_dots, plan_or_raise, triton_kernel
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton.kernel import TritonKernel
from unfading.fuse.triton.launch_settings import LaunchSettings
from unfading.fuse.triton.search import Choice, remember, store, tuned
from unfading.loop_options import LoopOptions
from unfading.source_lines import first_line


class Tests:
    """What was tested of a kernel on one device and in one precision."""

    def __init__(self) -> None:
        # For a number of rows, without or with gradients, why the kernel does not run; None where it does.
        self.reasons: dict[tuple[int, bool], str | None] = {}
        self.passed: set[tuple[str, LaunchSettings | None]] = set()  # settings with which a loop runs


_tests: "WeakKeyDictionary[TritonKernel, dict[tuple[torch.device, str], Tests]]" = WeakKeyDictionary()


def triton_trouble(cell_plan: Plan, cell: Cell, batch: int, *, or_graphs: bool = False) -> str | None:
    """The reason why the kernel of a plan does not run on the cell's device with a number of rows; None where it does.

    Args:
        or_graphs: whether it is a reason that CUDA graphs of the reference loop take less time.
    """
    kernel, batch = triton_kernel(cell_plan.key), max(batch, 1)
    device = _device(cell)
    dots = autocast_precision(device.type) or float32_dots(device)
    if device.type != "cuda":  # Triton's interpreter runs every kernel
        return None if kernel.fits(dots, (1, batch), device) else kernel.unfit(dots, device)
    by_device = _tests.setdefault(kernel, {})
    tests = by_device.get((device, dots))
    if tests is None:
        tests = by_device[device, dots] = Tests()
        remember(kernel, dots, device)
    keep = torch.is_grad_enabled()
    if or_graphs:
        slower = kernel.slower_than_graphs(dots, (1, batch), device, keep=keep)
        if slower is not None:
            return FasterAsGraphs(slower)
    if (batch, keep) not in tests.reasons:
        if torch.cuda.is_current_stream_capturing():  # nothing can be tested now
            return None if kernel.fits(dots, (1, batch), device) else kernel.unfit(dots, device)
        loops = ("train", "back") if keep else ("infer",)
        tests.reasons[batch, keep] = _trouble(kernel, cell_plan, device, LoopOptions(dots=dots), batch, tests.passed, loops)
    return tests.reasons[batch, keep]


def _device(cell: Cell) -> torch.device:
    # Most cells have a parameter of their own. `cell.parameters()` walks over all modules, which takes microseconds.
    first = next((parameter for parameter in cell._parameters.values() if parameter is not None), None)
    first = next(cell.parameters(), None) if first is None else first
    return cell.initial_state(1)[0].device if first is None else first.device


def _trouble(
    kernel: TritonKernel,
    cell_plan: Plan,
    device: torch.device,
    options: LoopOptions,
    batch: int,
    passed: set[tuple[str, LaunchSettings | None]],
    loops: Iterable[str],
) -> str | None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is too old: the kernels need compute capability 8.0 or higher"
    with temporarily_clear_interpreter_stack(), torch.inference_mode(False), torch.no_grad():
        trial = Trial(kernel, cell_plan, device, options, T=1, B=batch)
        settings = {name: kernel.setting(name, options.dots, (1, batch), device) for name in loops}
        untested = [name for name, setting in settings.items() if (name, setting) not in passed]
        if device.type == "cuda" and len(untested) > 1:
            # Compiled side by side, each in a thread. What they share is built before.
            for setting in filter(None, settings.values()):
                kernel.split_of(setting)
            trial.set_blank()
            stream = torch.cuda.current_stream(device)

            def test(name: str) -> str | None:
                with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
                    return _trouble_of(name, trial, options, batch, passed)

            return side_by_side(test, untested)
        return next(filter(None, (_trouble_of(name, trial, options, batch, passed) for name in untested)), None)


def side_by_side(test: Callable[[str], str | None], names: Sequence[str]) -> str | None:
    """Test all loops at the same time; the first reason why one of them does not run."""
    with ThreadPoolExecutor(len(names)) as threads:
        return next(filter(None, [*threads.map(test, names)]), None)


def _trouble_of(
    name: str, trial: "Trial", options: LoopOptions, batch: int, passed: set[tuple[str, LaunchSettings | None]]
) -> str | None:
    """The reason why a loop runs with no settings; None where it does with some."""
    kernel, device, reason = trial.kernel, trial.device, None
    while (name, setting := kernel.setting(name, options.dots, (1, batch), device)) not in passed:
        if setting is None:
            return reason or kernel.unfit(options.dots, device)
        try:
            trial.run(name)
            trial.wait()
        except torch.cuda.OutOfMemoryError:
            raise
        except NoKernel as error:
            return str(error)
        except Exception as error:  # Triton and the driver have many types
            reason = f"the kernel does not run on {device}: {type(error).__name__}: {first_line(error)}"
            kernel.exclude(name, options.dots, device, setting, error)
        else:
            passed.add((name, setting))
    return None


class Trial:
    """Runs the loops of a kernel over B rows of T zeros, with the gradients that a first layer needs."""

    def __init__(self, kernel: TritonKernel, cell_plan: Plan, device: torch.device, options: LoopOptions, *, T: int, B: int):
        signature, sizes = (
            cell_plan.signature,
            {InputKind.SEQUENCE: (T, B), InputKind.SHARED: (T, 1), InputKind.CONSTANT: (1, B)},
        )

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=device)

        inputs = [zeros(1, *sizes[kind], n) for kind, n in zip(signature.kinds, signature.inputs, strict=True)]
        states = [zeros(1, B, n) for n in signature.states]
        weights = [zeros(1, *shape) for shape in signature.weights]
        self.kernel, self.options, self.arguments, self.device = kernel, options, (inputs, states, weights), device
        self.wanted = [True] * (len(inputs) + len(states) + len(weights))
        self.wanted[0] = not cell_plan.with_project
        self.trajectory: list[torch.Tensor] = []
        self.saved: torch.Tensor | None = None
        self.steps = T

    def set_blank(self) -> None:
        """Let the backward loop run on zeros, without a forward loop before it."""
        like = self.arguments[1][0]
        B, kernel, T = like.shape[-2], self.kernel, self.steps
        self.trajectory = [like.new_zeros((1, T, B, n)) for n in kernel.states]
        self.saved = like.new_zeros((1, T, B, kernel.saved)) if kernel.saved else None

    def run(self, name: str) -> None:
        """Run a loop by name."""
        if name == "infer":
            self.kernel.forward(*self.arguments, self.options, keep=False)
        elif name == "train":
            self.trajectory, _, self.saved = self.kernel.forward(*self.arguments, self.options, keep=True)
        else:
            if not self.trajectory:
                self.run("train")
            nothing: list[torch.Tensor | None] = [None] * len(self.arguments[1])
            arriving = ([self.trajectory[0], *nothing[1:]], nothing)
            self.kernel.backward(arriving, self.arguments, (self.trajectory, self.saved), self.options, self.wanted)

    def wait(self) -> None:
        """Until the loops have run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def remember_graphs(cell: Cell, B: int, *, keep: bool, faster: bool) -> None:
    """Store whether CUDA graphs of the reference loop are faster than the kernels of a cell, in the present precision."""
    kernel, device = triton_kernel(plan_or_raise(cell).key), next(cell.parameters()).device
    dots = autocast_precision(device.type) or float32_dots(device)
    kernel.set_graphs(dots, (1, B), device, keep=keep, faster=faster)
    store(kernel, dots, device)


def tune_cell(cell: Cell, *, T: int, B: int) -> list[Choice]:
    """Search for the fastest settings of a cell's loops, in the present precision, and store them."""
    cell_plan = plan_or_raise(cell)
    reason = triton_trouble(cell_plan, cell, B)
    if reason is not None:
        raise NotFusable(reason)
    kernel, device = triton_kernel(cell_plan.key), next(cell.parameters()).device
    options = LoopOptions(dots=autocast_precision(device.type) or float32_dots(device))
    trial = Trial(kernel, cell_plan, device, options, T=T, B=B)
    with torch.no_grad():
        return tuned(kernel, options.dots, trial.run, (1, B), device)

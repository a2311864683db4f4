"""Measure how good the choice of a loop on a GPU is: `python benchmarks/loop_choice.py --cells LSTM GRU --sizes 96 200 1024`.

For every cell, size and batch, it times the settings of both loops with the least estimated times, all units in a program among
them, and CUDA graphs of the reference loop. A line has the time of a step, forward and backward in tf32, of the loop that
"auto" takes and of the fastest one. Processes compile side by side, and take turns on the GPU. Gradients of weights, which are
products after the loop and equal for all kernels, are not counted.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_UN, flock
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import unfading
from unfading import catalogue
from unfading.fuse.plan import plan_or_raise, triton_kernel
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton.kernel import TritonKernel, gpu
from unfading.fuse.triton.launch_settings import Candidate
from unfading.fuse.triton.probe import Trial
from unfading.loop_options import LoopOptions

STEPS = 64  # two recordings of a CUDA graph
LOCK = Path(tempfile.gettempdir()) / "unfading-loop-choice.lock"


class Case(NamedTuple):
    cell: str
    hidden_size: int
    batch: int


@contextmanager
def one_process() -> Iterator[None]:
    """A block in which no other process of this benchmark measures."""
    with LOCK.open("w") as file:
        flock(file, LOCK_EX)
        yield
        torch.cuda.synchronize()
        flock(file, LOCK_UN)


def microseconds(run: Callable[[], None]) -> float:
    """The least time of a step over some runs, after one that has compiled."""
    times = []
    with one_process():
        for _ in range(5):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
    return 1e3 * min(times) / STEPS


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """The same, replayed from a CUDA graph, so that the time of the host does not count."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    return graph.replay


def worth_timing(every: list[Candidate], most: int) -> list[Candidate]:
    """The settings with the least estimates, and the first with all units in a program."""
    whole = [candidate for candidate in every if candidate.setting.units is None][:1]
    return [*every[:most], *(candidate for candidate in whole if candidate not in every[:most])]


def time_loop(kernel: TritonKernel, trial: Callable[[int], Trial], loop: str, batch: int, most: int) -> list[float]:
    """The time of a loop with each of its settings that run, that of the estimated best first."""
    device, times = torch.device("cuda", 0), []
    for candidate in worth_timing(kernel.candidates(loop, "tf32", (1, batch), gpu(device)), most):
        kernel.set(loop, "tf32", (1, batch), device, candidate.setting)
        with torch.no_grad():
            trial(1).run(loop)
            if kernel.setting(loop, "tf32", (1, batch), device) == candidate.setting:  # else it does not fit
                times.append(microseconds(captured(partial(trial(STEPS).run, loop))))
    return times


def measure(case: Case, most: int) -> dict[str, Any]:
    """The times of a case: of every setting of both loops, and of graphs."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    layer = getattr(unfading, case.cell)(1, case.hidden_size).cuda()
    result: dict[str, Any] = {**case._asdict(), "graph": graphs(layer, case.batch), "train": [], "back": []}
    try:
        cell_plan = plan_or_raise(layer.cells[0])
        kernel = triton_kernel(cell_plan.key)
    except NotFusable as error:
        return {**result, "refused": str(error)}
    device = torch.device("cuda", 0)
    graphs_chosen = kernel.slower_than_graphs("tf32", (1, case.batch), device, keep=True) is not None
    setattr(kernel, "weight_gradients", lambda weights, *rest: [None] * len(weights))  # noqa: B010

    def trial(steps: int) -> Trial:
        return Trial(kernel, cell_plan, device, LoopOptions(dots="tf32"), T=steps, B=case.batch)

    for loop in ("train", "back"):
        result[loop] = time_loop(kernel, trial, loop, case.batch, most)
    if result["train"] and result["back"]:
        chosen = result["graph"] if graphs_chosen else result["train"][0] + result["back"][0]
        best = min(result["graph"], min(result["train"]) + min(result["back"]))
        result |= {"chosen": chosen, "best": best, "ratio": chosen / best, "graphs_chosen": graphs_chosen}
    return result


def graphs(layer: Any, batch: int) -> float:
    """The time of a step by CUDA graphs of the reference loop."""
    x = torch.randn(STEPS, batch, 1, device="cuda")
    with unfading.use_backend("graph"):
        output, _ = layer(x)
        gradient = torch.randn_like(output)
        output.backward(gradient)
        torch.cuda.synchronize()
        return microseconds(lambda: layer(x)[0].backward(gradient))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=[cell.__name__.removesuffix("Cell") for cell in catalogue.cells()])
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 96, 128, 200, 256, 300, 512, 1024])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 128, 1000])
    parser.add_argument("--settings", type=int, default=3, help="how many settings of a loop are timed (3)")
    parser.add_argument("--sample", type=int, help="how many of the cases, chosen at random, are measured (all of them)")
    parser.add_argument("--processes", type=int, default=14)
    arguments = parser.parse_args()
    cases = [Case(cell, size, batch) for cell in arguments.cells for size in arguments.sizes for batch in arguments.batches]
    if arguments.sample is not None:
        cases = random.Random(0).sample(cases, min(arguments.sample, len(cases)))
    ratios = []
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(measure, case, arguments.settings): case for case in cases}
        for future in as_completed(futures):
            error = future.exception()
            line = {**futures[future]._asdict(), "error": str(error)} if error is not None else future.result()
            print(json.dumps(line), flush=True)
            ratios += [line["ratio"]] if "ratio" in line else []
    if ratios:
        print(f"chosen / best: median {median(ratios):.3f}, largest {max(ratios):.3f}, of {len(ratios)} cases")


if __name__ == "__main__":
    main()

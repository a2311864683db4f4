"""`unfading bench`: time cells on this machine."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from unfading.errors import check_count


def bench(
    cells: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = (),
    all: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: Annotated[tuple[int, ...], arg(metavar="N ...")] = (1,),
    rounds: Annotated[int | None, arg(help_behavior_hint="(default: 15 on a CPU, 50 on a GPU)")] = None,
    loops: bool = True,
    json: bool = False,
    save: Path | None = None,
    figure: Path | None = None,
) -> None:
    """Time cells beside the reference loop, the nearest torch.nn layer and their own matrix products.

    A cell whose results differ from the reference is not timed, and the exit code is then 1. On a GPU the comparison is with
    cuDNN, the reference loop, its CUDA graph, and the kernels of FlashRNN and TorchRL if they are installed.

    Args:
        cells: Cells to time, by name (`unfading cells list`). Without any, a few well-known ones.
        all: Time every cell at all sizes that `benchmarks/bars.py` compares; 20 to 30 minutes.
        device: Device to measure. A GPU takes several minutes, mostly for compiling and for the reference loop.
        threads: Numbers of torch threads, one after the other. On several threads, cases whose control deviates by more than
            10 % are left out.
        rounds: Largest number of rounds per case. Slow cases get fewer.
        loops: Also time the reference loop, and on a GPU its CUDA graphs, which takes most of the time.
        json: Print JSON lines instead of tables.
        save: File to append JSON lines to, or a folder for cpu-MACHINE.jsonl or cuda-MACHINE.jsonl.
        figure: SVG file for a bar chart of the results on a CPU.
    """
    from unfading.bench import session

    for count in threads or (0,):
        check_count("--threads", count)
    if rounds is not None:
        check_count("--rounds", rounds)
    command = shlex.join(["unfading", *sys.argv[1:]])
    if device == "cpu":
        sys.exit(session.on_cpu(cells, all, threads, rounds, loops=loops, json=json, save=save, figure=figure, command=command))
    if threads != (1,) or figure is not None:
        raise ValueError("--threads and --figure are for --device cpu; leave them out with --device cuda.")
    sys.exit(session.on_gpu(cells, all, rounds, loops=loops, json=json, save=save, command=command))

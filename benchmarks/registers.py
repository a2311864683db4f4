"""Compile the loops of cells for an H200, without a GPU: `python benchmarks/registers.py --cells STAR NRU --sizes 64 128`.

A line has the settings that a loop would run with, the seconds of compilation, and what ptxas reports: registers of a thread,
and bytes that do not fit into them. A loop that stores many bytes outside its registers is slow, whatever its estimate says.
Needs Triton and its own ptxas, and no driver.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import unfading
from unfading import catalogue
from unfading.fuse.plan import interpreted, plan_or_raise, triton_kernel
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton import kernel as kernels
from unfading.fuse.triton.launch import Launcher, lines
from unfading.fuse.triton.launch_settings import H200
from unfading.fuse.triton.probe import Trial
from unfading.loop_options import LoopOptions

TARGET = GPUTarget("cuda", 90, 32)
ASSEMBLERS = sorted(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*"), reverse=True)


class NoDriver:
    """What Triton asks of a driver when it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0


def assemble(ptx: str) -> dict[str, Any]:
    """Registers and spilled bytes of a kernel. Triton has two versions of ptxas; the newer one is tried first."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        for assembler in ASSEMBLERS:
            command = [str(assembler), "-v", "--gpu-name=sm_90a", str(path), "-o", os.devnull]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                spilled = re.search(r"(\d+) bytes spill stores", done.stderr)
                registers = re.search(r"Used (\d+) registers", done.stderr)
                return {"registers": int(registers[1]) if registers else None, "spilled": int(spilled[1]) if spilled else None}
    raise RuntimeError(f"no ptxas assembles the kernel: {done.stderr.strip()}")


def compile_instead(lines_printed: list[dict[str, Any]]) -> None:
    """Let launches compile their kernel, and write down what it needs."""

    def launch(self: Launcher, function: Any, tensors: Any, grid: Any, further: Any, constants: Any, warps: int, models: bool,
               *, cooperative: bool = False) -> None:  # fmt: skip
        arguments: list[Any] = []
        apart = []
        first, last = len(function.pointers), len(tensors) - 1
        for k, tensor in enumerate(tensors):
            row = 1
            if tensor is not None and k < last:
                row = tensor.stride(-2) if k >= first else lines(tensor, models)[2]
            arguments += (tensor, 0)
            apart.append(row)
        options = {"launch_cooperative_grid": True} if cooperative else {}
        began = time.perf_counter()
        compiled = getattr(self.module, function.name).warmup(
            *arguments, *further, *apart[:-1], *constants, grid=grid, num_warps=warps, num_stages=1, **options
        )
        seconds = round(time.perf_counter() - began, 1)
        asm = compiled.asm["ptx"]
        lines_printed.append({"seconds": seconds, "kilobytes": len(asm) // 1000, **assemble(asm)})

    Launcher.launch = launch  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=[cell.__name__.removesuffix("Cell") for cell in catalogue.cells()])
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--batches", nargs="+", type=int, default=[128])
    parser.add_argument("--options", default="{}", help='of the cells, as JSON: {"inner_steps": 5}')
    arguments = parser.parse_args()
    driver.set_active(NoDriver())
    setattr(kernels, "gpu", lambda device: H200)  # noqa: B010
    compiled: list[dict[str, Any]] = []
    compile_instead(compiled)
    for cell in arguments.cells:
        for size in arguments.sizes:
            for batch in arguments.batches:
                try:
                    with interpreted():  # the plan of a GPU
                        cell_plan = plan_or_raise(getattr(unfading, cell)(1, size, **json.loads(arguments.options)).cells[0])
                    kernel = triton_kernel(cell_plan.key)
                except (NotFusable, ValueError) as error:
                    print(json.dumps({"cell": cell, "hidden_size": size, "refused": str(error)}), flush=True)
                    continue
                trial = Trial(kernel, cell_plan, torch.device("cpu"), LoopOptions(dots="tf32"), T=1, B=batch)
                trial.set_blank()
                for loop in ("train", "back"):
                    best = kernel.candidates(loop, "tf32", (1, batch), H200)[0]
                    trial.run(loop)
                    line = {"cell": cell, "hidden_size": size, "batch": batch, "loop": loop, **compiled[-1]}
                    print(json.dumps({**line, "estimate": round(best.microseconds, 2), "settings": best.setting}), flush=True)


if __name__ == "__main__":
    main()

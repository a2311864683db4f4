"""Time exported C, and measure the code of every cell on a Cortex-M4: `python benchmarks/edge.py [--cells ...]`.

    push    one sample through `model_push`, compiled with -O3 by each compiler, against `layer.stream().push`, in one process
            and in turns, one thread; the outputs are compared first
    code    bytes of machine code with -Os, without weights, in each precision; needs arm-none-eabi-gcc

Prints one JSON line for each.
"""

import argparse
import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unfading
from unfading import catalogue
from unfading.export import c as export_c
from unfading.export.cortex_m import GCC, compiled, missing
from unfading.machine import about

INPUTS, UNITS = 8, 128
PUSHES, TURNS = 200, 40
DRIVER = """\
#include "model.h"
void run(model_state *s, const float *x, float *y, int n)
{
  for (int i = 0; i < n; i++)
    model_push(s, x + i * MODEL_INPUTS, y + i * MODEL_OUTPUTS);
}
"""


def layer_of(name: str, units: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(unfading, name)(INPUTS, units, **options).eval()


def push(name: str, compiler: str, **options: Any) -> dict[str, Any]:
    """Microseconds of a push, as the median of turns."""
    layer, x = layer_of(name, UNITS, **options), torch.randn(PUSHES, 1, INPUTS)
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        folder = Path(temporary) / "c"
        source = export_c(layer, folder)
        (folder / "driver.c").write_text(DRIVER)
        library = folder / "model.so"
        subprocess.run(
            [compiler, "-O3", "-shared", "-fPIC", "-o", library, folder / "model.c", folder / "driver.c"], check=True
        )
        model = ctypes.CDLL(str(library))
        state = ctypes.create_string_buffer(source.state)
        samples, outputs = np.ascontiguousarray(x[:, 0].numpy()), np.empty((PUSHES, UNITS), np.float32)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (samples, outputs)]
        stream, c_times, stream_times = layer.stream(), [], []
        for turn in range(TURNS):
            model.model_reset(state)
            start = time.perf_counter()
            model.run(state, *pointers, PUSHES)
            c_times.append(time.perf_counter() - start)
            stream = layer.stream()
            start = time.perf_counter()
            results = [stream.push(sample) for sample in x]
            stream_times.append(time.perf_counter() - start)
            if turn == 0:
                want = torch.stack([torch.as_tensor(result).reshape(-1) for result in results]).numpy()
                error = np.abs(outputs - want).max() / np.abs(want).max()
                if not error < 1e-4:
                    raise SystemExit(f"{name}: the C program differs from the stream by {error:.2g}; nothing is timed.")
    c_time, stream_time = (1e6 * float(np.median(times)) / PUSHES for times in (c_times, stream_times))
    row = {"kind": "push", "cell": name, "options": options, "units": UNITS, "inputs": INPUTS, "compiler": compiler}
    return {**row, "c_us": round(c_time, 2), "stream_us": round(stream_time, 2), "ratio": round(stream_time / c_time, 1)}


def code(name: str) -> dict[str, Any]:
    """Bytes of code in each precision, or why there is none."""
    row: dict[str, Any] = {"kind": "code", "cell": name}
    for precision in ("float32", "int8", "integer"):
        with tempfile.TemporaryDirectory() as temporary:
            batches: Any = {"batches": [0.3 * torch.randn(16, 4, INPUTS)]} if precision == "integer" else {}
            try:
                export_c(layer_of(name, 64), Path(temporary) / "c", precision=precision, **batches)
                row[precision] = compiled(Path(temporary) / "c").code
            except ValueError as error:
                row[precision] = str(error)
    return row


def main() -> None:
    names = [cell.__name__.removesuffix("Cell") for cell in catalogue.cells()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=names, help="whose code is measured")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"kind": "about", **about("python " + " ".join(sys.argv))}))
    for compiler in filter(shutil.which, ("gcc", "clang")):
        print(json.dumps(push("STAR", compiler)), flush=True)
        print(json.dumps(push("IncrementalRNN", compiler, inner_steps=1)), flush=True)
    for name in [] if missing(GCC) else chosen.cells:
        print(json.dumps(code(name)), flush=True)


if __name__ == "__main__":
    main()

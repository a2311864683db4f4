"""The functions that exported C brings along, against float64, and at the ends of float32."""

import ctypes
import subprocess

import numpy as np
import torch

from tests.helpers.c_models import COMPILER, STRICT, needs_compiler
from unfading.export.c_float import FUNCTIONS, functions_of

pytestmark = needs_compiler

NAMES = [name for name in FUNCTIONS if name.endswith("_f") and name != "pow_f"]
HEAD = "#include <stddef.h>\n#include <stdint.h>\nvoid *memcpy(void *restrict, const void *restrict, size_t);\n"
ENDS = np.array([np.nan, np.inf, -np.inf, 0.0, 1e-40, 3e38, -3e38], np.float32)


def of_float64(name, x):
    return getattr(torch, name.removesuffix("_f"))(torch.from_numpy(x.astype(np.float64))).numpy()


def test_functions_are_accurate_to_a_millionth(tmp_path):
    calls = [*NAMES, "power"]
    body = ["static float power(float x) { return pow_f(x, 0.3f); }"]
    body += [
        f"void all_{n}(const float *x, float *y, int k) {{ for (int i = 0; i < k; i++) y[i] = {n}(x[i]); }}" for n in calls
    ]
    text = "\n".join(body)
    (tmp_path / "functions.c").write_text(f"{HEAD}{functions_of(text)}\n{text}\n")
    library = tmp_path / "functions.so"
    subprocess.run([COMPILER, *STRICT, "-O1", "-fPIC", "-shared", "-o", library, tmp_path / "functions.c"], check=True)
    functions = ctypes.CDLL(str(library))

    def call(name, x):
        y = np.empty_like(x)
        getattr(functions, f"all_{name}")(*(part.ctypes.data_as(ctypes.c_void_p) for part in (x, y)), len(x))
        return y

    numbers = np.random.RandomState(0)
    points = np.concatenate([numbers.randn(20000) * size for size in (1e-4, 0.1, 1, 5, 30)]).astype(np.float32)
    for name in NAMES:
        x = np.abs(points) if name in ("sqrt_f", "log_f", "log1p_f") else points
        want = of_float64(name, x)
        normal = (np.abs(want) > 1e-37) & (np.abs(want) < 3e38)
        assert np.max(np.abs(call(name, x) - want)[normal] / np.abs(want)[normal]) < 1e-6, name
        ends = ENDS if name not in ("sin_f", "cos_f") else ENDS[:5]  # they give NaN for numbers as large as that
        with np.errstate(over="ignore"):
            want = of_float64(name, ends).astype(np.float32)
        assert np.allclose(call(name, ends), want, rtol=1e-5, atol=1e-37, equal_nan=True), name
    x = np.abs(points)
    assert np.max(np.abs(call("power", x) / x.astype(np.float64) ** np.float64(np.float32(0.3)) - 1)) < 1e-6

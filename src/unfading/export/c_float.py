"""The float32 arithmetic of exported C, with weights in float32 or in int8 with one scale per matrix.

    W = scale * Q,  Q int8,  scale = max |W| / 127

The functions replace those of libm, which a small device may lack. Each has a relative error of about 1e-6 or less; sin and
cos for |x| up to 1e4. Those that gates use have no branches, which lets clang write vector instructions for them.
"""

import math
import re

import numpy as np

from unfading.export.arrays_of_c import Arrays
from unfading.export.c_stage import CTable
from unfading.export.int8 import block_entries, int8_of
from unfading.export.matrix_storage import SPARSE_LOOP, store
from unfading.export.stage import Stage
from unfading.fuse.ir.program import Op, Value

EXPRESSIONS: dict[Op, str] = {
    Op.NEG: "-{0}",
    Op.EXP: "exp_f({0})",
    Op.EXPM1: "expm1_f({0})",
    Op.LOG: "log_f({0})",
    Op.LOG1P: "log1p_f({0})",
    Op.TANH: "tanh_f({0})",
    Op.SIGMOID: "sigmoid_f({0})",
    Op.RELU: "({0} < 0.0f ? 0.0f : {0})",
    Op.ABS: "({0} < 0.0f ? -{0} : {0})",
    Op.SQRT: "sqrt_f({0})",
    Op.RECIP: "1.0f / {0}",
    Op.SIGN: "(float)(({0} > 0.0f) - ({0} < 0.0f))",
    Op.SIN: "sin_f({0})",
    Op.COS: "cos_f({0})",
    Op.ERF: "erf_f({0})",
    Op.POWER: "pow_f({0}, {attr})",
    Op.COPY: "{0}",
    Op.STOP: "{0}",
    Op.WITH_GRADIENT: "{0}",
    Op.ADD: "{0} + {1}",
    Op.SUB: "{0} - {1}",
    Op.MUL: "{0} * {1}",
    Op.DIV: "{0} / {1}",
    Op.MAX: "({0} > {1} || {0} != {0} ? {0} : {1})",
    Op.MIN: "({0} < {1} || {0} != {0} ? {0} : {1})",
    Op.GT: "(float)({0} > {1})",
    Op.GE: "(float)({0} >= {1})",
    Op.LT: "(float)({0} < {1})",
    Op.LE: "(float)({0} <= {1})",
    Op.EQ: "(float)({0} == {1})",
    Op.NE: "(float)({0} != {1})",
    Op.WHERE: "({0} != 0.0f ? {1} : {2})",
}

PRODUCT = """\
/* sum[j] = v[0] W[0][j] + v[1] W[1][j] + ...; added to what sum holds if `add`. */
static void product(const WEIGHT *restrict W, const float *restrict v, int length, SCALE_PARAMETER\
float *restrict sum, int width, int add)
{
  int i = 0;
  if (!add) {
    const float a = v[0]SCALED;
    for (int j = 0; j < width; j++)
      sum[j] = a * (float)W[j];
    W += width;
    i = 1;
  }
  for (; i + 4 <= length; i += 4, W += 4 * width) {
    const float a = v[i]SCALED, b = v[i + 1]SCALED, c = v[i + 2]SCALED, d = v[i + 3]SCALED;
    for (int j = 0; j < width; j++)
      sum[j] += a * (float)W[j] + b * (float)W[width + j] + c * (float)W[2 * width + j] + d * (float)W[3 * width + j];
  }
  for (; i < length; i++, W += width)
    for (int j = 0; j < width; j++)
      sum[j] += v[i]SCALED * (float)W[j];
}
"""

SPARSE_PRODUCT = """\
/* The same with a sparse matrix: its entries row by row, and in 4 bits how many zeros lie before each; 15 is zeros alone. */
static void sparse_product(const WEIGHT *restrict W, const uint8_t *restrict codes, int count, const float *restrict v,
                           int length, SCALE_PARAMETERfloat *restrict out, int width, int add)
""" + SPARSE_LOOP.replace("FINISH", "out[j] = (add ? out[j] : 0.0f) + sumSCALED;").replace("SUM", "float")

TRANSPOSED = """\
/* sum[j] = v[0] W[j][0] + v[1] W[j][1] + ...; added to what sum holds if `add`. */
static void product_transposed(const WEIGHT *restrict W, const float *restrict v, int length, SCALE_PARAMETER\
float *restrict sum, int width, int add)
{
  for (int j = 0; j < width; j++) {
    float total = 0.0f;
    for (int i = 0; i < length; i++)
      total += v[i] * (float)*W++;
    sum[j] = add ? sum[j] + totalSCALED : totalSCALED;
  }
}
"""

FUNCTIONS: dict[str, str] = {
    "from_bits": """\
static float from_bits(uint32_t bits)
{
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
""",
    "to_bits": """\
static uint32_t to_bits(float x)
{
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
""",
    "power_of_two": """\
/* 2^n for n from -126 to 127. */
static float power_of_two(int n)
{
  return from_bits((uint32_t)(n + 127) << 23);
}
""",
    "reduced": """\
/* x = n log 2 + r with |r| <= log 2 / 2; returns e^r - 1. */
static float reduced(float x, int *n)
{
  *n = (int)(x * 1.44269504f + (x < 0.0f ? -0.5f : 0.5f));
  const float r = x - (float)*n * 0.693145752f - (float)*n * 1.42860677e-6f;
  return r + r * r * (0.5f + r * (1.66666667e-1f + r * (4.16666667e-2f + r * (8.33333333e-3f + r * 1.38888889e-3f))));
}
""",
    "exp_f": """\
static float exp_f(float x)
{
  int n;
  const float y = x > -104.0f ? (x < 89.0f ? x : 89.0f) : -104.0f;
  const float p = 1.0f + reduced(y, &n);
  const float z = p * power_of_two(n / 2) * power_of_two(n - n / 2);
  return x == x ? z : x;
}
""",
    "expm1_core": """\
/* e^x - 1 for x from -80 to 80. */
static float expm1_core(float x)
{
  int n;
  const float p = reduced(x, &n), two = power_of_two(n);
  return two * p + (two - 1.0f);
}
""",
    "expm1_f": """\
static float expm1_f(float x)
{
  const float z = expm1_core(x > -20.0f ? (x < 80.0f ? x : 80.0f) : -20.0f);
  return x < 80.0f ? z : exp_f(x);
}
""",
    "tanh_f": """\
static float tanh_f(float x)
{
  const float e = expm1_core(x > -10.0f ? (x < 10.0f ? 2.0f * x : 20.0f) : -20.0f);
  const float t = e / (e + 2.0f);
  return x == x ? t : x;
}
""",
    "sigmoid_f": """\
static float sigmoid_f(float x)
{
  return 1.0f / (1.0f + exp_f(-x));
}
""",
    "log_f": """\
static float log_f(float x)
{
  int n = 0;
  if (x == 0.0f)
    return -from_bits(0x7f800000u);
  if (!(x > 0.0f) || x > 3.40282347e38f)
    return x > 0.0f ? x : from_bits(0x7fc00000u);
  if (x < 1.17549435e-38f) {
    x *= 8388608.0f;
    n = -23;
  }
  const uint32_t bits = to_bits(x) + 0x3f800000u - 0x3f3504f3u;
  n += (int)(bits >> 23) - 127;
  const float m = from_bits((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  const float s = m / (2.0f + m), z = s * s;
  const float p = z * (0.666666667f + z * (0.4f + z * (0.285714286f + z * 0.222222222f)));
  return (float)n * 0.693145752f + ((float)n * 1.42860677e-6f + (m - s * (m - p)));
}
""",
    "log1p_f": """\
static float log1p_f(float x)
{
  const float u = 1.0f + x;
  return u == 1.0f || u > 3.40282347e38f ? x : u <= 0.0f ? log_f(u) : log_f(u) * (x / (u - 1.0f));
}
""",
    "sqrt_f": """\
static float sqrt_f(float x)
{
  if (!(x > 0.0f) || x > 3.40282347e38f)
    return x < 0.0f ? from_bits(0x7fc00000u) : x;
  float scale = 1.0f;
  if (x < 1.17549435e-38f) {
    x *= 16777216.0f;
    scale = 2.44140625e-4f;
  }
  float y = from_bits((to_bits(x) >> 1) + 0x1fbd1df5u);
  for (int i = 0; i < 3; i++)
    y = 0.5f * (y + x / y);
  return scale * y;
}
""",
    "sin_f": """\
/* sin(x + quarters pi / 2). */
static float circular(float x, int quarters)
{
  if (!(x > -1e9f && x < 1e9f))
    return from_bits(0x7fc00000u);
  const int n = (int)(x * 0.636619772f + (x < 0.0f ? -0.5f : 0.5f));
  const float k = (float)n, r = ((x - k * 1.57031250f) - k * 4.83751297e-4f) - k * 7.54978942e-8f, z = r * r;
  const unsigned quarter = (unsigned)(n + quarters) & 3u;
  float y;
  if (quarter & 1u)
    y = 1.0f - z * (0.5f - z * (4.16666667e-2f - z * (1.38888889e-3f - z * 2.48015873e-5f)));
  else
    y = r - r * z * (1.66666667e-1f - z * (8.33333333e-3f - z * (1.98412698e-4f - z * 2.75573192e-6f)));
  return quarter & 2u ? -y : y;
}

static float sin_f(float x)
{
  return circular(x, 0);
}
""",
    "cos_f": """\
static float cos_f(float x)
{
  return circular(x, 1);
}
""",
    "erf_f": """\
static float erf_f(float x)
{
  const float a = x < 0.0f ? -x : x;
  float y = 1.0f;
  if (x != x)
    return x;
  if (a < 1.0f) {
    float term = a;
    y = a;
    for (int n = 1; n < 12; n++) {
      term *= -a * a / (float)n;
      y += term / (float)(2 * n + 1);
    }
    y *= 1.12837917f;
  } else if (a < 4.0f) {
    const float t = 1.0f / (1.0f + 0.3275911f * a);
    y -= t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f)))) * exp_f(-a * a);
  }
  return x < 0.0f ? -y : y;
}
""",
    "pow_f": """\
static float pow_f(float x, float c)
{
  const int whole = c > -2e9f && c < 2e9f && (float)(int)c == c;
  const float y = exp_f(c * log_f(x < 0.0f ? -x : x));
  if (x < 0.0f && !whole)
    return from_bits(0x7fc00000u);
  return x < 0.0f && ((int)c & 1) ? -y : y;
}
""",
}
# Functions that others call, each after those that it calls.
_NEEDED = {
    "power_of_two": ["from_bits"],
    "exp_f": ["reduced", "power_of_two"],
    "expm1_core": ["reduced", "power_of_two"],
    "expm1_f": ["expm1_core", "exp_f"],
    "tanh_f": ["expm1_core"],
    "sigmoid_f": ["exp_f"],
    "log_f": ["from_bits", "to_bits"],
    "log1p_f": ["log_f"],
    "sqrt_f": ["from_bits", "to_bits"],
    "sin_f": ["from_bits"],
    "cos_f": ["sin_f"],
    "erf_f": ["exp_f"],
    "pow_f": ["exp_f", "log_f", "from_bits"],
}


def functions_of(text: str) -> str:
    """The functions that a text calls, and those that these call."""
    names: dict[str, None] = {}

    def add(name: str) -> None:
        for other in _NEEDED.get(name, ()):
            add(other)
        names[name] = None

    for name in FUNCTIONS:
        if re.search(rf"\b{name}\(", text):
            add(name)
    return "\n".join(FUNCTIONS[name] for name in FUNCTIONS if name in names)


def literal(x: float) -> str:
    """A float32 as a C literal."""
    number = float(np.float32(x))
    if math.isnan(number):
        return "from_bits(0x7fc00000u)"
    if math.isinf(number):
        return "from_bits(0x7f800000u)" if number > 0 else "(-from_bits(0x7f800000u))"
    text = f"{number:.9g}"
    text += "f" if any(c in text for c in ".e") else ".0f"
    return text if number >= 0 and not text.startswith("-") else f"({text})"


class FloatArithmetic:
    """float32 arithmetic.

    Args:
        arrays: receives the arrays of weights.
        int8: store matrices, and tables of layers, in int8.
    """

    entry = "float"

    def __init__(self, arrays: Arrays, *, int8: bool):
        self.arrays, self.int8 = arrays, int8
        self.multiply_adds = 0  # of the products that were written

    def buffers(self, stage: Stage) -> list[str]:
        return []

    def parameters(self) -> list[str]:
        return []

    def number(self, value: Value) -> str:
        return literal(value.number) if value.op is Op.CONST else "0.0f"

    def vector(self, stage: Stage, index: int) -> str:
        return self.arrays.add(f"{stage.name}_w{index}", stage.weights[index], "float")

    def table(self, stage: Stage, index: int) -> CTable:
        name, table = f"{stage.name}_table{index}", stage.tables[index]
        if not self.int8 or index not in stage.short_tables:
            return CTable(self.arrays.add(name, table, "float"), "float")
        entries, scale = int8_of(table)
        return CTable(self.arrays.add(name, entries, "int8_t"), "int8_t", f"({literal(scale)} * (float){{}})")

    def expression(self, value: Value, args: list[str], place: str) -> str:
        if value.op is Op.POWER and value.number == -0.5:
            return f"1.0f / sqrt_f({args[0]})"
        return EXPRESSIONS[value.op].format(*args, attr=literal(value.number) if value.op is Op.POWER else "")

    def converted(self, value: Value, text: str, target: Value) -> str:
        return text

    def stored(self, stage: Stage, value: Value, text: str, index: int) -> str:
        return text

    def product(self, stage: Stage, value: Value, factors: list[str], target: str) -> list[str]:
        lines = []
        for number, (factor, block) in enumerate(zip(factors, value.blocks, strict=True)):
            matrix = block_entries(stage, block)
            name = f"{stage.name}_m{block.weight}_{block.r0}_{block.c0}"
            if self.int8:
                quantised, step = int8_of(matrix)
                stored, scale = store(self.arrays, name, quantised.T, "int8_t", by_column=True), f"{literal(step)}, "
            else:
                stored, scale = store(self.arrays, name, matrix.T, "float", by_column=True), ""
            self.multiply_adds += stored.products
            arguments = f"{stored.arguments}, {factor}, {block.length}, {scale}{target}, {block.width}, {int(number > 0)}"
            lines.append(f"{stored.function}({arguments});")
        return lines

    def reduction(self, value: Value) -> tuple[str, str, str, str]:
        if value.op is Op.SUM:
            return "float", "0.0f", "q += {x};", "q"
        return "float", "-from_bits(0x7f800000u)", "if ({x} > q || {x} != {x}) q = {x};", "q"

    def product_source(self, calls: str) -> str:
        """The C functions of the matrix products that a text calls."""
        functions = {"product": PRODUCT, "product_transposed": TRANSPOSED, "sparse_product": SPARSE_PRODUCT}
        text = "\n".join(source for name, source in functions.items() if re.search(rf"\b{name}\(", calls))
        text = text.replace("WEIGHT", "int8_t" if self.int8 else "float")
        text = text.replace("SCALE_PARAMETER", "float scale, " if self.int8 else "")
        return text.replace("SCALED", " * scale" if self.int8 else "").replace("(float)", "(float)" if self.int8 else "")

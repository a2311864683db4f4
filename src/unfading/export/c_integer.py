"""All-integer arithmetic of exported C: the instructions of `instructions.py`, each with the result that it defines."""

import re

import numpy as np

from unfading.export.arrays_of_c import Arrays
from unfading.export.c_stage import CTable
from unfading.export.instructions import (
    LOOKUP_INTERVALS,
    ONE_BITS,
    TANH_INTERVALS,
    Aligned,
    Carried,
    Chosen,
    Dot,
    IntegerProduct,
    IntegerStage,
    IntegerSum,
    Joined,
    Largest,
    Lookup,
    Quotient,
    Reciprocal,
    Root,
    Sign,
    Squashed,
    Unary,
)
from unfading.export.matrix_storage import SPARSE_LOOP, store
from unfading.export.stage import Stage
from unfading.fuse.c.indexing import plus
from unfading.fuse.ir.program import COMPARISONS, INFIX, Op, Value

FUNCTIONS: dict[str, str] = {
    "limit": """\
static int16_t limit(int32_t x)
{
  return (int16_t)(x < -32768 ? -32768 : x > 32767 ? 32767 : x);
}
""",
    "carried": """\
/* x / 2^n, rounded, with the rest of the step before; the new rest is kept. */
static int16_t carried(int32_t x, int n, int16_t *rest)
{
  x += *rest;
  const int32_t y = (x + ((int32_t)1 << (n - 1))) >> n;
  *rest = (int16_t)(x - y * ((int32_t)1 << n));
  return limit(y);
}
""",
    "compare": """\
/* 1, 0 or -1. A function: compilers warn of comparisons that int16_t decides. */
static int32_t compare(int32_t a, int32_t b)
{
  return (a > b) - (a < b);
}
""",
    "scaled": """\
/* x m / 2^shift, rounded to nearest. */
static int32_t scaled(int32_t x, int32_t m, int shift)
{
  return (int32_t)(((int64_t)x * m + ((int64_t)1 << (shift - 1))) >> shift);
}
""",
    "product": """\
/* total[j] = the sum of v[i] W[j][i], times m / 2^shift; added to what total holds if `add`. */
static void product(const int8_t *restrict W, const int16_t *restrict v, int length, int32_t m, int shift,
                    int32_t *restrict total, int width, int add)
{
  for (int j = 0; j < width; j++) {
    int32_t sum = 0;
    int i = 0;
    for (; i + 4 <= length; i += 4, W += 4)
      sum += (int32_t)v[i] * W[0] + (int32_t)v[i + 1] * W[1] + (int32_t)v[i + 2] * W[2] + (int32_t)v[i + 3] * W[3];
    for (; i < length; i++)
      sum += (int32_t)v[i] * *W++;
    total[j] = (add ? total[j] : 0) + scaled(sum, m, shift);
  }
}
""",
    "sparse_product": """\
/* The same with a sparse matrix: its entries row by row, and in 4 bits how many zeros lie before each; 15 is zeros alone. */
static void sparse_product(const int8_t *restrict W, const uint8_t *restrict codes, int count, const int16_t *restrict v,
                           int length, int32_t m, int shift, int32_t *restrict total, int width, int add)
"""
    + SPARSE_LOOP.replace("FINISH", "total[j] = (add ? total[j] : 0) + scaled(sum, m, shift);").replace("SUM", "int32_t"),
    "product_transposed": """\
/* As product, with W[i][j] in the place of W[j][i]. */
static void product_transposed(const int8_t *restrict W, const int16_t *restrict v, int length, int32_t m, int shift,
                               int32_t *restrict total, int width, int add)
{
  for (int j = 0; j < width; j++) {
    int32_t sum = 0;
    for (int i = 0; i < length; i++)
      sum += (int32_t)v[i] * W[i * width + j];
    total[j] = (add ? total[j] : 0) + scaled(sum, m, shift);
  }
}
""",
    "limit_all": """\
static void limit_all(const int32_t *total, int16_t *out, int width)
{
  for (int j = 0; j < width; j++)
    out[j] = limit(total[j]);
}
""",
    "tanh_i": f"""\
/* tanh(x / 2^12) 2^15. */
static int32_t tanh_i(int32_t x)
{{
  int32_t a = x < 0 ? -x : x;
  if (a > 32767)
    a = 32767;
  const int16_t *t = tanh_table + a / {32768 // TANH_INTERVALS};
  const int32_t y = t[0] + (((t[1] - t[0]) * (a % {32768 // TANH_INTERVALS}) + {16384 // TANH_INTERVALS}) >> \
{(32768 // TANH_INTERVALS).bit_length() - 1});
  return x < 0 ? -y : y;
}}
""",
    "sigmoid_i": """\
/* sigmoid(x / 2^11) 2^15 = (1 + tanh(x / 2^12)) 2^14. */
static int32_t sigmoid_i(int32_t x)
{
  return 16384 + ((tanh_i(x) + 1) >> 1);
}
""",
    "look_up": f"""\
/* The function of a table over all of int16, between its entries. */
static int32_t look_up(const int16_t *table, int32_t x)
{{
  const uint32_t u = (uint32_t)(x + 32768);
  const int16_t *t = table + u / {65536 // LOOKUP_INTERVALS}u;
  const int32_t part = (int32_t)(u % {65536 // LOOKUP_INTERVALS}u);
  return t[0] + (((t[1] - t[0]) * part + {32768 // LOOKUP_INTERVALS}) >> {(65536 // LOOKUP_INTERVALS).bit_length() - 1});
}}
""",
    "quotient": """\
static int32_t quotient(int32_t a, int32_t b)
{
  return b != 0 ? a / b : a > 0 ? 32768 : a < 0 ? -32768 : 0;
}
""",
    "root": """\
static int32_t root(uint32_t x)
{
  uint32_t y = 0;
  for (uint32_t bit = 1u << 30; bit != 0; bit >>= 2) {
    if (x >= y + bit) {
      x -= y + bit;
      y = (y >> 1) + bit;
    } else {
      y >>= 1;
    }
  }
  return (int32_t)y;
}
""",
}
_NEEDED = {
    "product": ["scaled"],
    "product_transposed": ["scaled"],
    "sparse_product": ["scaled"],
    "limit_all": ["limit"],
    "carried": ["limit"],
    "sigmoid_i": ["tanh_i"],
}


def functions_of_integers(text: str) -> str:
    """The functions that a text calls."""
    names = {name for name in FUNCTIONS if re.search(rf"\b{name}\(", text)}
    names |= {other for name in names for other in _NEEDED.get(name, ())}
    return "\n".join(FUNCTIONS[name] for name in FUNCTIONS if name in names)


def shifted(text: str, n: int) -> str:
    """x / 2^n, rounded to nearest; the argument is an int32_t or smaller."""
    if n == 0:
        return text
    return f"(({text} + {1 << (n - 1)}) >> {n})" if n > 0 else f"({text} * {1 << -n})"


class IntegerArithmetic:
    """int16 values, int8 matrices, 32-bit sums.

    Args:
        arrays: receives the arrays of weights and tables.
        stage: the stage that is written.
    """

    entry = "int16_t"

    def __init__(self, arrays: Arrays, stage: IntegerStage):
        self.arrays, self.current = arrays, stage
        self.multiply_adds = 0  # of the products that were written

    def buffers(self, stage: Stage) -> list[str]:
        return [f"int32_t total[{self.widest}];"] if self.widest else []

    @property
    def widest(self) -> int:
        """The size of the largest matrix product."""
        return max((value.size for value in self.current.stage.program.values() if value.op is Op.DOT), default=0)

    def number(self, value: Value) -> str:
        number = self.current.numbers[value.id]
        return str(number) if number >= 0 else f"({number})"

    def vector(self, stage: Stage, index: int) -> str:
        return self.arrays.add(f"{stage.name}_w{index}", self.current.vectors[index], "int16_t")

    def table(self, stage: Stage, index: int) -> CTable:
        name, entries = f"{stage.name}_table{index}", self.current.tables[index]
        unit = self.current.units.get(index)
        if unit is None:
            return CTable(self.arrays.add(name, entries, "int16_t"), "int16_t")
        return CTable(self.arrays.add(name, entries // unit, "int8_t"), "int8_t", f"({{}} * {unit})")

    def parameters(self) -> list[str]:
        return [f"int16_t *rest{i}" for i in self.current.rests]

    def expression(self, value: Value, args: list[str], place: str) -> str:
        args = [f"(int32_t){arg}" for arg in args]
        code = self.current.code[value.id]
        if isinstance(code, Carried):
            a, b = (shifted(arg, n) for arg, n in zip(args, code.shifts, strict=True))
            return f"carried({a} {INFIX[code.op]} {b}, {code.shift}, &rest{code.state}[{plus(code.start, place)}])"
        return f"limit({self._unlimited(value, args)})"

    def _unlimited(self, value: Value, args: list[str]) -> str:
        match self.current.code[value.id]:
            case Aligned(op, (na, nb), n):
                a, b = shifted(args[0], na), shifted(args[1], nb)
                if op in (Op.MAX, Op.MIN):
                    if a == b:  # compilers warn of a comparison with itself
                        return shifted(a, n)
                    return shifted(f"({a} {'>' if op is Op.MAX else '<'} {b} ? {a} : {b})", n)
                return f"compare({a}, {b}) {INFIX[op]} 0" if op in COMPARISONS else shifted(f"({a} {INFIX[op]} {b})", n)
            case IntegerProduct(n):
                return shifted(f"{args[0]} * {args[1]}", n)
            case Squashed(op, n):
                return f"{'tanh_i' if op is Op.TANH else 'sigmoid_i'}({shifted(args[0], n)})"
            case Unary(op, n):
                x = args[0]
                text = {Op.COPY: x, Op.NEG: f"(-{x})", Op.ABS: f"({x} < 0 ? -{x} : {x})", Op.RELU: f"({x} > 0 ? {x} : 0)"}[op]
                return shifted(text, n)
        return self._rare(value, args)

    def _rare(self, value: Value, args: list[str]) -> str:
        match self.current.code[value.id]:
            case Quotient(n):
                return f"quotient({shifted(args[0], n)}, {args[1]})"
            case Reciprocal(power):
                return f"quotient({1 << power}, {args[0]})"
            case Root(power):
                return f"root({args[0]} > 0 ? (uint32_t){args[0]} << {power} : 0)"
            case Lookup(table):
                name = self.arrays.add(f"{self.current.stage.name}_{value.op}_table", np.array(table), "int16_t")
                return f"look_up({name}, {args[0]})"
            case Sign():
                return f"(({args[0]} > 0) - ({args[0]} < 0)) * {1 << ONE_BITS}"
            case Chosen((nb, nc)):
                return f"({args[0]} != 0 ? {shifted(args[1], nb)} : {shifted(args[2], nc)})"
        raise TypeError(f"{value.op} is not elementwise.")

    def converted(self, value: Value, text: str, target: Value) -> str:
        joined = self.current.code[target.id]
        assert isinstance(joined, Joined)
        n = joined.shifts[[arg.id for arg in target.args].index(value.id)]
        return f"limit({shifted(f'(int32_t){text}', n)})"

    def stored(self, stage: Stage, value: Value, text: str, index: int) -> str:
        n = self.current.bits[value.id] - self.current.stored_bits(index)
        return text if n == 0 else f"limit({shifted(f'(int32_t){text}', n)})"

    def product(self, stage: Stage, value: Value, factors: list[str], target: str) -> list[str]:
        code = self.current.code[value.id]
        assert isinstance(code, Dot)
        lines = []
        for number, factor in enumerate(code.factors):
            name = f"{stage.name}_m{value.blocks[factor.argument].weight}"
            stored = store(self.arrays, name, factor.matrix, "int8_t", by_column=False)
            self.multiply_adds += stored.products
            vector = factors[factor.argument] + (f" + {factor.start}" if factor.start else "")
            width, length = factor.matrix.shape
            numbers = f"{length}, {factor.multiplier}, {factor.shift}, total, {width}, {int(number > 0)}"
            lines.append(f"{stored.function}({stored.arguments}, {vector}, {numbers});")
        return [*lines, f"limit_all(total, {target}, {value.size});"]

    def reduction(self, value: Value) -> tuple[str, str, str, str]:
        code = self.current.code[value.id]
        if isinstance(code, IntegerSum):
            return "int32_t", "0", "q += {x};", f"limit({shifted('q', code.shift)})"
        assert isinstance(code, Largest)
        return "int16_t", "-32768", "if ({x} > q) q = {x};", "q"

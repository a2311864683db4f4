"""C source of the whole loop over time, forward and backward, as functions of plain pointers.

    int forward(void** tensors, T, B, tile, first, last, reverse, order, lengths)

A *tile* of batch rows runs through all of its steps before the next tile starts: its state stays in the L1 cache, and no
thread waits for another. `order` lists the rows by falling length, so that at every step the rows that still run are the first
m of their tile. A row that has ended is not touched again. With lengths, the factors of the products after the loop are stored
packed, without the steps that a row does not have. `step.h` contains what all kernels share, `products.c` the matrix products;
`emit_step.py` writes the step itself.

Where there are fewer rows than threads can share, or where each thread would read all matrices from a far cache, a *team* of
threads runs a tile together, and every member computes some of the units. These functions have one more argument, the member
(`team.h`).
"""

from importlib.resources import files
from typing import NamedTuple

from unfading.fuse.c.emit_step import MEET, StepWriter
from unfading.fuse.c.schedule import schedule
from unfading.fuse.ir.differentiate import Outer, Reversed, Source, Total
from unfading.fuse.ir.passes import resets_first
from unfading.fuse.ir.program import Block, InputKind, Program, TensorId, TensorKind

# Defined in step.h, for float and double or for float alone; and those of the C library.
OWN, OWN_FLOAT = ("exp", "tanh", "sigmoid"), ("expm1", "log", "log1p", "erf")
LIBM = ("fabs", "sqrt", "sin", "cos", "pow")


class CFunction(NamedTuple):
    """A C function: its source, and the contents of its array of pointers after the first, which is the product function."""

    name: str
    source: str
    pointers: tuple[TensorId, ...]
    blocks: tuple[Block, ...]  # of matrices, packed; they follow the pointers
    optional: frozenset[int]  # inputs whose gradient is not computed if its pointer is null
    long: bool  # its step is a list of calls (`outline.py`)


class Factor(NamedTuple):
    """A factor of a product after the loop: `width` entries of a source."""

    source: Source
    width: int


def factors(outer: tuple[Outer, ...], totals: tuple[Total, ...]) -> list[Factor]:
    """All factors, each once. The step itself stores those of kind sequence."""
    unique = {Factor(total.dy, total.width): None for total in totals}
    for product in outer:
        unique[Factor(product.dy, product.block.width)] = None
        unique[Factor(product.v, product.block.length)] = None
    return list(unique)


def source(real: str, functions: list[CFunction]) -> str:
    """A whole translation unit in the precision `real`, float or double."""
    return "\n".join([shared(real, "step.h", "team.h"), function_names(real), *(function.source for function in functions)])


def function_names(real: str) -> str:
    """Macros for the functions of `EXPRESSIONS` in a precision, such as exp_x."""
    if real == "float":
        names = {name: f"{name}_f" for name in (*OWN, *OWN_FLOAT)} | {name: f"{name}f" for name in LIBM}
    else:
        names = {name: f"{name}_d" for name in OWN} | {name: name for name in (*OWN_FLOAT, *LIBM)}
    return "\n".join(f"#define {name}_x {function}" for name, function in names.items())


def shared(real: str, *names: str) -> str:
    """C files of this folder in a precision, after the layout that all of them share."""
    return "\n".join([f"typedef {real} real;", *(c_file(name) for name in ("layout.h", *names))])


def c_file(name: str) -> str:
    """A C file of this folder."""
    return files("unfading.fuse.c").joinpath(name).read_text()


def emit_forward(name: str, program: Program, *, team: bool = False) -> CFunction:
    """The loop of a forward program, for one thread or for a team."""
    program, resets = resets_first(program)
    writer = StepWriter(name, program, schedule(program), backward=False, team=team, resets=resets)
    load, final, swap = [], [], []
    for i, n in _states(program).items():
        initial, last = writer.pointer(TensorKind.INITIAL, i), writer.pointer(TensorKind.FINAL, i)
        load.append(_copied(writer, n, f"now{i} + r * PAD({n})", f"{initial} + row[r] * {n}"))
        final.append(_copied(writer, n, f"{last} + row[m] * {n}", f"now{i} + m * PAD({n})"))
        swap.append(f"{{ real* swap = now{i}; now{i} = new{i}; new{i} = swap; }}")
    frame = f"""    for (int r = 0; r < rows; r++) {{
{_lines(load, 6)}
    }}
{_lines([MEET] if team else [], 4)}
    int m = rows;
    for (int64_t s = 0;; s++) {{
      while (m > 0 && len[m - 1] <= s) {{  /* rows that have ended */
        m--;
{_lines(final, 8)}
      }}
      if (m == 0) break;
      for (int r = 0; r < m; r++) place[r] = (reverse ? len[r] - 1 - s : s) * B + row[r];
{_lines(writer.lines, 6)}
{_lines(swap, 6)}
    }}"""
    return _function(name, writer, program, frame)


def emit_backward(name: str, both: Reversed, *, team: bool = False) -> CFunction:
    """The loop of a reverse program, from each row's last step to its first, for one thread or for a team."""
    program = both.reverse
    writer = StepWriter(name, program, schedule(program), backward=True, team=team)
    join, add, write, swap = [], [], [], []
    for i, n in _states(program).items():
        d_final, d_next, d_initial = (
            writer.pointer(kind, i) for kind in (TensorKind.D_FINAL, TensorKind.D_NEXT, TensorKind.D_INITIAL)
        )
        start, stop = writer.bounds(n)
        join.append(f"if ({d_final}) {_copied(writer, n, f'now{i} + m * PAD({n})', f'{d_final} + row[m] * {n}')}")
        join.append(f"else memset(now{i} + m * PAD({n}) + {start}, 0, sizeof(real) * ({stop} - {start}));")
        add.append(f"if ({d_next}) for (int r = 0; r < m; r++) {{")
        add.append(f"  const real* d = {d_next} + place[r] * {n};")
        add.append("#pragma omp simd")
        add.append(f"  for (int i = {start}; i < {stop}; i++) now{i}[r * PAD({n}) + i] += d[i];")
        add.append("}")
        write.append(_copied(writer, n, f"{d_initial} + row[r] * {n}", f"now{i} + r * PAD({n})"))
        swap.append(f"{{ real* swap = now{i}; now{i} = new{i}; new{i} = swap; }}")
    for i, n in _held(program).items():
        target = writer.pointer(TensorKind.D_INPUT, i)
        write.append(f"if ({target}) {_copied(writer, n, f'{target} + row[r] * {n}', f'held{i} + r * PAD({n})')}")
    leader = "if (!me) " if team else ""
    summed = [
        f"{leader}memcpy((double*){writer.pointer(TensorKind.D_WEIGHT, i)} + number * {n}, sum{i}, sizeof(double) * {n});"
        for i, n in _summed(program).items()
    ]
    packing = [line for k, factor in enumerate(factors(both.outer, both.totals)) for line in _packing(writer, k, factor)]
    meet = [MEET] if team else []
    frame = f"""    int m = 0;
    int64_t packed = 0;
    if (order) for (int64_t b = 0; b < b0; b++) packed += LENGTH(order[b]);
    for (int r = 0; r < rows; r++) {{  /* row after row, so that the order of lines does not depend on the tiles */
      start[r] = packed;
      packed += len[r];
    }}
    for (int64_t s = len[0] - 1; s >= 0; s--) {{
      while (m < rows && len[m] > s) {{  /* rows whose last step this is */
{_lines(join, 8)}
        m++;
      }}
      for (int r = 0; r < m; r++) {{
        place[r] = (reverse ? len[r] - 1 - s : s) * B + row[r];
        before[r] = (reverse ? len[r] - s : s - 1) * B + row[r];
        line[r] = order ? start[r] + s : place[r];
      }}
{_lines(add + meet, 6)}
{_lines(writer.lines, 6)}
{_lines(packing + (["if (order) " + MEET] if team else []), 6)}
{_lines(swap, 6)}
    }}
    while (m < rows) {{  /* rows of length 0 */
{_lines(join, 6)}
      m++;
    }}
    for (int r = 0; r < rows; r++) {{
{_lines(write, 6)}
    }}
{_lines(meet + summed, 4)}"""
    return _function(name, writer, program, frame)


def _function(name: str, writer: StepWriter, program: Program, frame: str) -> CFunction:
    """The function around the loop: it names the tensors, allocates buffers, and lists the rows of each tile."""
    names = [f"{kind}{index}" for kind, index in writer.pointers] + [f"m{k}" for k in range(len(writer.blocks))]
    tensors = ["const Product product = (Product)tensors[0]; (void)product;"]
    tensors += [f"real* {name} = tensors[{i}]; (void){name};" for i, name in enumerate(names, start=1)]
    widths = [(f"s{k}", size) for k, size in enumerate(writer.schedule.sizes)]
    for i, n in _states(program).items():
        widths += [(f"now{i}", n), (f"new{i}", n)]
    widths += [(f"held{i}", n) for i, n in _held(program).items()]
    # Each buffer by its distance from the first: gcc takes twice as long where each is declared by the one before it.
    starts, start = [], "0"
    for buffer, n in widths:
        starts.append(f"{buffer}_start = {start}")
        start = f"{buffer}_start + PAD({n})"
    starts.append(f"all = {start}")
    buffers = [f"real* {buffer} = mem + {buffer}_start * tile;" for buffer, _ in widths]
    sums = 0
    for i, n in _summed(program).items():
        buffers.append(f"double* sum{i} = (double*)(mem + all * tile) + {sums};")
        sums += n
    shares = [
        f"const int from{k} = share({n}, {piece}, me, members), to{k} = share({n}, {piece}, me + 1, members);"
        for (n, piece), k in writer.shares.items()
    ]
    if writer.team:
        parameter = ", Member* member"
        shares = ["const int me = member->me, members = member->members;", *shares]
        memory = [
            "if (!me) member->team->memory = aligned_alloc(64, (numbers + 127) / 64 * 64);",
            MEET,
            "char* memory = member->team->memory;",
            "int64_t rows_of_tile[6 * tile];",
        ]
        clear = ["const size_t part = (numbers + members - 1) / members;", "const size_t at = part * me;"]
        clear += ["if (at < numbers) memset(memory + at, 0, numbers - at < part ? numbers - at : part);", MEET]
        rows, free = "rows_of_tile", [MEET, "if (!me) free(memory);"]
    else:
        parameter = ""
        memory = ["char* memory = aligned_alloc(64, (numbers + 6 * sizeof(int64_t) * tile + 127) / 64 * 64);"]
        clear = ["memset(memory, 0, numbers);"]
        rows, free = "(int64_t*)(memory + numbers)", ["free(memory);"]
    text = f"""
{"".join(writer.outline.source)}
#define LENGTH(b) (lengths[b] < 0 ? 0 : (lengths[b] > T ? T : lengths[b]))
int {name}(void** tensors, int64_t T, int64_t B, int64_t tile, int64_t first, int64_t last, int reverse,
    const int64_t* order, const int64_t* lengths{parameter}) {{
{_lines(tensors + shares, 2)}
  enum {{ {", ".join(starts)} }};
  const size_t numbers = sizeof(real) * all * tile + sizeof(double) * {sums};
{_lines(memory, 2)}
  if (!memory) return 1;
  for (int64_t number = first; number < last; number++) {{
    const int64_t b0 = number * tile;
    const int rows = B - b0 < tile ? B - b0 : tile;
{_lines(clear, 4)}
    real* mem = (real*)memory;
{_lines(buffers, 4)}
    int64_t *row = {rows}, *len = row + tile, *place = len + tile;
    int64_t *before = place + tile, *line = before + tile, *start = line + tile;
    (void)before; (void)line; (void)start;
    for (int r = 0; r < rows; r++) {{
      row[r] = order ? order[b0 + r] : b0 + r;
      len[r] = lengths ? LENGTH(row[r]) : T;
    }}
{frame}
  }}
{_lines(free, 2)}
  return 0;
}}
#undef LENGTH
"""
    return CFunction(name, text, tuple(writer.pointers), tuple(writer.blocks), writer.optional(), bool(writer.outline.source))


def _packing(writer: StepWriter, k: int, factor: Factor) -> list[str]:
    """Copy a factor of a product after the loop to its packed line, if there are lengths."""
    kind, index, start = factor.source
    if kind == TensorKind.SEQUENCE:
        return []
    target, n = writer.pointer(TensorKind.PACKED, k), factor.width
    if kind == TensorKind.D_INPUT:
        base = f"{writer.pointer(kind, index)} + place[r] * {writer.program.widths[kind, index]}"
    else:
        base = writer.base(kind, index)
    copy = f"memcpy({target} + line[r] * {n}, {base} + {start}, sizeof(real) * {n});"
    return [f"if ({target}) for (int {writer.rows}) {copy}"]


def _copied(writer: StepWriter, n: int, to: str, of: str) -> str:
    """Copy the entries of a vector that a thread computes."""
    start, stop = writer.bounds(n)
    return f"memcpy({to} + {start}, {of} + {start}, sizeof(real) * ({stop} - {start}));"


def _states(program: Program) -> dict[int, int]:
    return {i: program.widths[TensorKind.NEXT, i] for kind, i in sorted(program.widths) if kind == TensorKind.NEXT}


def _held(program: Program) -> dict[int, int]:
    """Gradients of constant inputs, which are summed over time, row by row."""
    stored = sorted({store.index for store in program.stores if store.kind == TensorKind.D_INPUT})
    return {i: program.widths[TensorKind.D_INPUT, i] for i in stored if program.kinds[i] == InputKind.CONSTANT}


def _summed(program: Program) -> dict[int, int]:
    """Gradients of weights that are used entry by entry, which are summed over rows and time, in double."""
    stored = sorted({store.index for store in program.stores if store.kind == TensorKind.D_WEIGHT})
    return {i: program.widths[TensorKind.D_WEIGHT, i] for i in stored}


def _lines(lines: list[str], indent: int) -> str:
    return "\n".join(" " * indent + line if not line.startswith("#") else line for line in lines)

"""A model as C99 source: `model.h` and `model.c`, from the functions of its stages."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from unfading.export.arrays_of_c import SIZES, Arrays
from unfading.export.c_float import FloatArithmetic, functions_of
from unfading.export.c_integer import IntegerArithmetic, functions_of_integers
from unfading.export.c_stage import StageWriter
from unfading.export.instructions import rounded, tanh_table
from unfading.export.int8 import Integers
from unfading.export.model_stages import Exported
from unfading.export.quantised_model import Quantised
from unfading.export.stage import Array


class CSource(NamedTuple):
    """The C source of a model, and its sizes in bytes."""

    header: str
    source: str
    constants: int  # weights, tables and initial state: read-only
    state: int  # owned by the caller
    scratch: int  # on the stack during a push, without what the compiler adds
    multiply_adds: int  # of the matrix products of one push


def float_source(model: Exported, *, int8: bool) -> CSource:
    """The model in float32 arithmetic, with matrices in float32 or in int8."""
    arrays = Arrays()
    arithmetic = FloatArithmetic(arrays, int8=int8)
    writers = [StageWriter(stage, arithmetic) for stage in model.stages]
    functions = [line for writer in writers for line in (*writer.source(), "")]
    tables = {(writer.stage.name, i): table.array for writer in writers for i, table in writer.tables.items()}
    symbols = None if model.tokens is None else arrays.add("tokens", model.tokens, "float")
    layout = _Layout(model, "float", tables, symbols)
    initial = layout.reset(
        {(stage.name, i): part for stage in model.stages for i, part in enumerate(stage.states)},
        lambda part: arrays.add("initial_state", part, "float"),
    )
    push = layout.push(pooling_lines(model) if model.pooling else [])
    text = "\n".join((*functions, *push))
    blocks = [*arrays.source, functions_of(text), arithmetic.product_source(text), *functions, *initial, "", *push]
    scratch = max(4 * writer.scratch for writer in writers) + 4 * layout.vectors
    sizes = (arrays.bytes, layout.state_bytes, scratch, arithmetic.multiply_adds)
    kind = "int8 matrices, float32 arithmetic" if int8 else "float32"
    return CSource(layout.header(kind, []), source_text(kind, model, blocks), *sizes)


def integer_source(twin: Quantised) -> CSource:
    """The model in all-integer arithmetic."""
    model, arrays = twin.model, Arrays()
    functions: list[str] = []
    scratch, multiply_adds, stages = 0, 0, {}
    tables: dict[tuple[str, int], str] = {}
    for each in twin.stages:
        arithmetic = IntegerArithmetic(arrays, each)
        writer = StageWriter(each.stage, arithmetic)
        functions += [*writer.source(), ""]
        scratch = max(scratch, 2 * writer.scratch + 4 * arithmetic.widest)
        multiply_adds += arithmetic.multiply_adds
        stages[each.stage.name] = each
        tables |= {(each.stage.name, i): table.array for i, table in writer.tables.items()}
    tokens = None if model.tokens is None else rounded(model.tokens, twin.sample_bits)
    symbols = None if tokens is None else arrays.add("tokens", tokens, "int16_t")
    rests = {(name, i): size for name, each in stages.items() for i, size in each.rests.items()}
    layout = _Layout(model, "int16_t", tables, symbols, rests)
    initial = layout.reset(
        {(name, i): part for name, each in stages.items() for i, part in enumerate(each.states)},
        lambda part: arrays.add("initial_state", part, "int16_t"),
    )
    push = layout.push([])
    text = "\n".join((*functions, *push))
    if "tanh_i(" in text or "sigmoid_i(" in text:
        arrays.add("tanh_table", np.array(tanh_table()), "int16_t")
    blocks = [*arrays.source, functions_of_integers(text), *functions, *initial, "", *push]
    sizes = (arrays.bytes, layout.state_bytes, scratch + 2 * layout.vectors, multiply_adds)
    defines = [
        f"#define MODEL_SAMPLE_UNITS {2.0**twin.sample_bits!r} /* a number x of a sample is given as x times this, rounded */",
        f"#define MODEL_OUTPUT_UNITS {2.0**twin.output_bits!r} /* an output y is y / this */",
    ]
    defines = defines[1:] if symbols else defines
    return CSource(layout.header("all-integer", defines), source_text("all-integer", model, blocks), *sizes)


def pooling_lines(model: Exported) -> list[str]:
    """Lines that replace the input of the head by what it reads of all outputs so far."""
    size = model.pooled_size
    mean = f"pool[{size} + i]" if model.pooling == "pooled" else "pool[i]"
    lines = [
        "state->steps += 1.0f;",
        f"for (int i = 0; i < {size}; i++) {{",
        "  state->total[i] += {x}[i];",
        f"  {mean} = state->total[i] / state->steps;",
    ]
    if model.pooling == "pooled":
        lines += [
            "  if (state->steps == 1.0f || {x}[i] > state->largest[i])",
            "    state->largest[i] = {x}[i];",
            "  pool[i] = {x}[i];",
            f"  pool[{2 * size} + i] = state->largest[i];",
        ]
    return [*lines, "}"]


def source_text(kind: str, model: Exported, blocks: list[str]) -> str:
    """The text of `model.c`."""
    lines = [
        f"/* {model.name}, {kind}. Written by unfading; do not edit. */",
        "#include <stddef.h>",
        "#include <stdint.h>",
        "",
        '#include "model.h"',
        "",
        "/* Declared here: a freestanding compiler need not have string.h. */",
        "void *memcpy(void *restrict to, const void *restrict from, size_t count);",
        "",
    ]
    return "\n".join((*lines, *(block for block in blocks if block is not None))).rstrip() + "\n"


class _Layout:
    """The struct of the state, the reset and the push: what is around the stages."""

    def __init__(
        self,
        model: Exported,
        entry: str,
        tables: dict[tuple[str, int], str],
        symbols: str | None,
        rests: Mapping[tuple[str, int], int] | None = None,
    ):
        self.model, self.entry, self.tables, self.symbols = model, entry, tables, symbols
        self.rests = rests or {}  # sizes of what states keep beside themselves, by stage and number of the state
        self.longest = max((len(table) for stage in model.stages for table in stage.tables.values()), default=1)
        # Buffers between stages: a stage whose output is its state needs none.
        self.buffers = [stage.output_size for stage in model.stages[:-1] if stage.output == len(stage.states)]
        if model.pooling:
            self.buffers.append(model.stages[-1].input_size)
        # Vectors that the pooling keeps: the sum and, for the last, mean and largest output, the largest.
        self.pools = {"mean": ["total"], "pooled": ["total", "largest"], None: []}[model.pooling]
        self.vectors = sum(self.buffers)
        entries = sum(len(part) for stage in model.stages for part in stage.states)
        total = model.pooled_size * len(self.pools) + 1 if model.pooling else 0
        self.state_bytes = SIZES[entry] * (entries + total + sum(self.rests.values())) + (4 if self.longest > 1 else 0)

    def header(self, kind: str, defines: list[str]) -> str:
        model, entry = self.model, self.entry
        fields = [
            f"  {entry} {stage.name}_{name}[{len(part)}];"
            for stage in model.stages
            for name, part in zip(stage.state_names, stage.states, strict=True)
        ]
        fields += [f"  {entry} {name}_rest{i}[{size}];" for (name, i), size in self.rests.items()]
        if model.pooling:
            fields += [*(f"  {entry} {name}[{model.pooled_size}];" for name in self.pools), f"  {entry} steps;"]
        if self.longest > 1:
            fields.append(f"  uint32_t position; /* of the next step, at most {self.longest - 1} */")
        if model.tokens is not None:
            defines = [f"#define MODEL_TOKENS {len(model.tokens)} /* a sample is a token below this */", *defines]
        lines = [
            f"/* {model.name}, {kind}. Written by unfading; do not edit. */",
            "#ifndef MODEL_H",
            "#define MODEL_H",
            "",
            "#include <stdint.h>",
            "",
            f"#define MODEL_INPUTS {model.input_size} /* numbers of a sample */",
            f"#define MODEL_OUTPUTS {model.output_size} /* numbers of an output */",
            *defines,
            "",
            "/* Owned by the caller, one for each sequence. */",
            "typedef struct {",
            *fields,
            "} model_state;",
            "",
            "/* Begin a new sequence. */",
            "void model_reset(model_state *state);",
            "",
            "/* Take the next sample; write the output after it. */",
            f"void model_push(model_state *state, {self.sample}, {entry} *output);",
            "",
            "#endif",
        ]
        return "\n".join(lines) + "\n"

    @property
    def sample(self) -> str:
        return "uint32_t sample" if self.symbols else f"const {self.entry} *sample"

    def reset(self, states: Mapping[tuple[str, int], Array | Integers], add: Callable[[Any], str]) -> list[str]:
        """The function model_reset, with the state before the first step of each stage."""
        body = []
        for stage in self.model.stages:
            for i, name in enumerate(stage.state_names):
                field, part = f"state->{stage.name}_{name}", states[stage.name, i]
                if part.any():
                    body.append(f"  memcpy({field}, {add(part)}, sizeof {field});")
                else:
                    body.append(f"  for (int i = 0; i < {len(part)}; i++)\n    {field}[i] = 0;")
        for (name, i), size in self.rests.items():
            body.append(f"  for (int i = 0; i < {size}; i++)\n    state->{name}_rest{i}[i] = 0;")
        for name in self.pools:
            body.append(f"  for (int i = 0; i < {self.model.pooled_size}; i++)\n    state->{name}[i] = 0;")
        if self.model.pooling:
            body.append("  state->steps = 0;")
        if self.longest > 1:
            body.append("  state->position = 0;")
        return ["void model_reset(model_state *state)", "{", *(body or ["  (void)state;"]), "}"]

    def push(self, before_head: list[str]) -> list[str]:
        """The function model_push."""
        lines = []
        x, buffer = "sample", 0
        if self.symbols:
            size = self.model.stages[0].input_size
            lines.append(f"const {self.entry} *input = {self.symbols} + {size} * (sample < MODEL_TOKENS ? sample : 0);")
            x = "input"
        for number, stage in enumerate(self.model.stages):
            last = number == len(self.model.stages) - 1
            if last and before_head:
                lines += [line.replace("{x}", x) for line in before_head]
                x = "pool"
            arguments = [x]
            for i, table in sorted(stage.tables.items()):
                place = "state->position" if len(table) == self.longest else self._clamped(len(table))
                width = table.shape[1]
                arguments.append(f"{self.tables[stage.name, i]} + {place if width == 1 else f'{width} * {place}'}")
            arguments += [f"state->{stage.name}_{name}" for name in stage.state_names]
            arguments += [f"state->{name}_rest{i}" for name, i in self.rests if name == stage.name]
            if stage.output == len(stage.states):
                x = "output" if last else f"x{buffer}"
                buffer += not last
                arguments.append(x)
            else:
                x = f"state->{stage.name}_{stage.state_names[0]}"
            lines.append(f"{stage.name}({', '.join(arguments)});")
        if x != "output":
            lines.append(f"memcpy(output, {x}, sizeof {x});")
        if self.longest > 1:
            lines += [f"if (state->position < {self.longest - 1})", "  state->position++;"]
        declared = [f"{self.entry} x{i}[{size}];" for i, size in enumerate(self.buffers[:buffer])]
        declared += [f"{self.entry} pool[{self.model.stages[-1].input_size}];"] if before_head else []
        head = f"void model_push(model_state *state, {self.sample}, {self.entry} *output)"
        unused = [] if any("state->" in line for line in lines) else ["(void)state;"]
        return [head, "{", *(f"  {line}" for line in (*declared, *unused, *lines)), "}"]

    def _clamped(self, rows: int) -> str:
        return f"(state->position < {rows - 1} ? state->position : {rows - 1})"

"""The files around the C source of a model: a program that reads samples from standard input, a Makefile and a README."""

from unfading.export.c_model import CSource
from unfading.export.model_stages import Exported

MAKEFILE = """\
# make          build the program: samples on standard input, one per line, outputs on standard output
# make CC=arm-none-eabi-gcc CFLAGS="-Os -mcpu=cortex-m4 -mthumb -mfloat-abi=hard -mfpu=fpv4-sp-d16" model.o
CFLAGS ?= -O3
STRICT = -std=c99 -pedantic -Wall -Wextra -Werror

model: main.c model.o
\t$(CC) $(CFLAGS) $(STRICT) -o $@ main.c model.o

model.o: model.c model.h
\t$(CC) $(CFLAGS) $(STRICT) -ffreestanding -c -o $@ model.c

clean:
\trm -f model model.o

.PHONY: clean
"""

MAIN = """\
/* Read samples from standard input, one per line, and write the output after each. An empty line begins a new sequence. */
#include <stdio.h>
#include <stdlib.h>

#include "model.h"

static char line[1 << 16];
static model_state state;

int main(void)
{
  model_reset(&state);
  while (fgets(line, sizeof line, stdin)) {
    char *at = line, *end;
    int n = 0;
@SAMPLE@
    if (n == 0) {
      model_reset(&state);
      continue;
    }
    if (n != MODEL_INPUTS) {
      fprintf(stderr, "a sample has %d numbers; got %d.\\n", MODEL_INPUTS, n);
      return 2;
    }
@PUSH@
    for (int i = 0; i < MODEL_OUTPUTS; i++)
      printf(i + 1 < MODEL_OUTPUTS ? "%.9g " : "%.9g\\n", @OUTPUT@);
  }
  return 0;
}
"""

_VECTOR = """\
    @ENTRY@ sample[MODEL_INPUTS], output[MODEL_OUTPUTS];
    for (double x = strtod(at, &end); end != at; at = end, x = strtod(at, &end), n++)
      if (n < MODEL_INPUTS)
        sample[n] = @CONVERT@;"""
_TOKEN = """\
    @ENTRY@ output[MODEL_OUTPUTS];
    unsigned long sample = 0;
    for (unsigned long x = strtoul(at, &end, 10); end != at; at = end, x = strtoul(at, &end, 10), n++)
      sample = x;"""
QUANTISE = """\
/* x in units of 1 / MODEL_SAMPLE_UNITS, rounded and limited to int16. */
static int16_t quantise(double x)
{
  x = (float)x * MODEL_SAMPLE_UNITS + 32768.5;
  return (int16_t)((int32_t)(x < 0 ? 0 : x > 65535 ? 65535 : x) - 32768);
}

int main"""


def main_source(model: Exported, *, integer: bool) -> str:
    """The text of `main.c`."""
    text = MAIN.replace("@SAMPLE@", _VECTOR if model.tokens is None else _TOKEN)
    text = text.replace("@ENTRY@", "int16_t" if integer else "float")
    text = text.replace("@CONVERT@", "quantise(x)" if integer else "(float)x")
    text = text.replace(
        "@PUSH@", f"    model_push(&state, {'sample' if model.tokens is None else '(uint32_t)sample'}, output);"
    )
    text = text.replace("@OUTPUT@", "output[i] / MODEL_OUTPUT_UNITS" if integer else "(double)output[i]")
    return text.replace("int main", QUANTISE, 1) if integer and model.tokens is None else text


def readme(model: Exported, source: CSource, kind: str, notes: list[str]) -> str:
    """The text of `README.md`."""
    sample = "a token, a number on a line" if model.tokens is not None else f"{model.input_size} numbers on a line"
    lines = [
        f"# {model.name} in C",
        "",
        f"A recurrent model as C99, {kind}, written by unfading. It needs no malloc, and nothing of libc but `memcpy`.",
        "",
        "| | bytes |",
        "|---|---:|",
        f"| constants (weights, tables) | {source.constants} |",
        f"| state, one for each sequence | {source.state} |",
        f"| buffers on the stack during a push | {source.scratch} |",
        "",
        f"A push has {source.multiply_adds} multiply-adds in matrix products.",
        "",
        "```c",
        "model_state state;",
        "model_reset(&state);",
        "model_push(&state, sample, output); /* for each sample */",
        "```",
        "",
        f"`make` builds a program that reads {sample} and writes the {model.output_size} numbers of the output after it; an",
        "empty line begins a new sequence.",
        *(["", *notes] if notes else []),
    ]
    return "\n".join(lines) + "\n"

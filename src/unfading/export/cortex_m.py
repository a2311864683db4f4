"""An exported model on a Cortex-M4: the size of its code, its stack, and the instructions of a push, which QEMU counts.

It needs arm-none-eabi-gcc for the sizes, and qemu-system-arm for the instructions. The firmware has no operating system; it
writes its outputs through the debugger's channel.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

GCC, QEMU = "arm-none-eabi-gcc", "qemu-system-arm"
M4 = ["-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16"]
STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-ffreestanding"]
INSTRUCTIONS_PER_TICK = 40  # SysTick counts at 25 MHz, and an instruction takes 1 ns with -icount shift=0
SECONDS = 300  # that an emulation may take

LINKER = """
MEMORY { CODE (rx) : ORIGIN = 0, LENGTH = 4M  RAM (rwx) : ORIGIN = 0x20000000, LENGTH = 4M }
SECTIONS
{
  .text : { KEEP(*(.vectors)) *(.text*) *(.rodata*) } > CODE
  .data : { *(.data*) } > RAM
  .bss : { *(.bss*) *(COMMON) } > RAM
}
"""

FIRMWARE = """
#include <stddef.h>
#include <stdint.h>
#include "model.h"
#include "samples.h"

void *memcpy(void *restrict to, const void *restrict from, size_t n);

static model_state state;
static OUTPUT output[MODEL_OUTPUTS];

static void host(uint32_t what, const void *argument)
{
  register uint32_t r0 __asm__("r0") = what;
  register const void *r1 __asm__("r1") = argument;
  __asm__ volatile("bkpt 0xAB" : "+r"(r0) : "r"(r1) : "memory");
}

static void write_number(uint32_t number)
{
  char text[10];
  for (int i = 0; i < 8; i++)
    text[i] = "0123456789abcdef"[number >> (28 - 4 * i) & 15];
  text[8] = ' ';
  text[9] = 0;
  host(4, text);
}

static void start(void)
{
  volatile uint32_t *tick = (volatile uint32_t *)0xE000E010;
  uint32_t ticks = 0;
  *(volatile uint32_t *)0xE000ED88 |= 0xF << 20; /* the floating-point unit */
  __asm__ volatile("dsb; isb");
  tick[1] = 0xFFFFFF;
  tick[2] = 0;
  tick[0] = 5;
  for (int w = 0; w < WINDOWS; w++) {
    model_reset(&state);
    const uint32_t before = tick[2];
    for (int t = 0; t < STEPS; t++)
      model_push(&state, samples[w][t], output);
    ticks += (before - tick[2]) & 0xFFFFFF;
    for (int i = 0; i < MODEL_OUTPUTS; i++) {
      uint32_t bits = 0;
      memcpy(&bits, &output[i], sizeof output[i]);
      write_number(bits);
    }
  }
  write_number(ticks);
  host(0x18, (const void *)0x20026);
  for (;;)
    ;
}

void *memcpy(void *restrict to, const void *restrict from, size_t n)
{
  char *a = to;
  const char *b = from;
  while (n--)
    *a++ = *b++;
  return to;
}

__attribute__((section(".vectors"), used)) static void (*const vectors[2])(void) = {(void (*)(void))0x20400000, start};
"""


class DeviceSizes(NamedTuple):
    """Sizes of a model that was compiled with -Os for a Cortex-M4, in bytes."""

    code: int  # without its constants
    functions: dict[str, int]  # the code of each function; the compiler joins some with their callers
    stack: int  # that a push takes at most


def missing(*tools: str) -> list[str]:
    """Those of the tools that are not installed."""
    return [tool for tool in tools if shutil.which(tool) is None]


def compiled(folder: Path) -> DeviceSizes:
    """Compile the model of a folder that `export.c` wrote; leaves model.o there."""
    _run([GCC, *M4, *STRICT, "-Os", "-fstack-usage", "-c", "-o", "model.o", "model.c"], folder)
    sections = _run(["arm-none-eabi-size", "-A", "model.o"], folder)
    code = sum(int(line.split()[1]) for line in sections.splitlines() if line.startswith(".text"))
    symbols = _run(["arm-none-eabi-nm", "-S", "model.o"], folder)
    functions = {name: int(size, 16) for size, name in re.findall(r"^\w+ (\w+) [tT] ([\w.]+)$", symbols, re.MULTILINE)}
    return DeviceSizes(code, functions, _stack(folder))


def _stack(folder: Path) -> int:
    """model_push, the deepest of the functions of stages, which it calls, and the deepest of those that they call."""
    use = re.findall(r":(\w+)\t(\d+)\t", (folder / "model.su").read_text())
    push = sum(int(size) for name, size in use if name == "model_push")
    text = (folder / "model.c").read_text()
    stages = set(re.findall(r"^static void (\w+)\(const \w+ \*input0", text, re.MULTILINE))
    deepest = max((int(size) for name, size in use if name in stages), default=0)
    others = [int(size) for name, size in use if name not in stages | {"model_push", "model_reset"}]
    return push + deepest + max(others, default=0)


class DeviceRun(NamedTuple):
    """What the firmware computed."""

    outputs: NDArray[Any]  # after the last step of each window
    instructions: float  # of a push


def run(folder: Path, samples: NDArray[Any], *, integer: bool) -> DeviceRun:
    """Run the model of a folder on windows of samples [W, T, I], or of tokens [W, T]."""
    entry = "int16_t" if integer else "float"
    (folder / "samples.h").write_text(_samples(samples, "uint32_t" if samples.ndim == 2 else entry))
    (folder / "firmware.c").write_text(FIRMWARE.replace("OUTPUT", entry, 1))
    (folder / "firmware.ld").write_text(LINKER)
    flags = [*M4, "-Os", "-ffreestanding", "-nostdlib", "-Wno-missing-braces", "-fno-tree-loop-distribute-patterns"]
    _run([GCC, *flags, "-T", "firmware.ld", "-o", "model.elf", "firmware.c", "model.c", "-lgcc"], folder)
    machine = [QEMU, "-M", "mps2-an386", "-display", "none", "-monitor", "none", "-serial", "none", "-icount", "shift=0"]
    machine += ["-semihosting-config", "enable=on,target=native", "-kernel", "model.elf"]
    answer = subprocess.run(machine, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    words = [int(word, 16) for word in (answer.stdout + answer.stderr).split()]
    bits = np.array(words[:-1], np.uint32)
    outputs = bits.astype(np.uint16).view(np.int16) if integer else bits.view(np.float32)
    pushes = samples.shape[0] * samples.shape[1]
    return DeviceRun(outputs.reshape(len(samples), -1), words[-1] * INSTRUCTIONS_PER_TICK / pushes)


def _samples(samples: NDArray[Any], entry: str) -> str:
    numbers = [f"{x:.9g}" if entry == "float" else str(x) for x in samples.reshape(-1).tolist()]
    sizes = "".join(f"[{size}]" for size in samples.shape)
    lines = [f"#define WINDOWS {samples.shape[0]}", f"#define STEPS {samples.shape[1]}"]
    return "\n".join([*lines, f"static const {entry} samples{sizes} = {{", ", ".join(numbers), "};"])


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout

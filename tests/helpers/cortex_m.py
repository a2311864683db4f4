"""Exported models on a Cortex-M4 that QEMU emulates: firmware without an operating system, and the instructions of a push."""

import shutil
import subprocess

import numpy as np
import pytest

GCC, QEMU = "arm-none-eabi-gcc", "qemu-system-arm"
MISSING = [tool for tool in (GCC, QEMU) if shutil.which(tool) is None]
needs_cortex_m = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
M4 = ["-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16"]
INSTRUCTIONS_PER_TICK = 40  # SysTick counts at 25 MHz, and an instruction takes 1 ns with -icount shift=0

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
static ENTRY output[MODEL_OUTPUTS];

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


def run(folder, samples, *, integer):
    """The outputs after the last step of windows of samples [W, T, I], and the instructions of a push."""
    windows, steps, features = samples.shape
    entry = "int16_t" if integer else "float"
    numbers = [str(x) if integer else f"{x:.9g}" for x in samples.reshape(-1).tolist()]
    lines = [f"#define WINDOWS {windows}", f"#define STEPS {steps}"]
    lines += [f"static const {entry} samples[{windows}][{steps}][{features}] = {{", ", ".join(numbers), "};"]
    (folder / "samples.h").write_text("\n".join(lines))
    (folder / "firmware.c").write_text(FIRMWARE.replace("ENTRY", entry))
    (folder / "firmware.ld").write_text(LINKER)
    flags = [*M4, "-Os", "-ffreestanding", "-nostdlib", "-Wno-missing-braces", "-fno-tree-loop-distribute-patterns"]
    sources = ["firmware.c", "model.c"]
    subprocess.run([GCC, *flags, "-T", "firmware.ld", "-o", "model.elf", *sources, "-lgcc"], cwd=folder, check=True)
    machine = [QEMU, "-M", "mps2-an386", "-display", "none", "-monitor", "none", "-serial", "none", "-icount", "shift=0"]
    machine += ["-semihosting-config", "enable=on,target=native", "-kernel", "model.elf"]
    answer = subprocess.run(machine, cwd=folder, capture_output=True, text=True, timeout=300)
    words = [int(word, 16) for word in (answer.stdout + answer.stderr).split()]
    bits = np.array(words[:-1], np.uint32)
    outputs = bits.astype(np.uint16).view(np.int16) if integer else bits.view(np.float32)
    return outputs.reshape(windows, -1), words[-1] * INSTRUCTIONS_PER_TICK / (windows * steps)


def code_size(folder):
    """The bytes of machine code of a model, without its constants."""
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-ffreestanding", "-Os"]
    subprocess.run([GCC, *M4, *flags, "-c", "-o", "model.o", "model.c"], cwd=folder, check=True)
    sections = subprocess.run(["arm-none-eabi-size", "-A", "model.o"], cwd=folder, check=True, capture_output=True, text=True)
    return next(int(line.split()[1]) for line in sections.stdout.splitlines() if line.startswith(".text"))

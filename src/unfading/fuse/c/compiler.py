"""The machine's C compiler: which one it is, what tells it from another, and how it is called.

`$CC` is obeyed or refused, never replaced; without it the first of cc, gcc and clang on PATH serves. What a library is
filed under is told without running anything: the compiler by path, size and time of change of its file, since asking for
its version would cost 10 ms in every process; the processor by what the system says of it. A wrapper that hides a changed
compiler thus goes on giving the old library, which is still a right one.
"""

import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

# -ffast-math is not here, nor any part of it that moves NaN, inf or signed zero: linked with it, a library flushes denormals
# for the whole process. Loops over features say themselves that they are to be vectorised, which -fopenmp-simd reads, and no
# runtime of OpenMP is needed; beyond that -O3 gains nothing here and compiles three times as long.
FLAGS = (
    "-O2",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-shared",
    "-fPIC",
    "-std=gnu11",
)

# The first that the compiler takes is added: some for ARM know only the second, and some neither. Which one that is follows
# from compiler and processor, so a library can be filed without asking.
NATIVE = ("-march=native", "-mcpu=native")

NAMES = ("cc", "gcc", "clang")

# What /proc/cpuinfo says of one processor and not of one moment, over the architectures.
CPU_FIELDS = re.compile(
    r"(vendor_id|cpu family|model|model name|stepping|flags|cpu|isa|uarch|mvendorid|marchid|mimpid|features"
    r"|cpu (implementer|architecture|variant|part|revision))\s*:",
    re.IGNORECASE,
)


class NoCompiler(Exception):
    """Nothing could be compiled here; the text is the reason, in words and without a full stop."""


class Compiler(NamedTuple):
    """How the compiler is called, and what tells it from every other."""

    command: tuple[str, ...]  # the program, then the arguments that $CC carries
    identity: str


def find() -> Compiler:
    """The compiler that this process is to use, looked for anew at each call."""
    if os.name != "posix":
        raise NoCompiler("compiled loops are made on Linux and macOS only")
    wanted = os.environ.get("CC", "").strip()
    if not wanted:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            raise NoCompiler(f"no C compiler was found: none of {', '.join(NAMES)} is on PATH; install one or set CC")
        return _identified((os.path.abspath(found),))
    try:
        program, *arguments = shlex.split(wanted)
    except ValueError as error:
        raise NoCompiler(f"CC={wanted!r} cannot be read as a command: {error}; mend it or unset it") from None
    found = shutil.which(program)
    if found is None:
        raise NoCompiler(f"CC={wanted!r} names {program!r}, which is no program on this machine; mend it or unset it")
    return _identified((os.path.abspath(found), *arguments))


def _identified(command: tuple[str, ...]) -> Compiler:
    # Every word that is a program: in "ccache gcc" the second one compiles.
    files = [os.path.realpath(path) for path in map(shutil.which, command) if path]
    stamps = [(path, (info := os.stat(path)).st_size, info.st_mtime_ns) for path in files]
    return Compiler(command, repr((command, stamps)))


@cache
def cpu() -> str:
    """The processor: its model and what it can do."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            # The first block speaks for all; on a large machine the whole file is slow to read.
            block = list(takewhile(str.strip, file))
    except OSError:
        block = []
    # Where there is no such file, macOS names the chip in the version of its kernel.
    told = [line for line in block if CPU_FIELDS.match(line)] or [os.uname().version]
    return os.uname().machine + "\n" + "".join(told)


def build(compiler: Compiler, source: Path, output: Path) -> None:
    """Compile the file `source` into the shared library `output`; what the compiler leaves lying goes beside it."""
    command = [*compiler.command, *flags(compiler), str(source), "-o", str(output), "-lm"]
    answer = _run(command, scratch=output.parent)
    if answer.returncode == 0 and output.is_file():
        return
    program = shlex.join(compiler.command)
    if answer.returncode == 0:
        raise NoCompiler(f"{program} reported success and made no library, so it is no C compiler; set CC to one")
    lines = [line.strip().replace(f"{source.parent}/", "") for line in answer.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r":\d+: .*error: ", line)]
    words = " | ".join((errors or lines)[:3]) or "it gave no message"
    raise NoCompiler(f"{program} failed with exit status {answer.returncode}: {words}")


@cache
def flags(compiler: Compiler) -> tuple[str, ...]:
    """The flags for this compiler, with the first of NATIVE that it takes."""
    for flag in NATIVE:
        if _run([*compiler.command, flag, "-fsyntax-only", "-x", "c", os.devnull]).returncode == 0:
            return (*FLAGS, flag)
    return FLAGS


def version(compiler: Compiler) -> str:
    """The first line of what the compiler says of itself."""
    answer = _run([*compiler.command, "--version"])
    return (answer.stdout.splitlines() or ["it does not tell its version"])[0]


def _run(command: list[str], scratch: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(scratch)} if scratch else None
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", env=environment
        )
    except OSError as error:
        raise NoCompiler(f"{command[0]} cannot be run: {error.strerror}; set CC to a C compiler") from None

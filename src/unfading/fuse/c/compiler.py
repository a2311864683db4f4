"""The C compiler of this machine: which one it is, how it is identified, and how it is called.

`$CC` is used or refused, never replaced; without it, the first of cc, gcc and clang on PATH is used. A stored library is
identified without running anything: the compiler by path, size and modification time of its file, since asking for its version
would cost 10 ms in every process; the processor by the system's description. A wrapper script around a changed compiler thus
still gives the old library, which is still correct.

A compilation may take `$UNFADING_COMPILE_SECONDS`, 300 by default. The compiler runs in a session of its own, so that it can be
stopped with all programs it started, and so that a Ctrl-C in the terminal reaches this process alone.
"""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from unfading.errors import NoKernel

# No -ffast-math, nor any part of it that changes NaN, inf or signed zero: a library linked with it flushes denormals in the
# whole process. No product is joined with a sum, which would round once where torch rounds twice, and not in every function
# alike: a comparison could be decided one way in the forward pass and another way in the backward pass. Where the join pays,
# it is written out (`step.h`) or allowed (`products.c`). Loops over features carry pragmas for vectorisation, which
# -fopenmp-simd reads, and no runtime of OpenMP is needed. Beyond that, -O3 gains nothing here and takes three times as long to
# compile.
FLAGS = (
    "-O2",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-std=gnu11",
)

# The first flag that the compiler accepts is added: some compilers for ARM know only the second, and some neither. Which one
# it is follows from compiler and processor, so a library is identified without asking.
NATIVE = ("-march=native", "-mcpu=native")

NAMES = ("cc", "gcc", "clang")

# Seconds for a compilation, unless $UNFADING_COMPILE_SECONDS is set; and for a question, which takes milliseconds.
COMPILE_SECONDS = 300.0
QUESTION_SECONDS = 20.0
# Compilers that did not answer a question, with the reason; this process does not ask them again.
_hanging: dict["Compiler", str] = {}

# The fields of /proc/cpuinfo that describe the processor and not its present state, over the architectures.
CPU_FIELDS = re.compile(
    r"(vendor_id|cpu family|model|model name|stepping|flags|cpu|isa|uarch|mvendorid|marchid|mimpid|features"
    r"|cpu (implementer|architecture|variant|part|revision))\s*:",
    re.IGNORECASE,
)


class NoCompiler(NoKernel):
    """C source cannot be compiled here; the message is the reason, without a full stop."""


class Compiler(NamedTuple):
    """How the compiler is called, and a text that identifies it."""

    command: tuple[str, ...]  # the program, then the arguments that $CC carries
    identity: str


def find() -> Compiler:
    """The compiler that this process uses, searched for at each call."""
    if os.name != "posix":
        raise NoCompiler("loops are compiled on Linux and macOS only")
    wanted = os.environ.get("CC", "").strip()
    if not wanted:
        path = next(filter(None, map(shutil.which, NAMES)), None)
        if path is None:
            raise NoCompiler(f"no C compiler was found: none of {', '.join(NAMES)} is on PATH; install one or set CC")
        return _identified((os.path.abspath(path),))
    try:
        program, *arguments = shlex.split(wanted)
    except ValueError as error:
        raise NoCompiler(f"CC={wanted!r} cannot be read as a command: {error}; correct it or unset it") from None
    path = shutil.which(program)
    if path is None:
        raise NoCompiler(f"CC={wanted!r} names {program!r}, which is not a program on this machine; correct it or unset it")
    return _identified((os.path.abspath(path), *arguments))


def _identified(command: tuple[str, ...]) -> Compiler:
    # Every word that is a program: in "ccache gcc" the second one compiles.
    files = [os.path.realpath(path) for path in map(shutil.which, command) if path]
    stamps = [(path, (info := os.stat(path)).st_size, info.st_mtime_ns) for path in files]
    return Compiler(command, repr((command, stamps)))


@cache
def cpu() -> str:
    """The processor: its model and its capabilities."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            # The first block stands for all cores; on a large machine the whole file is slow to read.
            block = list(takewhile(str.strip, file))
    except OSError:
        block = []
    # macOS has no such file, and names the chip in the version of its kernel.
    lines = [line for line in block if CPU_FIELDS.match(line)] or [os.uname().version]
    return os.uname().machine + "\n" + "".join(lines)


def seconds() -> float:
    """The time limit of a compilation."""
    allowed = "number of seconds above 0"
    return from_environment("UNFADING_COMPILE_SECONDS", COMPILE_SECONDS, lambda number: 0 < number <= 1e6, allowed)


def from_environment(name: str, default: float, valid: Callable[[float], bool], allowed: str) -> float:
    """The number that an environment variable holds.

    Args:
        name: of the variable.
        default: the number where it is not set.
        valid: whether a number may be used.
        allowed: which numbers these are, in words.
    """
    text = os.environ.get(name, "").strip()
    try:
        number = float(text) if text else default
    except ValueError:
        number = math.nan
    if not valid(number):
        raise NoCompiler(f"{name}={text!r} is not a {allowed}; correct it or unset it")
    return number


def build(compiler: Compiler, source: Path, output: Path) -> None:
    """Compile the file `source` into the shared library `output`. Temporary files of the compiler go into the same folder."""
    command = [*compiler.command, *flags(compiler), str(source), "-o", str(output), "-lm"]
    limit = seconds()
    program = shlex.join(compiler.command)
    try:
        answer = _run(command, limit, scratch=output.parent)
    except subprocess.TimeoutExpired:
        raise NoCompiler(
            f"{program} did not finish within {limit:g} s and was stopped; set UNFADING_COMPILE_SECONDS to a longer time, or "
            "CC to another compiler"
        ) from None
    if answer.returncode == 0 and output.is_file():
        return
    if answer.returncode == 0:
        raise NoCompiler(f"{program} reported success and made no library, so it is not a C compiler; set CC to one")
    lines = [line.strip().replace(f"{source.parent}/", "") for line in answer.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r":\d+: .*error: ", line)]
    words = " | ".join((errors or lines)[:3]) or "it gave no message"
    raise NoCompiler(f"{program} failed with exit status {answer.returncode}: {words}")


@cache
def flags(compiler: Compiler) -> tuple[str, ...]:
    """The flags for this compiler, with the first of NATIVE that it accepts."""
    for flag in NATIVE:
        if _ask(compiler, flag, "-fsyntax-only", "-x", "c", os.devnull).returncode == 0:
            return (*FLAGS, flag)
    return FLAGS


def version(compiler: Compiler) -> str:
    """The first line of the compiler's answer to --version."""
    answer = _ask(compiler, "--version")
    return (answer.stdout.splitlines() or ["it does not print its version"])[0]


def _ask(compiler: Compiler, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The compiler's answer to a question. One that hangs is stopped and not asked again."""
    if compiler in _hanging:
        raise NoCompiler(_hanging[compiler])
    limit = min(seconds(), QUESTION_SECONDS)
    try:
        return _run([*compiler.command, *arguments], limit)
    except subprocess.TimeoutExpired:
        _hanging[compiler] = (
            f"{shlex.join(compiler.command)} did not answer within {limit:g} s and was stopped; set CC to another compiler"
        )
        raise NoCompiler(_hanging[compiler]) from None


def _run(command: list[str], limit: float, scratch: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(scratch)} if scratch else None
    try:
        # A session of its own: Ctrl-C in a terminal goes to every process of the group. A compiler that it ended would look
        # like one that refuses the source, and a training step would run on another backend than all steps after it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise NoCompiler(f"{command[0]} cannot be run: {error.strerror}; set CC to a C compiler") from None
    try:
        output, errors = process.communicate(timeout=limit)
    except BaseException:
        # Time is up, or this process is interrupted: also the programs that the compiler started must end.
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)

"""The machine, the versions and the commit, as records of runs and benchmarks store them."""

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from unfading.fuse.c import compiler
from unfading.fuse.c.threads import cores as cores  # a property of the machine, too


def about(command: str) -> dict[str, Any]:
    """What a record holds in addition to its numbers."""
    return {
        "machine": {
            "cpu": cpu_name(),
            "cores": cores(),
            "threads": torch.get_num_threads(),
            # Only if the GPU is in use: initialising it just for its name costs seconds and memory.
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
            "system": platform.platform(terse=True),
        },
        "versions": {
            "unfading": sys.modules["unfading"].__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "compiler": _compiler(),
            **(_gpu_versions() if torch.cuda.is_initialized() else {}),
        },
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }


def cpu_name() -> str:
    """The name of the processor, as the system gives it."""
    name = re.search(r"^model name\s*:\s*(.+)$", compiler.cpu(), re.MULTILINE) if os.name == "posix" else None
    return name[1].strip() if name else platform.processor() or platform.machine()


def slug() -> str:
    """The machine, as part of a file name."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)|@.*|\bcpu\b|\bprocessor\b", " ", cpu_name().lower()))
    return "-".join([*words, f"{cores()}core"])


def gpu_slug() -> str:
    """The GPU, as part of a file name."""
    return "-".join(re.findall(r"[a-z0-9]+", torch.cuda.get_device_name().lower()))


def _gpu_versions() -> dict[str, Any]:
    """Versions of CUDA, cuDNN and Triton."""
    triton = None
    for name in ("triton", "pytorch-triton"):
        with suppress(PackageNotFoundError):
            triton = triton or version(name)
    return {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "triton": triton}


def _compiler() -> str | None:
    try:
        return compiler.version(compiler.find())
    except compiler.NoCompiler:
        return None


def commit() -> str | None:
    """The commit of the checkout that contains this package, if there is one.

    "-dirty" is added if files of the package differ from the commit. Other files do not matter: results that are written into
    the checkout would mark every run after the first.
    """
    folder = Path(__file__).parent
    if _git(folder, "ls-files", Path(__file__).name) is None:
        return None
    name = _git(folder, "describe", "--always", "--abbrev=10", "--exclude=*")
    return f"{name}-dirty" if name and _git(folder, "status", "--porcelain", "--", ".") else name


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None

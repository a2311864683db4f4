"""Triton source in, module out: written to the cache folder, for Triton reads the source of a kernel from a file.

What runs is the text at hand, not what the file says; the file is for Triton's reading of it, for tracebacks and for people.
"""

import atexit
import os
import shutil
import tempfile
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from unfading.fuse.c.cache import keep


class NoTriton(Exception):
    """The kernels of a GPU cannot be made here; the text says why."""


@cache
def triton_missing() -> str | None:
    """Why there is no Triton; None where there is."""
    if find_spec("triton") is None:
        return "Triton is not installed; `pip install triton` gives it on Linux"
    try:
        import triton.language  # noqa: F401
    except Exception as error:
        return f"Triton does not load: {error}"
    return None


def module(source: str) -> Any:
    """The names that a source text defines."""
    missing = triton_missing()
    if missing:
        raise NoTriton(missing)
    name = f"{sha256(source.encode()).hexdigest()[:32]}.py"
    path = keep(name, source.encode()) or _kept_here(name, source)
    names: dict[str, Any] = {"__name__": f"unfading_kernel_{path.stem}", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), names)
    return SimpleNamespace(**{key: value for key, value in names.items() if not key.startswith("__")})


@cache
def _private() -> Path:
    """A folder for this process alone, where the cache cannot be written or trusted."""
    made, own = Path(tempfile.mkdtemp(prefix="unfading-")), os.getpid()

    def remove() -> None:
        if os.getpid() == own:  # a forked child leaves it to its parent
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made


def _kept_here(name: str, source: str) -> Path:
    path = _private() / name
    path.write_text(source)
    return path

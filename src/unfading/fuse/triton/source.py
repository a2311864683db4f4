"""Turn Triton source into a module. The source is written to the cache folder, since Triton reads kernels from files.

The text in memory is what runs. The file serves Triton, tracebacks and readers.
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

from unfading.errors import NoKernel
from unfading.fuse.c.cache import write_file


class NoTriton(NoKernel):
    """Triton cannot be used here; the message is the reason, without a full stop."""


@cache
def triton_missing() -> str | None:
    """The reason why Triton cannot be used; None where it can."""
    if find_spec("triton") is None:
        return "Triton is not installed; on Linux, `pip install triton` installs it"
    try:
        import triton.language  # noqa: F401
    except Exception as error:
        return f"Triton does not load: {error}"
    return None


def module(source: str) -> Any:
    """The names that a source text defines, as a namespace."""
    missing = triton_missing()
    if missing:
        raise NoTriton(missing)
    name = f"{sha256(source.encode()).hexdigest()[:32]}.py"
    path = write_file(name, source.encode()) or _write_private(name, source)
    names: dict[str, Any] = {"__name__": f"unfading_kernel_{path.stem}", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), names)
    return SimpleNamespace(**{key: value for key, value in names.items() if not key.startswith("__")})


@cache
def _private() -> Path:
    """A folder of this process, for when the cache cannot be written or trusted."""
    folder, own = Path(tempfile.mkdtemp(prefix="unfading-")), os.getpid()

    def remove() -> None:
        if os.getpid() == own:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _write_private(name: str, source: str) -> Path:
    path = _private() / name
    path.write_text(source)
    return path

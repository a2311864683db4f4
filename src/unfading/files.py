"""Files that are either complete or absent: atomic writes, and JSON."""

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`; a reader, or a process killed at any moment, leaves the old file or the new one.

    The content goes to a temporary file beside `path`, reaches the disk, and then replaces `path`.
    """
    # A name of its own for each call: two threads may write one file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise OSError(f"{path} could not be written: {reason}. The previous file is unchanged.") from error
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as a JSON file, atomically."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or damaged one raises a ValueError of one sentence."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({error}).") from None

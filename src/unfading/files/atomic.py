"""Atomic writes: a file is either complete or absent."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


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

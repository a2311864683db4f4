"""A new folder with files: complete, or absent."""

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from unfading.files.atomic import write_atomically


def check_absent(folder: Path) -> None:
    """Raise ValueError if something exists at the path."""
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists; an export writes a new folder. Name another one, or remove it.")


def write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Write these texts as files of a new folder, which appears when all of them are written."""
    check_absent(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        for name, text in files.items():
            write_atomically(temporary / name, text.encode())
        check_absent(folder)
        os.rename(temporary, folder)
    except OSError as error:
        raise OSError(f"{folder} could not be written: {error.strerror or error}. Nothing was left there.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

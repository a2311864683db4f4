"""The source of a user's class: the file that defines it, and the modules beside it that the file imports.

my.py:MyCell                  my.py, and modules in the folder of my.py
my_package.cells:MyCell       modules in the folder that holds my_package

The files are read once. Their text in memory is what is hashed, stored with a run, sent to worker processes and executed, so a
file that is edited meanwhile changes nothing. Modules get names of their own, `unfading_user_<hash>.my`: two versions of a file
can be loaded in one process. Import statements in these files that name a module beside them get its text of the same version.

A package in site-packages is imported as it is, like torch; only the file of the class is hashed.
"""

import ast
import builtins
import hashlib
import importlib
import importlib.util
import json
import linecache
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from unfading.files import write_atomically

# Modules that are never taken from the folder of a user's file: a second copy of them would not work with the first.
NEVER_LOCAL = {*sys.stdlib_module_names, "unfading", "torch", "numpy"}
INSTALLED = {"site-packages", "dist-packages"}
# The module of a class that was defined in a notebook. Its source alone cannot be executed.
NOTEBOOK = "__main__"


@dataclass(frozen=True)
class UserCode:
    """The files of a user's class, as they were when they were read.

    Args:
        place: the file or the module, as the user names it: my.py, or my_package.cells.
        folder: the folder of the files; modules have the paths of their files there, even if those have changed.
        files: the content of each file, by its path in the folder; the first one defines the class.
        installed: the module is imported as it is, and the file serves its hash only.
    """

    place: str
    folder: str
    files: Mapping[str, bytes]
    installed: bool = False

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the file, or of all files if there are several."""
        hashes = {path: hashlib.sha256(text).hexdigest() for path, text in self.files.items()}
        if len(hashes) == 1:
            return next(iter(hashes.values()))
        return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()

    def module(self) -> ModuleType:
        """The module of the class. Equal files in one folder are executed once in a process."""
        if self.installed:
            return importlib.import_module(self.place)
        if self.place == NOTEBOOK:
            raise ValueError("this class was defined in a notebook. Give the class itself, e.g. load(path, cell=MyCell).")
        importer = _Importer(self)
        if not any(isinstance(each, _Importer) and each.package == importer.package for each in sys.meta_path):
            sys.meta_path.insert(0, importer)
        path = next(iter(self.files))
        try:
            return importlib.import_module(f"{importer.package}.{_module_name(path)}")
        except Exception as error:
            files = {os.path.join(self.folder, each) for each in self.files}
            lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
            where = f"{lines[-1].filename}, line {lines[-1].lineno}," if lines else os.path.join(self.folder, path)
            raise ValueError(f"{where} cannot be imported: {_sentence(error)}") from error

    def write(self, folder: Path) -> None:
        """Store the files in a folder, atomically; files that are there already stay."""
        for path, text in self.files.items():
            target = folder / path
            if not target.is_file() or target.read_bytes() != text:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, text)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values, for a worker process."""
        files = {path: text.decode("latin-1") for path, text in self.files.items()}
        return {"place": self.place, "folder": self.folder, "files": files, "installed": self.installed}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "UserCode":
        """The code of `to_json`."""
        return cls(**{**values, "files": {path: text.encode("latin-1") for path, text in values["files"].items()}})


def read_code(name: str, stored: Path | None = None) -> UserCode:
    """The source of the class `my.py:MyCell` or `my_package.cells:MyCell`, read now.

    Args:
        stored: a folder that `UserCode.write` has written, to read in place of the user's own files.
    """
    place = name.rpartition(":")[0]
    if place == NOTEBOOK:
        return _notebook_code(name, stored)
    if place.endswith(".py"):
        path = Path(place).resolve()
        source = (stored or path.parent) / path.name
        if not source.is_file():
            raise ValueError(f"{name!r} names a file that does not exist: {source}. Paths are relative to the current folder.")
        return UserCode(place, str(path.parent), _collect(stored or path.parent, path.name))
    return _module_code(name, place, stored)


def _notebook_code(name: str, stored: Path | None) -> UserCode:
    """The stored source of a class of a notebook."""
    file = f"{NOTEBOOK}.py"
    if stored is None or not (stored / file).is_file():
        raise ValueError(f"{name!r} is a class of a notebook. Give the class itself, e.g. load(path, cell=MyCell).")
    return UserCode(NOTEBOOK, str(stored), {file: (stored / file).read_bytes()})


def _module_code(name: str, place: str, stored: Path | None) -> UserCode:
    """The source of a class in a module that can be imported."""
    importlib.invalidate_caches()
    top = place.partition(".")[0]
    spec = importlib.util.find_spec(top) if top and top not in sys.builtin_module_names else None
    locations = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
    folder = Path(locations[0]).parent if locations else stored
    if folder is None:
        raise ValueError(
            f"{name!r} names a module that cannot be imported: there is no module named {top!r}. A file is named my.py:Class."
        )
    installed = top in NEVER_LOCAL or bool(INSTALLED & set(folder.parts))
    source = folder if stored is None or installed else stored
    path = _locate(source, place)
    if path is None:
        raise ValueError(
            f"{name!r} names a module that cannot be imported: {source} has no Python file of {place}. "
            "A file is named my.py:Class."
        )
    files = {path: (source / path).read_bytes()} if installed else _collect(source, path)
    return UserCode(place, str(folder), files, installed)


def _collect(folder: Path, first: str) -> dict[str, bytes]:
    """The content of a file and of all modules in the folder that it imports, directly or not, by their paths."""
    files: dict[str, bytes] = {}
    waiting = [first]
    while waiting:
        path = waiting.pop()
        if path not in files:
            files[path] = (folder / path).read_bytes()
            waiting += [each for name in _imports(folder / path, files[path], path) for each in _local(folder, name)]
    return files


def _imports(file: Path, text: bytes, path: str) -> Iterator[str]:
    """The names of all modules that import statements of a file name, also inside functions."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{file} cannot be imported: {_sentence(error)}") from None
    # Relative imports start at the package of the module.
    package = PurePosixPath(path).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package) + 1:
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            yield base
            # Each name may be a module too.
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _local(folder: Path, name: str) -> list[str]:
    """The files in the folder that an import of a module executes: its own and those of its packages."""
    parts = name.split(".")
    if parts[0] in NEVER_LOCAL or folder.name in INSTALLED:
        return []
    paths = [_locate(folder, ".".join(parts[:n])) for n in range(1, len(parts) + 1)]
    return [path for path in paths if path is not None]


def _locate(folder: Path, name: str) -> str | None:
    """The path of a module's file in the folder."""
    inside = name.replace(".", "/")
    return next((path for path in (f"{inside}/__init__.py", f"{inside}.py") if name and (folder / path).is_file()), None)


def _module_name(path: str) -> str:
    parts = [part.replace(".", "_") for part in PurePosixPath(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


class _Importer(MetaPathFinder, SourceLoader):  # type: ignore[misc]  # typeshed: its bases disagree
    """Finds and executes the modules of a user's code inside a package of their own."""

    def __init__(self, code: UserCode):
        self.code = code
        identity = repr((code.folder, next(iter(code.files)), code.digest))
        self.package = f"unfading_user_{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self.paths = {f"{self.package}.{_module_name(path)}": path for path in code.files}
        # The package itself, and folders without an __init__.py, have no code.
        names = [name.rsplit(".", n)[0] for name in self.paths for n in range(1, name.count(".") + 1)]
        self.packages = {name for name in names if name not in self.paths}
        self.local = {_module_name(path).partition(".")[0] for path in code.files}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in self.packages:
            return ModuleSpec(fullname, self, is_package=True)
        if fullname not in self.paths:
            return None
        # Not spec_from_file_location: it would search the user's folder for modules of a package.
        spec = ModuleSpec(fullname, self, origin=self.get_filename(fullname), is_package=self.is_package(fullname))
        spec.has_location = True
        return spec

    def get_filename(self, fullname: str) -> str:
        return os.path.join(self.code.folder, self.paths[fullname])

    def get_data(self, path: str | bytes) -> bytes:
        return self.code.files[PurePosixPath(os.path.relpath(os.fsdecode(path), self.code.folder)).as_posix()]

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self.packages:
            return
        if len(self.code.files) > 1:
            vars(module)["__builtins__"] = {**vars(builtins), "__import__": self._import}
        # Tracebacks and refusals show the lines that run. Entries without a time are not compared with the file.
        file, lines = self.get_filename(module.__name__), (self.get_source(module.__name__) or "").splitlines(keepends=True)
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
        super().exec_module(module)

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:  # with the arguments of `__import__`
        top = name.partition(".")[0]
        if level == 0 and top in self.local:
            module = importlib.import_module(f"{self.package}.{name}")
            if not fromlist:
                return sys.modules[f"{self.package}.{top}"]
            # Imports those of the names that are modules.
            return builtins.__import__(module.__name__, globals, locals, fromlist, 0)
        return builtins.__import__(name, globals, locals, fromlist, level)


def _sentence(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} in line {error.lineno}."
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

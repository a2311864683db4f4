"""Benchmark scripts as modules, results files, and planted faults."""

import importlib.util
import json
import sys

from tests.helpers.paths import ROOT

ABOUT = {
    "machine": {"cpu": "Some & Co <CPU>", "cores": 2},
    "versions": {"unfading": "0", "torch": "2", "compiler": "cc"},
    "commit": "abc",
    "date": "2026-01-01T00:00:00+00:00",
}


def plant(monkeypatch, where, change):
    """The fused loop goes wrong: `change` gets what a method of it returned."""
    owner, name = where
    whole = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments, **options: change(whole(*arguments, **options)))


def script(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    sys.path.insert(0, str(ROOT / "benchmarks"))  # a script may import another one
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


def written(path, results):
    path.write_text("".join(json.dumps(result.record(ABOUT)) + "\n" for result in results))
    return path

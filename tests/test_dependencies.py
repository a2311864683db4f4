"""The constraints file pins every package of the environment that `make` builds."""

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

# pip comes with Python, and the package itself is not a dependency.
NOT_PINNED = {"pip", "unfading"}


def name(text):
    """The canonical name of a package."""
    return re.sub(r"[-_.]+", "-", text).lower()


def pins(lines):
    """The version of each package that a line pins."""
    matches = [re.fullmatch(r"([\w.-]+)==([\w.!]+)", line) for line in lines if line.strip() and not line.startswith("#")]
    assert all(matches), "every line of constraints.txt is NAME==VERSION"
    return {name(match[1]): match[2] for match in matches}


def pinned_by_torch():
    """The packages that torch itself requires in one version, which depend on the index that torch comes from."""
    lines = importlib.metadata.requires("torch") or []
    matches = [re.match(r"([\w.-]+)(\[[\w,]+\])?\s*==\s*([\w.!]+)", line) for line in lines]
    return {name(match[1]) for match in matches if match}


def differences(pinned, installed, exempt):
    """One line for each installed package that is not pinned, or in another version. A local version (+cpu) does not count."""
    own = {package: version for package, version in installed.items() if package not in exempt}
    missing = [f"{package}=={version} is installed and not pinned" for package, version in own.items() if package not in pinned]
    other = [
        f"{package}=={version} is installed, and {pinned[package]} is pinned"
        for package, version in own.items()
        if package in pinned and version.partition("+")[0] != pinned[package]
    ]
    return sorted(missing + other)


def constraints():
    return pins((ROOT / "constraints.txt").read_text().splitlines())


def test_every_installed_package_is_pinned():
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve() or not (ROOT / ".venv" / "ready").exists():
        pytest.skip("this Python is not in the environment .venv that make builds")
    if (ROOT / ".venv" / "ready").stat().st_mtime < (ROOT / "constraints.txt").stat().st_mtime:
        pytest.skip(".venv is older than constraints.txt; make builds it again")
    installed = {name(each.name): each.version for each in importlib.metadata.distributions()}
    assert differences(constraints(), installed, NOT_PINNED | pinned_by_torch()) == []


def test_no_package_is_pinned_twice():
    lines = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert len(lines) == len({name(line) for line in lines})


def test_every_direct_dependency_is_pinned():
    lines = importlib.metadata.requires("unfading") or []
    direct = {name(re.match(r"[\w.-]+", line)[0]) for line in lines}
    assert direct
    assert direct <= constraints().keys()


def test_differences_are_found():
    pinned = {"torch": "2.13.0", "numpy": "2.4.6"}
    assert differences(pinned, {"torch": "2.13.0+cpu", "numpy": "2.4.6", "pip": "1"}, {"pip"}) == []
    assert differences(pinned, {"torch": "2.12.0"}, set()) == ["torch==2.12.0 is installed, and 2.13.0 is pinned"]
    assert differences(pinned, {"attrs": "1"}, set()) == ["attrs==1 is installed and not pinned"]

"""A griffe extension that shows the public names of `unfading` to the API reference as they are at run time.

griffe reads source code without running it. It cannot see the layer classes, which `layer(STARCell)` creates, and it cannot see
names that the package imports on demand. This extension imports the package and adds both to what griffe has read.
"""

import inspect
from typing import Any

import griffe

import unfading
from unfading import tasks

PACKAGES = {"unfading": unfading, "unfading.tasks": tasks}


class PublicNames(griffe.Extension):
    """Adds every name of `__all__` to the package, as a class where it is a layer and as an alias elsewhere."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        if pkg.path != "unfading":
            return
        for path, package in PACKAGES.items():
            module = pkg if path == "unfading" else pkg[path.removeprefix("unfading.")]
            for name in package.__all__:
                add(module, name, getattr(package, name))


def add(module: griffe.Module, name: str, value: Any) -> None:
    """Make `module.name` known to griffe."""
    if isinstance(value, type) and value.__module__ == module.path:
        module.set_member(name, layer_class(module, name, value))
        return
    home = f"{value.__module__}.{value.__qualname__}"
    # A function that is named like its own module (unfading.scan) is listed in the reference by its full path.
    shadows_a_module = home.startswith(f"{module.path}.{name}.")
    if home != f"{module.path}.{name}" and not shadows_a_module:
        module.set_member(name, griffe.Alias(name, home, parent=module))


def layer_class(module: griffe.Module, name: str, value: type) -> griffe.Class:
    """A class that exists at run time only: its docstring, and its constructor from its signature."""
    shown = griffe.Class(name, parent=module, docstring=docstring(value))
    constructor = griffe.Function("__init__", parent=shown, parameters=parameters(value))
    shown.set_member("__init__", constructor)
    return shown


def docstring(value: type) -> griffe.Docstring:
    return griffe.Docstring(inspect.getdoc(value) or "", lineno=1, parser="google")


def parameters(value: type) -> griffe.Parameters:
    own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    return griffe.Parameters(own, *map(parameter, inspect.signature(value).parameters.values()))


def parameter(given: inspect.Parameter) -> griffe.Parameter:
    by_keyword = given.kind is inspect.Parameter.KEYWORD_ONLY
    return griffe.Parameter(
        given.name,
        annotation=inspect.formatannotation(given.annotation),
        kind=griffe.ParameterKind.keyword_only if by_keyword else griffe.ParameterKind.positional_or_keyword,
        default=None if given.default is inspect.Parameter.empty else repr(given.default),
    )

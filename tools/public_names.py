"""A griffe extension that shows the public names of `unfading` to the API reference as they are at run time.

griffe reads source code without running it. It cannot see the layer classes, which `layer(STARCell)` creates, the docstrings
that are composed when a class is created (`Run`), nor the names that the package imports on demand. This extension imports the
package and adds all three to what griffe has read.
"""

import dataclasses
import inspect
from typing import Any

import griffe

import unfading
from unfading import export, nn, tasks

PACKAGES = {"unfading": unfading, "unfading.tasks": tasks, "unfading.export": export, "unfading.nn": nn}


class PublicNames(griffe.Extension):
    """Adds every name of `__all__` to its package."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        if pkg.path != "unfading":
            return
        for path, package in PACKAGES.items():
            module = pkg if path == "unfading" else pkg[path.removeprefix("unfading.")]
            for name in package.__all__:
                add(pkg, module, name, getattr(package, name))


def add(root: griffe.Module, module: griffe.Module, name: str, value: Any) -> None:
    """Make `module.name` known to griffe: a layer as a class of its own, anything else as an alias of where it is defined."""
    if isinstance(value, type) and value.__module__ == module.path:
        shown = griffe.Class(name, parent=module)
        module.set_member(name, shown)
        describe(shown, value)
        return
    home = f"{value.__module__}.{value.__qualname__}"
    module.set_member(name, griffe.Alias(name, home, parent=module))
    definition = root[home.removeprefix("unfading.")]
    written = definition.docstring.value if definition.docstring else ""
    if isinstance(value, type) and inspect.cleandoc(written) != inspect.getdoc(value):
        describe(definition, value)


def describe(shown: griffe.Class, value: type) -> None:
    """Docstring and constructor of a class, as they are at run time."""
    shown.docstring = griffe.Docstring(inspect.getdoc(value) or "", lineno=1, parser="google", parent=shown)
    shown.set_member("__init__", griffe.Function("__init__", parent=shown, parameters=parameters(value)))


def parameters(value: type) -> griffe.Parameters:
    fields = {field.name: field for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}
    own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    given = inspect.signature(value).parameters.values()
    return griffe.Parameters(own, *(parameter(each, fields.get(each.name)) for each in given))


def parameter(given: inspect.Parameter, field: "dataclasses.Field[Any] | None") -> griffe.Parameter:
    default = given.default
    if field is not None and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    by_keyword = given.kind is inspect.Parameter.KEYWORD_ONLY
    return griffe.Parameter(
        given.name,
        annotation=inspect.formatannotation(given.annotation).replace("typing.", ""),
        kind=griffe.ParameterKind.keyword_only if by_keyword else griffe.ParameterKind.positional_or_keyword,
        default=None if default is inspect.Parameter.empty else repr(default),
    )

"""Layers that are exported, and files of them."""

import torch
from torch.utils import _pytree

import unfading
from tests.helpers.variants import few_iterations, hidden_size, name
from tests.user.quiet import QuietCell
from unfading import catalogue

I = 3
STEPS, ROWS = torch.export.Dim("steps", min=2, max=1000), torch.export.Dim("rows", min=2, max=64)
CELLS = [*catalogue.cells(), QuietCell]


def built(cell, **keywords):
    torch.manual_seed(1)
    return unfading.layer(cell)(I, hidden_size(cell), **few_iterations(cell), **keywords)


def exported(module, *, strict=False, lengths=False):
    """The program of a module for any number of steps and rows."""
    device = next(module.parameters()).device
    x, shapes = torch.randn(5, 3, I, device=device), {"x": {0: STEPS, 1: ROWS}}
    if not lengths:
        return torch.export.export(module, (x,), dynamic_shapes=shapes, strict=strict)
    keywords = {"lengths": torch.tensor([5, 2, 3], device=device)}
    return torch.export.export(module, (x,), keywords, dynamic_shapes={**shapes, "lengths": {0: ROWS}}, strict=strict)


def save(folder, backend, cells):
    """Export and save layers with these cells, each with an input and its results."""
    for cell in cells:
        layer, x = built(cell, num_layers=2, bidirectional=True), torch.randn(6, 4, I)
        with unfading.use_backend(backend):
            program = exported(layer) if backend == "auto" else torch.export.export(layer, (x,))
        torch.export.save(program, folder / f"{name(cell)}.pt2")
        with unfading.use_backend("reference"):
            torch.save([x, *_pytree.tree_leaves(layer(x))], folder / f"{name(cell)}.pt")

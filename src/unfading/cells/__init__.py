"""Cells: one file per family, which opens with its equations. `unfading.catalogue` finds them by reading this folder."""

"""One file per family of cells; each opens with its equations. `unfading.catalogue` finds them by walking this folder."""

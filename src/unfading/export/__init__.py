"""Export of trained models to other runtimes.

unfading.export.c(model, "folder")                     freestanding C99 for small devices
twin = unfading.export.quantised(model, batches)       all-integer arithmetic, run in Python
"""

from unfading.export.quantised import Quantised, quantised
from unfading.export.write_c import c

__all__ = ["Quantised", "c", "quantised"]

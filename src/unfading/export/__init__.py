"""Export of trained models to other runtimes.

unfading.export.c(model, "folder")                     freestanding C99 for small devices
unfading.export.onnx(model, "model.onnx")              a file for ONNX runtimes
twin = unfading.export.quantised(model, batches)       all-integer arithmetic, run in Python
"""

from unfading.export.quantised_model import Quantised, quantised
from unfading.export.write_c import c
from unfading.export.write_onnx import onnx

__all__ = ["Quantised", "c", "onnx", "quantised"]

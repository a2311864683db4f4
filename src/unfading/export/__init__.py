"""Export of trained models to other runtimes.

unfading.export.c(model, "folder")                     freestanding C99 for small devices
unfading.export.onnx(model, "model.onnx")              a file for ONNX runtimes
unfading.export.executorch(model, "model.pte")         a file for ExecuTorch
unfading.export.report("weights.safetensors", "page.html")   memory, speed, scores and errors of a trained model
twin = unfading.export.quantised(model, batches)       all-integer arithmetic, run in Python
"""

from unfading.export.quantised_model import Quantised, quantised
from unfading.export.write_c import c
from unfading.export.write_executorch import executorch
from unfading.export.write_onnx import onnx
from unfading.export.write_report import report

__all__ = ["Quantised", "c", "executorch", "onnx", "quantised", "report"]

"""Activations whose decomposition by torch has another gradient than torch gives them, in the language of programs."""

import torch

from unfading.fuse.trace.values import Call, Row

ops = torch.ops.aten


def between(call: Call, x: Row, low: float, high: float) -> Row:
    """As clamp, but with gradient 0 at the bounds themselves: so torch has it in hardtanh and its kin."""
    above = call.map("where", call.map("le", x, low), low, x)
    return call.map("where", call.map("ge", above, high), high, above)


def hardtanh(call: Call) -> Row:
    return call.shaped(between(call, call.row(0), call.argument(1, "min_val", -1.0), call.argument(2, "max_val", 1.0)))


def hardsigmoid(call: Call) -> Row:
    x = call.row(0)
    gate = call.map("mul", between(call, call.map("add", x, 3.0), 0.0, 6.0), 1 / 6)
    return call.shaped(call.map("mul", x, gate) if call.packet is ops.hardswish else gate)


def soft_plus(call: Call, x: Row, beta: float, threshold: float) -> Row:
    """log(1 + exp(beta x)) / beta, or x where that is as good. A branch not taken must stay finite: 0 times infinity is NaN."""
    scaled = call.map("mul", x, beta)
    far = call.map("gt", scaled, threshold)
    curve = call.map("log1p", call.map("exp", call.map("where", far, 0.0, scaled)))
    return call.map("where", far, x, call.map("mul", curve, 1 / beta))


def softplus(call: Call) -> Row:
    return call.shaped(soft_plus(call, call.row(0), call.argument(1, "beta", 1.0), call.argument(2, "threshold", 20.0)))


def mish(call: Call) -> Row:
    x = call.row(0)
    return call.shaped(call.map("mul", x, call.map("tanh", soft_plus(call, x, 1.0, 20.0))))


def elu(call: Call) -> Row:
    x, alpha = call.row(0), call.argument(1, "alpha", 1.0)
    scale, inner = call.argument(2, "scale", 1.0), call.argument(3, "input_scale", 1.0)
    if call.packet is ops.celu:
        inner = 1 / alpha
    positive = call.map("gt", x, 0.0)
    curve = call.map("expm1", call.map("mul", call.map("where", positive, 0.0, x), inner))
    return call.shaped(call.map("where", positive, call.map("mul", x, scale), call.map("mul", curve, alpha * scale)))

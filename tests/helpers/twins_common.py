"""What the NumPy twins share: the nonlinearities, layer norm, and how the arrays of a state_dict are cut up."""

import numpy as np


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def relu(a):
    return np.maximum(a, 0)


PHI = {"tanh": np.tanh, "relu": relu, "sigmoid": sigmoid, "none": lambda a: a}


def affine(p):
    """The input's W and b."""
    return p["from_input.weight"], p.get("from_input.bias", 0.0)


def gates(p, count):
    """Per gate its own W_x, W_h, b, cut out of the stacked parameters."""
    W_x, W_h = np.split(p["from_input.weight"], count), [whole(W) for W in np.split(p["W_h"], count)]
    b = np.split(p["from_input.bias"], count) if "from_input.bias" in p else [0.0] * count
    return list(zip(W_x, W_h, b, strict=True))


def whole(W):
    """A square matrix whose row i is zero except in the group of entry i; stored are these parts of the rows."""
    H, D = W.shape
    full = np.zeros((H, H))
    for i in range(H):
        first = i // D * D
        full[i, first : first + D] = W[i]
    return full


def norms(p, o, name, count):
    """Per gate its layer norm (Ba et al. 2016): gain (a - mean) / sqrt(variance + 1e-5) + shift; nothing where it is off."""
    if not o.get("normalise"):
        return [lambda a: a] * count

    def norm(gain, shift):
        return lambda a: gain * (a - a.mean()) / np.sqrt(((a - a.mean()) ** 2).mean() + 1e-5) + shift

    return [norm(*gate) for gate in zip(p[f"{name}.gain"], p[f"{name}.shift"], strict=True)]


def states(*parts):
    return [np.array(part) for part in parts]

"""The equations of the convolutional cells once more, with sums over windows as the convolution: written from the papers.

x is [T, C, height, width], one row of the batch; the states are [T, H, height, width].
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tests.helpers.twins_common import sigmoid, states


def _pair(value):
    return (value, value) if isinstance(value, int) else tuple(value)


def convolution(v, W, o, b=0.0, *, padding="same", stride=(1, 1)):
    """One gate: out[n] = sum over the channels m of its group of the correlation of v[m] with the kernel W[n, m]."""
    groups, dilation = o.get("groups", 1), _pair(o.get("dilation", 1))
    spread = np.zeros((*W.shape[:2], *((k - 1) * d + 1 for k, d in zip(W.shape[2:], dilation, strict=True))))
    spread[:, :, :: dilation[0], :: dilation[1]] = W
    border = [k // 2 for k in spread.shape[2:]] if padding == "same" else _pair(padding)
    v = np.pad(v, [(0, 0), *((p, p) for p in border)])
    per_group = len(W) // groups
    out = []
    for n, kernels in enumerate(spread):
        first = n // per_group * W.shape[1]
        windows = sliding_window_view(v[first : first + len(kernels)], kernels.shape[1:], axis=(1, 2))
        out.append(np.einsum("myxij,mij->yx", windows, kernels))
    return np.array(out)[:, :: stride[0], :: stride[1]] + np.reshape(b, (-1, 1, 1))


def of_input(p, o, gates, x):
    """The convolutions of the input for each gate, bias included: gates x T arrays."""
    H = len(p["from_input.weight"]) // gates
    W = [p["from_input.weight"][i * H : (i + 1) * H] for i in range(gates)]
    b = np.split(p["from_input.bias"], gates) if "from_input.bias" in p else [0.0] * gates
    settings = {"padding": o.get("padding", "same"), "stride": _pair(o.get("stride", 1))}
    return [[convolution(x_t, W_g, o, b_g, **settings) for x_t in x] for W_g, b_g in zip(W, b, strict=True)]


def of_state(p, o, gates):
    """For each gate the convolution of a state, as a function."""
    return [lambda v, W=W: convolution(v, W, o) for W in np.split(p["W_h"], gates)]


def star(p, o, x):
    a_z, a_k = of_input(p, o, 2, x)
    (W_h,) = of_state(p, o, 1)
    h, hs = np.zeros_like(a_z[0]), []
    for z_t, k_t in zip(a_z, a_k, strict=True):
        k = sigmoid(k_t + W_h(h))
        h = np.tanh(h + k * (np.tanh(z_t) - h))  # as eq. 30 is printed
        hs.append(h)
    return states(hs)


def lstm(p, o, x):
    U_i, U_f, U_z, U_o = of_state(p, o, 4)
    gates = of_input(p, o, 4, x)
    h = c = np.zeros_like(gates[0][0])
    hs, cs = [], []
    for i, f, z, out in zip(*gates, strict=True):
        c = sigmoid(f + U_f(h)) * c + sigmoid(i + U_i(h)) * np.tanh(z + U_z(h))
        h = sigmoid(out + U_o(h)) * np.tanh(c)
        hs.append(h)
        cs.append(c)
    return states(hs, cs)


def forget_lstm(p, o, x):
    U_f, U_z = of_state(p, o, 2)
    gates = of_input(p, o, 2, x)
    h, hs = np.zeros_like(gates[0][0]), []
    for f, z in zip(*gates, strict=True):
        f = sigmoid(f + U_f(h))
        h = np.tanh(f * h + (1 - f) * np.tanh(z + U_z(h)))
        hs.append(h)
    return states(hs)


def gru(p, o, x):
    U_r, U_z, U_n = of_state(p, o, 3)
    gates = of_input(p, o, 3, x)
    h, hs = np.zeros_like(gates[0][0]), []
    for r, z, n in zip(*gates, strict=True):
        update = sigmoid(-(z + U_z(h)))  # of the candidate: one minus ours
        h = (1 - update) * h + update * np.tanh(n + U_n(sigmoid(r + U_r(h)) * h))
        hs.append(h)
    return states(hs)

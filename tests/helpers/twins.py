"""The papers' equations once more, in NumPy, one row of the batch at a time: written from the papers, not from the cells.

`twin(parameters, options, x)` takes the arrays of a cell's state_dict and x [T, I]; it returns the states after every step,
one array [T, n] per part of the state. The twins of convolutional cells take x [T, C, height, width].
"""

from functools import partial

import numpy as np

from tests.helpers import twins_convolutional as convolutional
from tests.helpers import twins_later as later
from tests.helpers import twins_structured as structured
from tests.helpers.twins_common import PHI, affine, gates, norms, relu, sigmoid, states, whole


def elman(p, o, x, phi="tanh"):
    ((W_x, W_h, b),) = gates(p, 1)
    (norm,) = norms(p, o, "norm", 1)
    h, hs = np.zeros(len(W_h)), []
    for x_t in x:
        h = PHI[o.get("activation", phi)](norm(W_x @ x_t + W_h @ h + b))
        hs.append(h)
    return states(hs)


def lstm(p, o, x):
    (Wi, Ui, bi), (Wf, Uf, bf), (Wz, Uz, bz), (Wo, Uo, bo) = gates(p, 4)
    n_i, n_f, n_z, n_o = norms(p, o, "norm", 4)
    p_i, p_f, p_o = p.get("peepholes", (0.0, 0.0, 0.0))
    h = c = np.zeros(len(Ui))
    hs, cs = [], []
    for x_t in x:
        i = sigmoid(n_i(Wi @ x_t + Ui @ h + p_i * c + bi))
        f = sigmoid(n_f(Wf @ x_t + Uf @ h + p_f * c + bf))
        z = np.tanh(n_z(Wz @ x_t + Uz @ h + bz))
        c = f * c + i * z
        o_t = sigmoid(n_o(Wo @ x_t + Uo @ h + p_o * c + bo))
        h = o_t * np.tanh(c)
        hs.append(h)
        cs.append(c)
    return states(hs, cs)


def gru(p, o, x):
    (Wr, Ur, br), (Wz, Uz, bz), (Wn, Un, bn) = gates(p, 3)
    (n_r, n_z), (n_n,) = norms(p, o, "norm_rz", 2), norms(p, o, "norm_n", 1)
    # STAR eq. 25-27: there z weighs the candidate, so its z is one minus ours.
    h, hs = np.zeros(len(Ur)), []
    for x_t in x:
        z = sigmoid(-n_z(Wz @ x_t + Uz @ h + bz))
        r = sigmoid(n_r(Wr @ x_t + Ur @ h + br))
        if o.get("reset_after"):
            n = np.tanh(n_n(Wn @ x_t + bn + r * (Un @ h + p.get("c_n", 0.0))))
        else:
            n = np.tanh(n_n(Wn @ x_t + Un @ (r * h) + bn))
        h = (1 - z) * h + z * n
        hs.append(h)
    return states(hs)


def forget_gate(p, x, update):
    (Wf, Uf, bf), (Wz, Uz, bz) = gates(p, 2)
    h, hs = np.zeros(len(Uf)), []
    for x_t in x:
        h = update(Wf @ x_t + Uf @ h + bf, np.tanh(Wz @ x_t + Uz @ h + bz), h)
        hs.append(h)
    return states(hs)


def janet(p, o, x):
    beta = o.get("beta", 1.0)
    return forget_gate(p, x, lambda s, z, h: sigmoid(s) * h + (1 - sigmoid(s - beta)) * z)


def forget_lstm(p, o, x):
    return forget_gate(p, x, lambda s, z, h: np.tanh(sigmoid(s) * h + (1 - sigmoid(s)) * z))


def ugrnn(p, o, x):
    return forget_gate(p, x, lambda s, z, h: sigmoid(s) * h + (1 - sigmoid(s)) * z)


def star(p, o, x):
    Wz, Wx = np.split(p["from_input.weight"], 2)
    bz, bk = np.split(p["from_input.bias"], 2) if "from_input.bias" in p else (0.0, 0.0)
    Wh = whole(p["W_h"])
    h, hs = np.zeros(len(Wz)), []
    for x_t in x:
        z = np.tanh(Wz @ x_t + bz)
        if o.get("shift"):
            # The released code, in its own sign: f keeps the state, and JANET's shift acts on the other side.
            f = -(Wx @ x_t + Wh @ h + bk)
            h = np.tanh(sigmoid(f) * h + (1 - sigmoid(f - o["shift"])) * z)
        else:
            k = sigmoid(Wx @ x_t + Wh @ h + bk)
            h = np.tanh((1 - k) * h + k * z)
        hs.append(h)
    return states(hs)


def fast_rnn(p, o, x):
    W, b = affine(p)
    alpha, beta = sigmoid(p["logits"])
    phi = PHI[o.get("activation", "tanh")]
    h, hs = np.zeros(len(p["U"])), []
    for x_t in x:
        h = beta * h + alpha * phi(W @ x_t + p["U"] @ h + b)
        hs.append(h)
    return states(hs)


def product(p, name):
    factors = [p[f"{name}.factors.{i}"] for i in range(2) if f"{name}.factors.{i}" in p]
    return factors[0] @ factors[1] if len(factors) == 2 else factors[0]


def fast_grnn(p, o, x):
    W, U = product(p, "W"), product(p, "U")
    zeta, nu = sigmoid(p["logits"])
    bz, bh = p.get("b", np.zeros((2, len(U))))
    h, hs = np.zeros(len(U)), []
    for x_t in x:
        z = PHI[o.get("gate_activation", "sigmoid")](W @ x_t + U @ h + bz)
        candidate = np.tanh(W @ x_t + U @ h + bh)
        h = (zeta * (1 - z) + nu) * candidate + z * h
        hs.append(h)
    return states(hs)


def incremental(p, o, x):
    """Eq. 9 with its two products, P [U (g + h) + W x + b], not the merged one of the cell."""
    W, b = affine(p)
    eye = np.eye(len(W))
    U = eye + product(p, "U")
    P = {None: U, 0: eye}.get(o.get("projection_rank"))
    P = eye + product(p, "P") if P is None else P
    phi, alpha = PHI[o.get("activation", "relu")], o.get("alpha", 1.0)
    table = sigmoid(p["eta"]) / alpha if o.get("bounded_eta") else p["eta"]
    h, hs = np.zeros(len(W)), []
    for m, x_m in enumerate(x):
        old = -h if o.get("minus") else h
        g = np.zeros_like(h) if o.get("from_zero") else h
        for eta in table[min(m, len(table) - 1)]:
            g = g + eta * (phi(P @ (U @ (g + old) + W @ x_m + b)) - alpha * (g + old))
        h = g
        hs.append(h)
    return states(hs)


def nru(p, o, x):
    """Eq. 9-17, head by head."""
    M, k1 = o.get("memory_size", 64), o.get("heads", 4)
    k2, norm = o.get("erase_heads", k1), o.get("norm", 5.0)
    g = relu if o.get("relu_heads") else (lambda a: a)
    H, (W_i, b) = len(p["W_h"]), affine(p)
    (n_h,) = norms(p, o, "layer_norm", 1)
    h, m = np.zeros(H), np.ones(M) if o.get("multiplicative") else np.zeros(M)
    hs, ms = [], []

    def directions(a, k):
        if o.get("factored", True):
            p_, q = np.split(a, 2)
            a = np.outer(p_, q)
        rows = g(a.reshape(k, M))
        return [row / max((np.abs(row) ** norm).sum() ** (1 / norm), 1e-12) for row in rows]

    for x_t in x:
        h = relu(n_h(p["W_h"][:, :H] @ h + W_i @ x_t + p["W_h"][:, H:] @ m + b))
        a = p["W_heads"][:, :H] @ h + p["W_heads"][:, H:] @ m + p.get("b_heads", 0.0)
        if "heads_from_input" in p:
            a = a + p["heads_from_input"] @ x_t
        rows_w = (len(a) - k1 - k2) * (np.sqrt(k1) / (np.sqrt(k1) + np.sqrt(k2)) if o.get("factored", True) else k1 / (k1 + k2))
        alpha, beta, write, erase = np.split(a, np.cumsum([k1, k2, round(rows_w)]))
        share = (k1, k2) if o.get("mean_over_heads") else (1, 1)
        change = sum(g(s) * v for s, v in zip(alpha, directions(write, k1), strict=True)) / share[0]
        change = change - sum(g(s) * v for s, v in zip(beta, directions(erase, k2), strict=True)) / share[1]
        m = m * change if o.get("multiplicative") else m + change
        hs.append(h)
        ms.append(m)
    return states(hs, ms)


TWINS = {
    "AntisymmetricRNN": structured.antisymmetric,
    "ATR": later.atr,
    "BR": later.br,
    "CFN": later.cfn,
    "ContinuousRNN": structured.continuous,
    "ConvForgetLSTM": convolutional.forget_lstm,
    "ConvGRU": convolutional.gru,
    "ConvLSTM": convolutional.lstm,
    "ConvSTAR": convolutional.star,
    "CoRNN": later.cornn,
    "DeepTransition": structured.deep_transition,
    "Elman": elman,
    "EquilibriumRNN": structured.equilibrium,
    "EURNN": structured.eurnn,
    "ExpRNN": later.exp_rnn,
    "FastGRNN": fast_grnn,
    "FastRNN": fast_rnn,
    "ForgetLSTM": forget_lstm,
    "FullUnitaryRNN": structured.full_unitary,
    "GatedAntisymmetricRNN": structured.gated_antisymmetric,
    "GatedLRU": later.gated_lru,
    "GORU": structured.goru,
    "GRU": gru,
    "IdentityRNN": partial(elman, phi="relu"),
    "IncrementalRNN": incremental,
    "IndRNN": later.ind_rnn,
    "JANET": janet,
    "LEM": later.lem,
    "LiGRU": later.ligru,
    "LinearRNN": partial(elman, phi="none"),
    "LipschitzRNN": later.lipschitz,
    "LMU": later.lmu,
    "LRU": later.lru,
    "LSTM": lstm,
    "MGU": later.mgu,
    "MinGRU": later.min_gru,
    "MinimalRNN": later.minimal_rnn,
    "MinLSTM": later.min_lstm,
    "MultiplicativeLSTM": later.multiplicative_lstm,
    "NAS": later.nas,
    "NBR": later.nbr,
    "NRU": nru,
    "OrthogonalRNN": partial(elman, phi="relu"),
    "PeepholeLSTM": lstm,
    "RAN": later.ran,
    "RecurrentHighway": structured.highway,
    "SCRN": later.scrn,
    "SGRN": later.sgrn,
    "SiRNN": incremental,
    "SLSTM": later.slstm,
    "SoftOrthogonalRNN": elman,
    "SpectralRNN": structured.spectral,
    "StableIncrementalRNN": structured.stable_incremental,
    "STAR": star,
    "StatisticalRNN": structured.statistical,
    "UGRNN": ugrnn,
    "UnICORNN": later.unicornn,
    "UnitaryRNN": structured.unitary,
}

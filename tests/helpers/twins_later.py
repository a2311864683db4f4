"""Twins of the cells that came after the three papers, written from their papers."""

import numpy as np
import scipy.linalg
import scipy.special

from tests.helpers.twins_common import PHI, affine, relu, sigmoid, states, whole
from tests.helpers.twins_structured import modrelu


def cornn(p, o, x):
    U, b = affine(p)
    dt, gamma, epsilon = o.get("dt", 0.042), o.get("gamma", 2.7), o.get("epsilon", 4.7)
    y = z = np.zeros(len(U))
    ys, zs = [], []
    for x_t in x:
        acceleration = np.tanh(np.hstack([U, p["V"], p["W"]]) @ np.concatenate([x_t, z, y]) + b) - gamma * y - epsilon * z
        z = z + dt * acceleration
        y = y + dt * z
        ys.append(y)
        zs.append(z)
    return states(ys, zs)


def unicornn(p, o, x):
    U, b = affine(p)
    alpha = o.get("alpha", 1.0)
    dt = o.get("dt", 0.1) * (0.5 + 0.5 * np.tanh(p["c"] / 2))
    y = z = np.zeros(len(U))
    ys, zs = [], []
    for x_t in x:
        z = z - dt * (np.tanh(p["w"] * y + U @ x_t + b) + alpha * y)
        y = y + dt * z
        ys.append(y)
        zs.append(z)
    return states(ys, zs)


def split(p, count):
    W, b = affine(p)
    return np.split(W, count), np.split(b, count) if np.ndim(b) else [0.0] * count


def lem(p, o, x):
    (V_d, V_e, V_z, V_y), (b_d, b_e, b_z, b_y) = split(p, 4)
    W_d, W_e, W_z = np.split(p["W"], 3)
    dt = o.get("dt", 1.0)
    y = z = np.zeros(len(V_y))
    ys, zs = [], []
    for x_t in x:
        d, e = dt * sigmoid(W_d @ y + V_d @ x_t + b_d), dt * sigmoid(W_e @ y + V_e @ x_t + b_e)
        z = z + d * (np.tanh(W_z @ y + V_z @ x_t + b_z) - z)
        y = y + e * (np.tanh(p["W_y"] @ z + V_y @ x_t + b_y) - y)
        ys.append(y)
        zs.append(z)
    return states(ys, zs)


def lipschitz(p, o, x):
    U, b = affine(p)
    beta, gamma, epsilon = o.get("beta", 0.75), o.get("gamma", 0.001), o.get("epsilon", 0.03)

    def matrix(M):
        return (1 - beta) * (M + M.T) + beta * (M - M.T) - gamma * np.eye(len(M))

    A, W = matrix(p["M_A"]), matrix(p["M_W"])
    h, hs = np.zeros(len(U)), []
    for x_t in x:
        h = h + epsilon * A @ h + epsilon * np.tanh(W @ h + U @ x_t + b)
        hs.append(h)
    return states(hs)


def exp_rnn(p, o, x):
    V = p["from_input.weight"]
    S = np.zeros((len(V), len(V)))
    S[np.triu_indices(len(V), 1)] = p["skew"]
    # i S is Hermitian up to sign, so its eigenvectors are orthonormal.
    angles, Q = np.linalg.eigh(1j * (S - S.T))
    W = (Q * np.exp(-1j * angles) @ Q.conj().T).real
    h, hs = np.zeros(len(V)), []
    for x_t in x:
        h = modrelu(W @ h + V @ x_t, p.get("b", 0.0))
        hs.append(h)
    return states(hs)


def ind_rnn(p, o, x):
    W, b = affine(p)
    h, hs = np.zeros(len(W)), []
    for x_t in x:
        h = PHI[o.get("activation", "relu")](W @ x_t + p["u"] * h + b)
        hs.append(h)
    return states(hs)


def candidate(o, a):
    return np.where(a >= 0, a + 0.5, sigmoid(a)) if o.get("positive") else a


def min_gru(p, o, x):
    (W_z, W_h), (b_z, b_h) = split(p, 2)
    h, hs = np.zeros(len(W_z)), []
    for x_t in x:
        z = sigmoid(W_z @ x_t + b_z)
        h = (1 - z) * h + z * candidate(o, W_h @ x_t + b_h)
        hs.append(h)
    return states(hs)


def min_lstm(p, o, x):
    (W_f, W_i, W_h), (b_f, b_i, b_h) = split(p, 3)
    h, hs = np.zeros(len(W_f)), []
    for x_t in x:
        f, i = sigmoid(W_f @ x_t + b_f), sigmoid(W_i @ x_t + b_i)
        h = f / (f + i) * h + i / (f + i) * candidate(o, W_h @ x_t + b_h)
        hs.append(h)
    return states(hs)


def mgu(p, o, x):
    (W_f, W_n), (b_f, b_n) = split(p, 2)
    U_f, U_n = np.split(p["W_h"], 2)
    h, hs = np.zeros(len(U_f)), []
    for x_t in x:
        f = sigmoid(W_f @ x_t + U_f @ h + b_f)
        h = (1 - f) * h + f * np.tanh(W_n @ x_t + U_n @ (f * h) + b_n)
        hs.append(h)
    return states(hs)


def ligru(p, o, x):
    (W_z, W_n), (b_z, b_n) = split(p, 2)
    U_z, U_n = np.split(p["W_h"], 2)
    h, hs = np.zeros(len(U_z)), []
    for x_t in x:
        z = sigmoid(W_z @ x_t + U_z @ h + b_z)
        h = z * h + (1 - z) * relu(W_n @ x_t + U_n @ h + b_n)
        hs.append(h)
    return states(hs)


def minimal_rnn(p, o, x):
    W, b = affine(p)
    h, hs = np.zeros(len(W)), []
    for x_t in x:
        z = np.tanh(W @ x_t + b)
        u = sigmoid(p["W_h"] @ h + p["from_candidate.weight"] @ z + p.get("from_candidate.bias", 0.0))
        h = u * h + (1 - u) * z
        hs.append(h)
    return states(hs)


def forget_and_input(p, x, update, read):
    """The loop of CFN and RAN: gates that read the input and `read` of the state."""
    (W_f, W_i), (U_f, U_i) = np.split(p["gates.from_input.weight"], 2), np.split(p["gates.W_h"], 2)
    b_f, b_i = np.split(p["gates.from_input.bias"], 2) if "gates.from_input.bias" in p else (0.0, 0.0)
    h, hs = np.zeros(len(U_f)), []
    for x_t in x:
        f, i = sigmoid(W_f @ x_t + U_f @ read(h) + b_f), sigmoid(W_i @ x_t + U_i @ read(h) + b_i)
        h = update(f, i, h, p["gates.to_candidate.weight"] @ x_t)
        hs.append(h)
    return states(hs)


def cfn(p, o, x):
    return forget_and_input(p, x, lambda f, i, h, a: f * np.tanh(h) + i * np.tanh(a), lambda h: h)


def ran(p, o, x):
    return forget_and_input(p, x, lambda f, i, c, a: f * c + i * a, np.tanh)


def scrn(p, o, x):
    A, b = affine(p)
    alpha = o.get("alpha", 0.95)
    h, s, hs, ss = np.zeros(len(A)), np.zeros(o.get("context_size", 40)), [], []
    for x_t in x:
        s = (1 - alpha) * (p["to_context.weight"] @ x_t) + alpha * s
        h = sigmoid(p["P"] @ s + A @ x_t + p["R"] @ h + b)
        hs.append(h)
        ss.append(s)
    return states(hs, ss)


def slstm(p, o, x):
    """Without the division by exp(m), whose place in the state is recomputed at the end of a step."""
    (W_i, W_f, W_z, W_o), (b_i, b_f, b_z, b_o) = split(p, 4)
    R_i, R_f, R_z, R_o = (whole(R) for R in np.split(p["W_h"], 4))
    h = c = n = m = np.zeros(len(R_i))
    rows = []
    for x_t in x:
        a = W_f @ x_t + R_f @ h + b_f
        f = np.exp(a) if o.get("exponential_forget") else sigmoid(a)
        i = np.exp(W_i @ x_t + R_i @ h + b_i)
        c = f * c + i * np.tanh(W_z @ x_t + R_z @ h + b_z)
        m = np.log(np.maximum(f * np.exp(m), i))
        n = f * n + i
        h = sigmoid(W_o @ x_t + R_o @ h + b_o) * c / n
        rows.append((h, c / np.exp(m), n / np.exp(m), m))
    return states(*zip(*rows, strict=True))


def lmu(p, o, x):
    W_x, b = affine(p)
    D, theta = o.get("memory_size", 32), o.get("theta", 100.0)
    A = np.array([[(2 * i + 1) * (-1.0 if i < j else (-1.0) ** (i - j + 1)) for j in range(D)] for i in range(D)]) / theta
    B = np.array([(2 * i + 1) * (-1.0) ** i for i in range(D)]) / theta
    exact = scipy.linalg.expm(A)
    B = np.linalg.solve(A, (exact - np.eye(D)) @ B)
    h, m, hs, ms = np.zeros(len(W_x)), np.zeros(D), [], []
    for x_t in x:
        u = (p["to_memory.weight"] @ x_t + p["e_h"] @ h + p["e_m"] @ m).item()
        m = exact @ m + B * u
        h = np.tanh(W_x @ x_t + p["W_h"] @ h + p["W_m"] @ m + b)
        hs.append(h)
        ms.append(m)
    return states(hs, ms)


def atr(p, o, x):
    W, U, b = p["from_input.weight"], p["W_h"], p.get("b", 0.0)
    h, hs = np.zeros(len(U)), []
    for x_t in x:
        add, subtract = W @ x_t + (U @ h + b), W @ x_t - (U @ h + b)
        h = sigmoid(add) * (W @ x_t) + sigmoid(subtract) * h
        hs.append(h)
    return states(hs)


def sgrn(p, o, x):
    W, b = affine(p)
    h, hs = np.zeros(len(W)), []
    for x_t in x:
        keep = sigmoid(W @ x_t + b + p["W_h"] @ h)
        h = np.tanh(keep * h + (1 - keep) * (W @ x_t + b))
        hs.append(h)
    return states(hs)


def bistable(p, x, read):
    """The loop of BR and NBR; `read` gives the terms of both gates that read the state."""
    (U_a, U_c), (b_a, b_c) = split(p, 2)
    h, hs = np.zeros(len(U_a)), []
    for x_t in x:
        r_a, r_c = np.split(read(h), 2)
        a = 1 + np.tanh(U_a @ x_t + r_a + b_a)
        c = sigmoid(U_c @ x_t + r_c + b_c)
        h = c * h + (1 - c) * np.tanh(p["to_candidate.weight"] @ x_t + a * h)
        hs.append(h)
    return states(hs)


def br(p, o, x):
    w_a, w_c = np.split(p["w"], 2)
    return bistable(p, x, lambda h: np.concatenate([w_a * h, w_c * h]))


def nbr(p, o, x):
    return bistable(p, x, lambda h: p["W_h"] @ h)


def multiplicative_lstm(p, o, x):
    (W_i, W_f, W_z, W_o), (b_i, b_f, b_z, b_o) = split(p, 4)
    M_i, M_f, M_z, M_o = np.split(p["W_m"], 4)
    h = c = np.zeros(len(W_i))
    hs, cs = [], []
    for x_t in x:
        # The transition matrix of this input: W_m diag(W_xm x) W_hm.
        transition = np.diag(p["to_m.weight"] @ x_t) @ p["W_h"]
        i, f = sigmoid(W_i @ x_t + M_i @ transition @ h + b_i), sigmoid(W_f @ x_t + M_f @ transition @ h + b_f)
        z, out = np.tanh(W_z @ x_t + M_z @ transition @ h + b_z), sigmoid(W_o @ x_t + M_o @ transition @ h + b_o)
        c = f * c + i * z
        h = np.tanh(c) * out
        hs.append(h)
        cs.append(c)
    return states(hs, cs)


def nas(p, o, x):
    """The drawing of the paper as a tree: eight leaves, of which one multiplies, then pairs of them, then pairs of these."""
    W, U = np.split(p["from_input.weight"], 8), np.split(p["W_h"], 8)
    b = np.split(p["b"], 8) if "b" in p else [0.0] * 8
    leaf = [sigmoid, relu, sigmoid, relu, np.tanh, sigmoid, np.tanh, sigmoid]
    h = c = np.zeros(len(U[0]))
    hs, cs = [], []
    for x_t in x:
        pairs = [(W[k] @ x_t, U[k] @ h + b[k]) for k in range(8)]
        n = [leaf[k](a * e if k == 3 else a + e) for k, (a, e) in enumerate(pairs)]
        c = np.tanh(np.tanh(n[0] * n[1]) + c) * np.tanh(n[2] + n[3])
        h = np.tanh(c * np.tanh(np.tanh(n[4] * n[5]) + sigmoid(n[6] + n[7])))
        hs.append(h)
        cs.append(c)
    return states(hs, cs)


def complex_rows(weight):
    """The complex array whose real parts are the first half of the rows and whose imaginary parts the second."""
    real, imaginary = np.split(weight, 2)
    return real + 1j * imaginary


def linear_unit(p, x, rate):
    """The loop of LRU and GatedLRU: rate(u) is the time step of each unit. u is the input after norm."""
    H = len(p["nu"])
    B, b = complex_rows(p["from_input.weight"][: 2 * H]), complex_rows(p.get("from_input.bias", np.zeros(2 * H))[: 2 * H])
    exponent = -np.exp(p["nu"]) + 1j * np.exp(p["theta"])
    h, hs, entered = np.zeros(H, dtype=complex), [], []
    for x_t in x:
        entering = p["enter.weight"] @ x_t + p.get("enter.bias", 0.0) if "enter.weight" in p else x_t
        u = (entering - entering.mean()) / np.sqrt(entering.var() + 1e-5)
        power = np.exp(exponent * rate(u))
        h = power * h + np.sqrt(1 - np.abs(power) ** 2) * (B @ u + b)
        hs.append(np.concatenate([h.real, h.imag]))
        entered.append(entering)
    return states(hs, entered)


def lru(p, o, x):
    return linear_unit(p, x, lambda u: 1.0)


def gated_lru(p, o, x):
    W, b = (each[-len(p["nu"]) :] for each in (p["from_input.weight"], p.get("from_input.bias", np.zeros_like(p["nu"]))))
    return linear_unit(p, x, lambda u: sigmoid(W @ u + b))


def linear_unit_output(p, hs, entered):
    """The nonlinear part of the block, for all steps: gelu by the error function, a gated linear unit, a skip connection."""
    h = np.array(hs)[:, : len(p["nu"])] + 1j * np.array(hs)[:, len(p["nu"]) :]
    real, minus_imaginary = np.split(p["C.weight"], 2, axis=1)
    read = (h @ (real - 1j * minus_imaginary).T).real
    v = read * (1 + scipy.special.erf(read / np.sqrt(2))) / 2
    values, gates = np.split(v @ p["to_output.weight"].T + p.get("to_output.bias", 0.0), 2, axis=1)
    return entered + values * sigmoid(gates)

"""The NumPy twins of cells whose recurrent matrix has a structure, or whose step is a solver's; `tests.twins` says what a
twin is."""

import numpy as np
from scipy.linalg import expm

from tests.helpers.twins_common import PHI, affine, relu, sigmoid, states


def householder(entries, H, r):
    """H_1 ... H_r, each written out as I - 2 v v^T / v^T v; v_k begins at coordinate k."""
    Y = np.zeros((H, r))
    Y[np.tri(H, r, dtype=bool)] = entries
    U = np.eye(H)
    for v in Y.T:
        U = U @ (np.eye(H) - 2 * np.outer(v, v) / (v @ v))
    return U


def spectral(p, o, x):
    W_x, b = affine(p)
    H = len(W_x)
    r = o.get("reflectors") or -(-H // 4)
    S = np.diag(2 * o.get("margin", 0.01) * (sigmoid(p["p"]) - 0.5) + 1)
    W_h = householder(p["U"], H, r) @ S @ householder(p["V"], H, r).T
    h, hs = np.zeros(H), []
    for x_t in x:
        h = PHI[o.get("activation", "relu")](W_x @ x_t + W_h @ h + b)
        hs.append(h)
    return states(hs)


def continuous(p, o, x):
    """Kag et al. eq. 1 over a gap d, as steps along dg/dt, not as the two weights of the cell."""
    W, b = affine(p)
    tau, alpha = o.get("tau", 1.0), o.get("alpha", 1.0)
    g, gs = np.zeros(len(W)), []
    for x_t in x:
        d = o.get("gap", 0.1)
        if o.get("gaps_in_input"):
            x_t, d = x_t[:-1], x_t[-1]
        drive = PHI[o.get("activation", "tanh")](p["U"] @ g + W @ x_t + b)
        if o.get("exponential"):
            # With the drive held, g decays to drive / alpha at the rate alpha / tau.
            g = drive / alpha + (g - drive / alpha) * np.exp(-alpha * d / tau)
        else:
            g = g + d * (drive - alpha * g) / tau
        gs.append(g)
    return states(gs)


def skew(entries, H):
    S = np.zeros((H, H))
    S[np.triu_indices(H, 1)] = entries
    return S - S.T


def antisymmetric(p, o, x):
    V, b = affine(p)
    A = skew(p["skew"], len(V)) - o.get("gamma", 0.01) * np.eye(len(V))
    h, hs = np.zeros(len(V)), []
    for x_t in x:
        h = h + o.get("epsilon", 0.1) * np.tanh(A @ h + V @ x_t + b)
        hs.append(h)
    return states(hs)


def gated_antisymmetric(p, o, x):
    V, V_z = np.split(p["from_input.weight"], 2)
    b, b_z = np.split(p["from_input.bias"], 2) if "from_input.bias" in p else (0.0, 0.0)
    A = skew(p["skew"], len(V)) - o.get("gamma", 0.01) * np.eye(len(V))
    h, hs = np.zeros(len(V)), []
    for x_t in x:
        z = sigmoid(A @ h + V_z @ x_t + b_z)
        h = h + o.get("epsilon", 0.1) * z * np.tanh(A @ h + V @ x_t + b)
        hs.append(h)
    return states(hs)


def highway(p, o, x):
    """One matrix per micro-step and transform: y, t and, uncoupled, c."""
    L, G = o.get("depth", 2), 2 if o.get("coupled", True) else 3
    H = p["R"].shape[1]
    W = p["from_input.weight"].reshape(G, H, -1)
    R = p["R"].reshape(L, G, H, H)
    b = np.append(p.get("from_input.bias", np.zeros(G * H)), p.get("b", np.zeros((L - 1) * G * H))).reshape(L, G, H)
    s, hs = np.zeros(H), []
    for x_t in x:
        for l in range(L):
            a = [(W[gate] @ x_t if l == 0 else 0.0) + R[l, gate] @ s + b[l, gate] for gate in range(G)]
            y, t = np.tanh(a[0]), sigmoid(a[1])
            c = sigmoid(a[2]) if G == 3 else 1 - t
            s = y * t + s * c
        hs.append(s)
    return states(hs)


def statistical(p, o, x):
    W_x, b_phi = affine(p)
    W_r, b_r = p["to_summary.weight"], p.get("to_summary.bias", 0.0)
    scales = o.get("scales", (0.0, 0.25, 0.5, 0.9, 0.99))
    mu, mus = [np.zeros(len(W_x)) for _ in scales], []
    for x_t in x:
        r = relu(W_r @ np.concatenate(mu) + b_r)
        phi = relu(np.hstack([W_x, p["W_phi"]]) @ np.concatenate([x_t, r]) + b_phi)
        mu = [a * mu_a + (1 - a) * phi for a, mu_a in zip(scales, mu, strict=True)]
        mus.append(np.concatenate(mu))
    return states(mus)


def modrelu(z, b):
    """z ReLU(|z| + b) / |z|; a complex |z| with the 1e-10 that gives it a gradient at 0, a real one as it is."""
    if not np.iscomplexobj(z):
        return np.sign(z) * relu(np.abs(z) + b)
    size = np.sqrt(np.abs(z) ** 2 + 1e-10)
    return z * relu(size + b) / size


def complex_states(p, x, W):
    """h <- modReLU(W h + V x), with W a function of a complex vector."""
    real, imaginary = np.split(p["from_input.weight"], 2)
    V = real + 1j * imaginary
    h, hs = np.zeros(len(V), dtype=complex), []
    for x_t in x:
        h = modrelu(W(h) + V @ x_t, p.get("b", 0.0))
        hs.append(np.concatenate([h.real, h.imag]))
    return states(hs)


def unitary(p, o, x):
    """W = D_3 R_2 F^-1 D_2 Pi R_1 F D_1, each factor in turn on the vector."""
    D_1, D_2, D_3 = np.exp(1j * p["phases"])
    v_1, v_2 = (re + 1j * im for re, im in p["reflections"])

    def R(v, z):
        return z - 2 * v * np.vdot(v, z) / np.vdot(v, v)

    def W(h):
        return D_3 * R(v_2, np.fft.ifft(D_2 * R(v_1, np.fft.fft(D_1 * h))[p["permutation"]]))

    return complex_states(p, x, W)


def full_unitary(p, o, x):
    """A = -A^*: a real skew part, an imaginary symmetric one."""
    H = len(p["from_input.weight"]) // 2
    upper = np.zeros((H, H))
    upper[np.triu_indices(H)] = p["symmetric"]
    A = skew(p["skew"], H) + 1j * (upper + upper.T - np.diag(np.diag(upper)))
    W = expm(A) if o.get("exponential") else np.linalg.inv(np.eye(H) - A / 2) @ (np.eye(H) + A / 2)
    return complex_states(p, x, lambda h: W @ h)


def rotations(p, o, H):
    """Q as a function of a vector, turned pair by pair."""
    if o.get("capacity") is None:
        strides = [H >> level for level in range(1, H.bit_length())]
        pairs = [(i, i + stride) for stride in strides for i in range(H) if i // stride % 2 == 0]
    else:
        pairs = [(i, i + 1) for layer in range(o["capacity"]) for i in range(layer % 2, H - 1, 2)]
    theta, phi = p["Q.theta"], p.get("Q.phi", np.zeros(len(pairs)))
    turns = []
    for t, e in zip(theta, np.exp(1j * phi), strict=True):
        turns.append(np.array([[e * np.cos(t), -e * np.sin(t)], [np.sin(t), np.cos(t)]]))

    def Q(h):
        z = np.array(h, dtype=complex)
        for pair, turn in zip(pairs, turns, strict=True):
            z[[*pair]] = turn @ z[[*pair]]
        return np.exp(1j * p["Q.omega"]) * z if "Q.omega" in p else z.real

    return Q


def eurnn(p, o, x):
    W, b = p["from_input.weight"], p.get("b", 0.0)
    if o.get("complex_state"):
        return complex_states(p, x, rotations(p, o, len(W) // 2))
    Q = rotations(p, o, len(W))
    h, hs = np.zeros(len(W)), []
    for x_t in x:
        h = modrelu(Q(h) + W @ x_t, b)
        hs.append(h)
    return states(hs)


def goru(p, o, x):
    U_r, U_g, U_c = np.split(p["from_input.weight"], 3)
    W_r, W_g = np.split(p["W"], 2)
    b_r, b_g, b_c = np.split(p["b"], 3) if "b" in p else (0.0, 0.0, 0.0)
    Q = rotations(p, o, len(U_r))
    h, hs = np.zeros(len(U_r)), []
    for x_t in x:
        r = sigmoid(U_r @ x_t + W_r @ h + b_r)
        g = sigmoid(U_g @ x_t + W_g @ h + b_g)
        c = modrelu(r * Q(h) + U_c @ x_t, b_c)
        h = g * h + (1 - g) * c
        hs.append(h)
    return states(hs)


def inner_steps(p, o, x, eta, f):
    """Kag et al. eq. 5 from g_0 = h: g <- g + eta (f(s, W x + b) - alpha s), s = g + h."""
    W, b = affine(p)
    h, hs = np.zeros(len(W)), []
    for m, x_m in enumerate(x):
        g = h
        for eta_k in eta[min(m, len(eta) - 1)]:
            g = g + eta_k * (f(g + h, W @ x_m + b) - o.get("alpha", 1.0) * (g + h))
        h = g
        hs.append(h)
    return states(hs)


def stable_incremental(p, o, x):
    """M s = alpha s - A (A^T s) + B (C^T s) - C (B^T s), each thin product by itself."""
    alpha, phi = o.get("alpha", 1.0), PHI[o.get("activation", "relu")]
    A, B, C = p["A"], p["B"], p["C"]

    def f(s, u):
        return phi(alpha * s - A @ (A.T @ s) + B @ (C.T @ s) - C @ (B.T @ s) + u)

    return inner_steps(p, o, x, sigmoid(p["eta"]) / alpha if o.get("bounded_eta") else p["eta"], f)


def deep_transition(p, o, x):
    """f = a tanh network that begins and ends with a tanh: U s + W x + b is what its first units take in."""
    layers = sorted(int(key.split(".")[1]) for key in p if key.startswith("f.") and key.endswith(".weight"))

    def f(s, u):
        a = np.tanh(p["U"] @ s + u)
        for n in layers:
            a = np.tanh(p[f"f.{n}.weight"] @ a + p.get(f"f.{n}.bias", 0.0))
        return a

    return inner_steps(p, o, x, p["eta"], f)


def equilibrium(p, o, x):
    """alpha s = phi(U s + W x_m + b) for every m at once, then h_m = s_m - h_{m-1}."""
    W, b = affine(p)
    phi, alpha = PHI[o.get("activation", "relu")], o.get("alpha", 1.0)
    s = np.zeros((len(x), len(W)))
    for _ in range(5000):
        s = phi(s @ p["U"].T + x @ W.T + b) / alpha
    h, hs = np.zeros(len(W)), []
    for s_m in s:
        h = s_m + h if o.get("minus") else s_m - h
        hs.append(h)
    return states(hs)

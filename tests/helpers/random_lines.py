"""The lines of a random step: each function draws its operands and adds a line or two (see `random_steps`)."""

import math

NEAR = 1e-6  # numbers that are compared differ by more, or are equal on purpose
LARGEST = 40  # entries of a value, per batch row


def _texts(several):
    return [text.strip() for text in several.replace("\n", ";").split(";") if text.strip()]


# Smooth, and finite with a finite derivative for every finite x.
SMOOTH = _texts("""
    -{x}; torch.exp(0.5 * {x}); torch.expm1(0.5 * {x}); torch.log(1 + {x} * {x}); torch.log1p({x}.square()); torch.tanh({x})
    torch.sigmoid({x}); torch.sqrt({x} * {x} + 0.5); torch.reciprocal(2.5 + torch.sin({x})); torch.sin({x}); torch.cos({x})
    torch.erf({x})
""")
COMPOSED = _texts("""
    F.silu({x}); F.softplus({x}); F.gelu({x}); F.gelu({x}, approximate="tanh"); F.mish({x}); F.logsigmoid({x}); {x} / 4
    2 - 0.5 * {x}; torch.tensor(0.7) * {x}; {x} * 1; {x} + 0; 0.3 * (0.5 * {x}); {x} + {x}; {x} - {x} * {x}; -(-{x} - 1)
    torch.ones_like({x}) - {x}; torch.full_like({x}, 0.3) * {x}; torch.zeros_like({x}) + 0.5; {x} + {x}.new_zeros(())
    ({x} - 0.2).to({x}.dtype); {x}.clone(); torch.rsqrt({x} ** 2 + 0.5); {x} ** 2; {x} ** 3; 1 / (1.5 + {x} * {x})
""")
EXPONENTS = [-3, -2, -1.5, -1, -0.5, 0, 0.3, 0.5, 1, 1.5, 2, 2.5, 3, 4, 7, 17]
SMOOTH_PAIRS = _texts("""
    {x} + {y}; {x} - {y}; {x} * {y}; {x} + -{y}; {x} - -{y}; {x} / (1.5 + {y} * {y}); {y} / (2 + torch.sin({x}))
    (1 + {x} * {x}) / (1 + {y} * {y}); torch.sigmoid({x}) * {x} + (1 - torch.sigmoid({x})) * {y}
    torch.lerp({x}, {y}, 0.3); torch.addcmul({x}, {x}, {y}, value=0.5); torch.addcdiv({x}, {y}, 1 + {x} * {x})
    torch.add({x}, {y}, alpha=0.5); torch.sub({x}, {y}, alpha=2); torch.rsub({x}, {y})
    {x} + ({y} - {x}).detach(); {x}.detach() * {y}
""")
# With a kink where x equals y.
COMPARED = _texts("""
    torch.maximum({x}, {y}); torch.minimum({x}, {y}); {x} - torch.maximum({x}, {y}).detach()
    torch.where({x} > {y}, {x}, torch.sin({y})); torch.where({x} >= {y}, {y}, 0.5); torch.where({x} < {y}, {x} * {y}, {x})
    torch.where({x} <= {y}, 0.0, {x}); torch.where({x} == {y}, {x}, 2 * {y}); torch.where({x} != {y}, {y}, {x})
    ({x} > {y}).to({x}.dtype) * {y}; ({x} <= {y}) * {x}; torch.where(({x} > {y}) & ({y} > -0.2), {x}, {y})
    torch.where(torch.logical_and({x} < {y}, {x} < 0.3), {x}, {y}); torch.logical_or({x} < {y}, {y} < -0.2) * {x}
    torch.logical_xor({x} < {y}, {x} > 0.3).to({x}.dtype) * {y}; ~({x} < {y}) * {y}
    {x}.bool() * (({x} < {y}) | ({x} > 0.3)) * {y}
""")
# Each with an expression whose zeros are its kinks.
KINKED = [
    ("torch.relu({x})", "{x}"),
    ("torch.abs({x})", "{x}"),
    ("torch.sign({x}) * (1 + {x})", "{x}"),
    ("{x}.clamp(-0.3, 0.4)", "({x} + 0.3) * ({x} - 0.4)"),
    ("{x}.clamp(min=-0.1)", "{x} + 0.1"),
    ("torch.clamp({x}, max=0.2)", "{x} - 0.2"),
    ("F.leaky_relu({x}, 0.1)", "{x}"),
    ("F.hardtanh({x}, -0.5, 0.5)", "{x} * {x} - 0.25"),
    ("F.elu({x})", "{x}"),
    ("torch.where({x} > 0.1, {x}, torch.tensor(0.1, dtype={x}.dtype))", "{x} - 0.1"),
]
# Ties in every entry, on purpose.
TIES = _texts("""
    torch.maximum({x}, {x}); torch.minimum({x}, {x}); torch.where({x} == {x}, torch.sin({x}), -{x})
    torch.where({x} != {x}, torch.sin({x}), {x} ** 2); torch.maximum({x}, {x}.clone()) * (({x} >= {x}) * {x})
    torch.stack([{x}, {x}], {axis}).amax({axis}); torch.stack([{x}, 0.5 * {x}, {x}], {axis}).amin({axis}, keepdim=True)
""")


def near(w, text):
    """Whether an expression is near zero in any entry."""
    return bool((w.run(text).abs() < NEAR).any())


def axis_text(w, x, axis):
    """An axis of features, counted from the front or from the back."""
    return axis + x.batched if w.number(0, 1) else axis - len(x.shape)


def smooth(w):
    x = w.pick()
    w.add(w.one(SMOOTH if w.number(0, 1) else COMPOSED).format(x=x.name), x.batched)


def power(w):
    x = w.pick()
    w.add(f"(0.8 + 0.3 * torch.sin({x.name})) ** {w.one(EXPONENTS)}", x.batched)


def kinked(w):
    x = w.pick()
    text, kink = w.one(KINKED)
    text = "torch.tanh({x})" if near(w, kink.format(x=x.name)) else text
    w.add(text.format(x=x.name), x.batched)


def tie(w):
    x = w.pick(lambda known: math.prod(known.shape) <= LARGEST // 3)
    w.add(w.one(TIES).format(x=x.name, axis=w.number(int(x.batched), len(x.shape) + x.batched)), x.batched)


def pair(w):
    x = w.pick()
    y = w.partner(x)
    w.add(w.one(SMOOTH_PAIRS).format(x=x.name, y=y.name), x.batched or y.batched)


def compared(w):
    x = w.pick()
    y = w.partner(x)
    close = near(w, f"{x.name} - {y.name}") or near(w, f"{y.name} + 0.2") or near(w, f"{x.name} - 0.3")
    text = "{x} - 0.5 * {y}" if close else w.one(COMPARED)
    w.add(text.format(x=x.name, y=y.name), x.batched or y.batched)


def stopped(w):
    x = w.pick()
    w.add(w.one(["{x}.detach()", "without_gradient({x})", "{x}.detach() * {x}"]).format(x=x.name), x.batched)


def linear(w):
    x = w.row()
    (k,), m, a, b = x.shape, w.one([*range(1, 10), 17, 33]), w.number(0, 2), w.number(0, 2)
    form = w.number(0, 9)
    if form == 0:
        text = w.one(["F.linear({x}, {W})", "{x} @ {W}.T", "torch.mm({x}, {W}.t())", "F.linear(0.5 * {x}, {W})"])
        text = text.format(x=x.name, W=w.weight((m, k)).name)
    elif form == 1:
        text = w.one(["F.linear({x}, {W}, {b})", "torch.addmm({b}, {x}, {W}.T, beta=0.5, alpha=2)"])
        text = text.format(x=x.name, W=w.weight((m, k)).name, b=w.weight((m,)).name)
    elif form == 2:
        text = f"{x.name} @ {w.weight((k, m)).name}"
    elif form == 3:
        text = f"F.linear({x.name}, {w.weight((m + a + b, k)).name}[{a}:{a + m}])"
    elif form == 4:
        text = f"F.linear({x.name}, {w.weight((m + a, k + b)).name}[{a}:, :{k}])"
    elif form == 5:
        text = f"{x.name} @ {w.weight((k + a + b, m)).name}.narrow(0, {a}, {k})"
    elif form == 6:
        y = w.row()
        text = f"F.linear(torch.cat([{x.name}, {y.name}], 1), {w.weight((m, k + y.shape[0])).name})"
    elif form == 7:
        y = w.pick(lambda known: known.batched and known.shape == x.shape)
        W = w.weight((m, k)).name
        text = f"F.linear({x.name}, {W}) - F.linear({y.name}, {W})"
    elif form == 8:
        text = f"{x.name} @ {w.weight((k,)).name}"
    else:
        y = w.pick(lambda known: known.batched and known.shape == x.shape)
        text = f"settled({x.name}, {y.name}, {w.weight((k, k)).name}, {w.number(1, 3)})"
    w.add(text, True)


def gates(w):
    """One product, cut into pieces that are used separately."""
    x = w.row()
    m, n = w.number(1, 4), w.number(2, 3)
    W = w.weight((n * m, x.shape[0])).name
    if w.number(0, 1):
        product = w.add(f"F.linear({x.name}, {W})", True).name
        pieces = [f"{product}[:, {i * m}:{(i + 1) * m}]" for i in range(n)]
    else:
        pieces = [f"F.linear({x.name}, {W}.chunk({n})[{i}])" for i in range(n)]
    w.add(f"torch.sigmoid({pieces[0]}) * torch.tanh({pieces[1]}) + 0.5 * {pieces[-1]}", True)


def piece(w):
    x = w.pick(lambda known: len(known.shape) >= 1)
    axis = w.number(0, len(x.shape) - 1)
    n, at = x.shape[axis], axis_text(w, x, axis)
    start = w.number(0, n - 1)
    stop = w.number(start + 1, n)
    colons = ":, " * (axis + x.batched)
    forms = [
        f"{x.name}[{colons}{start}:{stop}]",
        f"{x.name}[..., {start}:{stop}{', :' * (len(x.shape) - 1 - axis)}]",
        f"{x.name}.narrow({at}, {start}, {stop - start})",
        f"{x.name}[{colons}{start - n * w.number(0, 1)}]",
        f"{x.name}.select({at}, {start})",
        f"{x.name}.chunk({w.number(1, 3)}, {at})[0]",
        f"{x.name}.split({stop - start}, {at})[-1]",
        f"{x.name}.split([{start}, {stop - start}, {n - stop}], {at})[1]",
        f"{x.name}.unbind({at})[{start}]",
    ]
    w.add(w.one(forms), x.batched)


def joined(w):
    x = w.pick(lambda known: len(known.shape) >= 1 and math.prod(known.shape) <= LARGEST // 3)
    axis = w.number(0, len(x.shape) - 1)

    def fits(y):
        apart = [i for i in range(len(x.shape)) if len(y.shape) == len(x.shape) and x.shape[i] != y.shape[i]]
        same = len(y.shape) == len(x.shape) and apart in ([], [axis])
        return same and (x.batched or not y.batched) and math.prod(y.shape) <= LARGEST // 3

    parts = [x, w.pick(fits), *([w.pick(fits)] if w.number(0, 1) else [])]
    names = [y.name if y.batched == x.batched else f"{y.name}.expand(len(h0), {', '.join(map(str, y.shape))})" for y in parts]
    names = names[::-1] if w.number(0, 1) else names
    w.add(f"torch.cat([{', '.join(names)}], {axis_text(w, x, axis)})", x.batched)


def stacked(w):
    x = w.pick(lambda known: math.prod(known.shape) <= LARGEST // 3 and len(known.shape) < 3)
    others = [w.pick(lambda y: y.batched == x.batched and y.shape == x.shape).name for _ in range(w.number(1, 2))]
    w.add(f"torch.stack([{', '.join([x.name, *others])}], {w.number(int(x.batched), len(x.shape) + x.batched)})", x.batched)


def shaped(w):
    x = w.pick()
    rank, first = len(x.shape), int(x.batched)
    batch = "len(h0), " if x.batched else ""
    size = math.prod(x.shape)
    low = w.one([n for n in range(1, size + 1) if size % n == 0])
    forms = [f"{x.name}.reshape({batch}{low}, -1)", f"{x.name}.reshape({batch}{low}, 1, {size // low})"]
    if rank < 3:
        forms.append(f"{x.name}.unsqueeze({w.number(first, rank + first)})")
    if rank < 3 and size <= LARGEST // 3:
        at = w.number(first, rank + first)
        ones = ", ".join(["-1"] * at + ["3"] + ["-1"] * (rank + first - at))
        forms.append(f"{x.name}.unsqueeze({at}).expand({ones})")
    if rank == 1 and x.batched:
        forms.append(f"{x.name}.unflatten(1, ({low}, {size // low}))")
    if rank >= 2:
        order = w.draw_order(rank)
        forms.append(f"{x.name}.permute({', '.join(map(str, [*range(first), *(axis + first for axis in order)]))})")
        forms.append(f"{x.name}.transpose({first}, -1)")
        forms.append(f"{x.name}.flatten({first})")
        forms.append(f"{x.name}.squeeze({first})")
        forms.append(f"{x.name}.mT.contiguous()")
        forms.append(f"({x.name}.transpose(-1, -2) * 0.5).reshape({batch}-1)")
    w.add(w.one(forms), x.batched)


def outer(w):
    x, y = w.row(), w.row()
    if x.shape[0] * y.shape[0] > LARGEST:
        return smooth(w)
    forms = [
        "{x}.unsqueeze(2) * {y}.unsqueeze(1)",
        "{x}[:, None] + {y}[:, :, None]",
        "torch.bmm({x}.unsqueeze(2), {y}.unsqueeze(1))",
        "torch.einsum('bi,bj->bij', {x}, {y})",
    ]
    return w.add(w.one(forms).format(x=x.name, y=y.name), True)


def bmm(w):
    """A product of matrices that differ from batch row to batch row."""
    matrices = [known for known in w.known if known.batched and len(known.shape) == 2]
    A = w.one(matrices) if matrices and w.number(0, 2) else outer(w)
    if A is None:
        return
    m, n = A.shape
    fitting = [B for B in matrices if B.shape[0] == n and B.shape[1] * m <= LARGEST]
    if fitting and w.number(0, 1):
        B = w.one(fitting)
        w.add(f"torch.bmm({A.name}, {B.name})", True)
    elif m * m <= LARGEST and w.number(0, 1):
        w.add(f"{A.name} @ {A.name}.transpose(1, 2)", True)
    else:
        w.add(f"({A.name} @ {A.name}.mean(1).unsqueeze(2)).squeeze(2)", True)


def reduced(w):
    x = w.pick(lambda known: len(known.shape) >= 1)
    axes = sorted(w.draw_order(len(x.shape))[: w.number(1, len(x.shape))])
    count = math.prod(x.shape[axis] for axis in axes)
    dims = [axis_text(w, x, axis) for axis in axes]
    dim = dims[0] if len(dims) == 1 and w.number(0, 1) else dims
    keep = ", keepdim=True" if w.number(0, 1) else ""
    own = [axis + x.batched for axis in axes]
    first = x.probe.movedim(own, list(range(-len(own), 0))).flatten(-len(own)).sort(-1, descending=True).values
    sizes = first.abs().sort(-1, descending=True).values
    forms = [f"{x.name}.sum({dim}{keep})", f"{x.name}.mean({dim}{keep})", f"torch.logsumexp({x.name}, {dim}{keep})"]
    if count > 1:
        forms.append(f"torch.sqrt({x.name}.var({dim}{keep}) + 0.1)")
        forms.append(f"{x.name}.var({dim}, correction=0{keep})")
        if (first.var(-1) > 1e-2).all():
            forms.append(f"{x.name}.std({dim}{keep})")
        if ((first[..., 0] - first[..., 1]) > NEAR).all():
            forms.append(f"{x.name}.amax({dim}{keep})")
        if ((first[..., -2] - first[..., -1]) > NEAR).all():
            forms.append(f"torch.amin({x.name}, {dim}{keep})")
        if (sizes[..., 0] - sizes[..., 1] > NEAR).all():
            forms.append(f"torch.linalg.vector_norm({x.name}, float('inf'), {dim}{keep})")
    if sizes.min() > NEAR and (sizes[..., 0] > 0.05).all():
        order = w.one([1, 1.5, 2, 3])
        forms += [f"torch.linalg.vector_norm({x.name}, {order}, {dim}{keep})"] * 2
    w.add(w.one(forms), x.batched)


def normalised(w):
    x = w.pick(lambda known: len(known.shape) >= 1)
    n, name = x.shape[-1], x.name
    axis = axis_text(w, x, w.number(0, len(x.shape) - 1))
    forms = [f"torch.softmax({name}, {axis})", f"F.log_softmax({name}, {axis})"]
    forms.append(f"F.normalize({name} + 0.3, dim={axis}, eps=0.1)")
    if x.batched and n > 1 and (x.probe.var(-1) > 1e-2).all():
        forms.append(f"F.layer_norm({name}, ({n},))")
        forms.append(f"F.layer_norm({name}, ({n},), {w.weight((n,)).name}, {w.weight((n,)).name}, 1e-3)")
        if len(x.shape) == 2:
            forms.append(f"F.layer_norm({name}, {x.shape})")
    w.add(w.one(forms), x.batched)


LINES = [
    smooth,
    smooth,
    power,
    kinked,
    tie,
    pair,
    pair,
    compared,
    stopped,
    linear,
    linear,
    gates,
    piece,
    piece,
    joined,
    stacked,
]
LINES += [shaped, shaped, outer, bmm, reduced, reduced, normalised]


def new_state(w, i):
    """The new state i: a contraction of a value of the step, or one of the unusual results that a step may return."""
    h, n = f"h{i}", w.states[i]
    odd = w.number(0, 11)
    if odd == 0 and i > 0:  # a delay line, an input, an unchanged state, or zero
        others = [known.name for known in w.known if known.batched and known.shape == (n,) and known.name[0] in "xh"]
        return w.one([*others, f"torch.zeros_like({h})"])
    x = w.pick(lambda known: known.name.startswith("v"))
    x = w.add(f"{x.name}.reshape(len(h0), -1)" if x.batched else f"{x.name}.reshape(1, -1).expand(len(h0), -1)", True)
    (m,) = x.shape
    if odd == 1:  # one number in all entries
        return f"0.5 * torch.tanh({x.name}[:, -1:]).expand(-1, {n})"
    if m > n:
        start = w.number(0, m - n)
        x = w.add(f"{x.name}[:, {start}:{start + n}] + 0.5 * {x.name}.mean(1, keepdim=True)", True)
    elif m < n:
        x = w.add(f"torch.cat([{x.name}, {h}[:, {m}:]], 1)", True)
    k = w.number(0, n)
    forms = [
        "0.5 * torch.tanh({v})",
        "0.6 * {h} + 0.3 * torch.tanh({v})",
        "(1 - torch.sigmoid({v})) * {h} + torch.sigmoid({v}) * torch.sin({v})",
        "torch.cat([0.5 * {h}[:, :{k}], 0.5 * torch.tanh({v})[:, {k}:]], 1)",
        "torch.sin({v})",
        "torch.sigmoid({v} - {h})",
    ]
    return w.one(forms).format(v=x.name, h=h, k=k)


def with_the_rest(w, text):
    """A new state that also depends on every value that is not used otherwise."""
    rest = [f"size({known.name}, {known.batched})" for known in w.known if known.name in w.unused and known.name[0] == "v"]
    return f"{text} + 0.1 * torch.tanh({' - '.join(rest)})" if rest else text

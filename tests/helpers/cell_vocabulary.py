"""What a user's random cell is written with: attributes, projections and lines of a step (see `user_cells`).

Every entry is text. In a line, `{x}`, `{y}` and `{z}` stand for numbers, `{c}` and `{d}` for conditions, `{k}` for a number in
Python, `{n}` for the size of the last axis of x, `{H}` for the hidden size, `{W}` for a matrix.
"""

from typing import NamedTuple


class Reading(NamedTuple):
    """Something that a cell can read a number from, and how a user may change it between two calls.

    `{a}` is the name of the attribute, `{A}` the same in capitals, `{u}` and `{v}` are two numbers.
    """

    number: str  # the expression that reads it, inside a method
    init: str = ""  # lines of __init__
    changes: tuple[str, ...] = ()  # statements with `cell` in scope
    module: str = ""  # lines before the class
    body: str = ""  # lines of the class


def texts(several: str) -> list[str]:
    return [text.strip() for text in several.replace("\n", ";").split(";") if text.strip()]


CONFIG = """
@dataclass
class {A}Config:
    beta: float = {u}
    inner: list = field(default_factory=lambda: [{v}, {u}])
"""
SLOTS = """
class {A}Slots:
    __slots__ = ("beta",)
    def __init__(self, beta):
        self.beta = beta
"""
SUBMODULE = """
class {A}Module(nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = slope
"""
READINGS = [
    Reading("self.{a}", "self.{a} = {u}", ("cell.{a} = {v}", "cell.{a} = int(3)", "cell.{a} = -0.0")),
    Reading(
        "self.{a}[1]['k'][1][0]", "self.{a} = [{u}, {{'k': ({v}, [{u}])}}]",
        ("cell.{a}[1]['k'][1][0] = {v}", "cell.{a}[1]['k'] = (0, [{v}])", "cell.{a} = [0, {{'k': (0, [{v}])}}]"),
    ),
    Reading("self.{a}['p']['q']", "self.{a} = {{'p': {{'q': {u}}}}}", ("cell.{a}['p'].update(q={v})",)),
    Reading("self.{a}.beta", "self.{a} = SimpleNamespace(beta={u})", ("cell.{a}.beta = {v}",)),
    Reading("self.{a}.o.beta", "self.{a} = SimpleNamespace(o=SimpleNamespace(beta={u}))", ("cell.{a}.o.beta = {v}",)),
    Reading("self.{a}.beta", "self.{a} = {A}Config()", ("cell.{a}.beta = {v}",), CONFIG),
    Reading("self.{a}.inner[1]", "self.{a} = {A}Config()", ("cell.{a}.inner[1] = {v}",), CONFIG),
    Reading("self.{a}.beta", "self.{a} = {A}Slots({u})", ("cell.{a}.beta = {v}",), SLOTS),
    Reading("float(self.{a}[1])", "self.{a} = np.array([{v}, {u}])", ("cell.{a}[1] = {v}", "cell.{a} *= 0.5")),
    Reading("float(self.{a}['t'][0].sum())", "self.{a} = {{'t': [np.array([{u}, 0.1])]}}", ("cell.{a}['t'][0][0] = {v}",)),
    Reading("self.{a}.mean().item()", "self.{a} = np.array([[{v}, {u}]])", ("cell.{a}[0, 1] = {v}",)),
    Reading("self.{a}", "", ("type(cell).{a} = {v}", "cell.{a} = {v}"), body="{a} = {u}"),
    Reading("type(self).{a}", "", ("type(cell).{a} = {v}",), body="{a} = {u}"),
    Reading("self.{a}[1]", "", ("type(cell).{a}[1] = {v}", "cell.{a}[1] = {v}"), body="{a} = [{v}, {u}]"),
    Reading("self.{a}", "self._{a} = {u}", ("cell._{a} = {v}",), body="@property\ndef {a}(self):\n    return 2 * self._{a}"),
    Reading("self.{a}()", "self._{a} = {u}", ("cell._{a} = {v}", "type(cell).{a} = lambda self: {v}"),
            body="def {a}(self):\n    return self._{a}"),
    Reading("self.{a}()", "", ("type(cell).{a} = staticmethod(lambda: {v})",),
            body="@staticmethod\ndef {a}():\n    return {u}"),
    Reading("self.{a}.tolist()[1]", "self.register_buffer('{a}', torch.tensor([{v}, {u}]))",
            ("cell.{a}.fill_({v})", "cell.{a} = torch.full_like(cell.{a}, {v})", "cell.{a}[1] = {v}")),
    Reading("self.{a}[1].item()", "self.register_buffer('{a}', torch.tensor([{v}, {u}]))", ("cell.{a}.mul_(0.5)",)),
    Reading("float(self.{a}[0])", "self.register_buffer('{a}', torch.tensor([{u}]))", ("cell.{a}.data = cell.{a}.data * 0.5",)),
    Reading("self.{a}.item()", "self.{a} = nn.Parameter(torch.tensor({u}))", ("cell.{a}.data.fill_({v})",)),
    Reading("self.{a}.tolist()[0]", "self.{a} = torch.tensor([{u}, {v}])", ("cell.{a}[0] = {v}", "cell.{a} = cell.{a} * 0.5")),
    Reading("{A}", "", ("globals()['{A}'] = {v}",), "{A} = {u}"),
    Reading("{A}['p'][0]", "", ("{A}['p'][0] = {v}",), "{A} = {{'p': [{u}]}}"),
    Reading("self.{a}.slope", "self.{a} = {A}Module({u})", ("cell.{a}.slope = {v}", "cell.{a} = {A}Module({v})"), SUBMODULE),
    Reading("self.{a}[0].slope", "self.{a} = nn.ModuleList([{A}Module({u})])", ("cell.{a}[0].slope = {v}",), SUBMODULE),
    Reading("{{'soft': {u}, 'hard': {v}}}[self.{a}]", "self.{a} = 'soft'", ("cell.{a} = 'hard'",)),
    Reading("({u} if 'fast' in self.{a} else {v})", "self.{a} = {{'fast'}}", ("cell.{a}.discard('fast')", "cell.{a} = set()")),
    Reading("len(self.{a}) / 4", "self.{a} = [1, 2, 3]", ("cell.{a}.append(1)", "cell.{a}.clear()")),
    Reading("sum(self.{a})", "self.{a} = collections.deque([{u}, 0.1])", ("cell.{a}.append({v})",)),
    Reading("self.{a}['b']", "self.{a} = collections.OrderedDict(b={u})", ("cell.{a}['b'] = {v}",)),
    Reading("float(self.{a})", "self.{a} = fractions.Fraction(1, 4)", ("cell.{a} = fractions.Fraction(3, 4)",)),
    Reading("self.{a}[0][0]", "self.{a} = ([{u}], {v})", ("cell.{a}[0][0] = {v}",)),
    Reading("({u} if self.training else {v})", "", ()),
    Reading("getattr(self, self.{a})", "self.{a} = '{a}_one'\nself.{a}_one = {u}\nself.{a}_two = {v}",
            ("cell.{a} = '{a}_two'", "cell.{a}_one = {v}")),
    Reading("self.{a}.keywords['k']", "self.{a} = functools.partial(torch.add, k={u})", ("cell.{a}.keywords['k'] = {v}",)),
    Reading("max(self.{a}.values())", "self.{a} = dict(p={u}, q=0.1)", ("cell.{a}['p'] = {v}", "cell.{a}['r'] = 1.5")),
    Reading("self.{a}.get('z', {u})", "self.{a} = {{}}", ("cell.{a}['z'] = {v}",)),
    Reading("(self.{a} or {u})", "self.{a} = None", ("cell.{a} = {v}",)),
    Reading("getattr(self, '{a}', {u})", "", ("cell.{a} = {v}",)),
    Reading("self.{a}(2)", "box_{a} = [{u}]\nself.{a}_box = box_{a}\nself.{a} = lambda n: box_{a}[0] / n",
            ("cell.{a}_box[0] = {v}",)),
    Reading("self.input_size / 4", "", ()),
]  # fmt: skip

ACTS = [
    Reading("self.{a}({{x}})", "self.{a} = torch.tanh", ("cell.{a} = torch.sin", "cell.{a} = lambda v: {v} * v")),
    Reading("self.{a}({{x}})", "self.{a} = nn.LeakyReLU({u})", ("cell.{a}.negative_slope = {v}",
            "cell.{a}.register_forward_hook(lambda m, i, o: {v} * o)", "cell.{a} = nn.Tanh()")),
    Reading("self.{a}({{x}})", "self.{a} = nn.ELU({u})", ("cell.{a}.alpha = {v}",
            "cell.{a}.register_forward_pre_hook(lambda m, i: ({v} * i[0],))")),
    Reading("self.{a}({{x}})", "self.{a} = nn.Softplus(2.0)", ("cell.{a}.beta = 1.0", "cell.{a}.forward = torch.sin")),
    Reading("self.{a}({{x}})", "self.{a} = nn.Hardtanh(-0.5, 0.5)", ("cell.{a}.max_val = 1.0",)),
    Reading("self.{a}({{x}})", "self.{a} = nn.Sequential(nn.Tanh(), nn.Identity())", ("cell.{a}[1] = nn.Sigmoid()",
            "cell.{a}.append(nn.ReLU())")),
    Reading("self.{a}({{x}})", "self.{a} = {A}Curve({u})",
            ("cell.{a}.slope = {v}", "type(cell.{a}).__call__ = lambda self, v: v"),
            "class {A}Curve:\n    def __init__(self, slope):\n        self.slope = slope\n\n"
            "    def __call__(self, v):\n        return torch.tanh(self.slope * v)"),
    Reading("self.{a}({{x}})", "self.{a} = functools.partial({a}_curve, k={u})", ("cell.{a}.keywords['k'] = {v}",
            "cell.{a} = functools.partial({a}_curve, k={v})", "globals()['{a}_curve'] = lambda v, k: k * v"),
            "def {a}_curve(v, k):\n    return torch.sin(k * v)"),
    Reading("{a}_curve({{x}})", "", ("globals()['{a}_curve'] = torch.sin",),
            "def {a}_curve(v):\n    return {u} * torch.tanh(v)"),
    Reading("self.{a}({{x}})", "", ("type(cell).{a} = lambda self, v: {v} * v", "cell.{a} = torch.sin"),
            body="def {a}(self, v):\n    return {u} * torch.cos(v)"),
    Reading("self.{a}({{x}})", "self.{a} = nn.Dropout(0.5)", ("cell.{a}.p = 0.0",)),
    Reading("self.{a}['f']({{x}})", "self.{a} = {{'f': torch.erf}}", ("cell.{a}['f'] = torch.tanh",)),
]  # fmt: skip

# -- the lines of a step ------------------------------------------------------------------------------------------------------

SMOOTH = texts("""
    -{x}; torch.exp(0.5 * {x}); torch.expm1(0.5 * {x}); torch.log(1 + {x} * {x}); torch.log1p({x}.square()); torch.tanh({x})
    torch.sigmoid({x}); torch.sqrt({x} * {x} + 0.5); torch.reciprocal(2.5 + torch.sin({x})); torch.sin({x}); torch.cos({x})
    torch.erf({x}); F.silu({x}); F.softplus({x}); F.gelu({x}); F.gelu({x}, approximate="tanh"); F.mish({x}); F.logsigmoid({x})
    2 - 0.5 * {x}; torch.tensor(0.7) * {x}; {x} * 1; {x} + 0; {k} * (0.5 * {x}); {x} + {x}; {x} - {x} * {x}; -(-{x} - 1)
    torch.ones_like({x}) - {x}; torch.full_like({x}, {k}) * {x}; torch.zeros_like({x}) + 0.5; {x} + {x}.new_zeros(())
    {x}.clone(); torch.rsqrt({x} ** 2 + 0.5); {x} ** 2; {x} ** 3; 1 / (1.5 + {x} * {x}); (1.5 + {x} * {x}) ** -0.5
    (1 + {x}.abs()) ** 0.3; F.softsign({x}); F.tanhshrink({x}); {x}.square() / 2; 0.0 * {x}; {x} - 0; {k} * {x}; {x} + {k}
    {x} / (1 + {k} ** 2); torch.softmax({x}, -1); F.log_softmax({x}, -1) / 3; {x}.pow(2.0)
    torch.pow(1.5 + torch.sin({x}), -1.5); (0.3 * {x}) ** 1; {x} ** 0; {x}.mul(2).sub(1, alpha=0.5)
    {x}.neg().exp().add(1).reciprocal(); {x}.to(torch.get_default_dtype()).to({x}.dtype)
""")
# Not hardsigmoid, hardswish and celu with 0.7: torch has their gradients in float64 with a constant in float32.
KINKED = texts("""
    torch.relu({x}); {x}.abs(); torch.sign({x}) * (1 + {x}); {x}.clamp(-0.25, 0.5); {x}.clamp(min=-0.25)
    torch.clamp({x}, max=0.25); F.leaky_relu({x}, 0.1); F.hardtanh({x}, -0.5, 0.5); F.elu({x}); F.elu({x}, 0.5)
    F.celu({x}, 0.5); F.selu({x}); F.relu6({x})
    torch.where({x} > 0.25, {x}, torch.tensor(0.25, dtype={x}.dtype)); F.threshold({x}, 0.25, 0.5); F.softshrink({x}, 0.25)
    F.hardshrink({x}, 0.25); torch.where({x} == 0, 0.5, {x}); {x}.sgn(); {x}.clamp(0.5, -0.5); torch.clip({x}, -{k}, {k})
    {x}.clamp_min(0); {x}.clamp_max(0); torch.maximum({x}, {x}); torch.minimum({x}, {x}.clone())
    torch.maximum({x}, torch.zeros_like({x})); torch.minimum({x}, torch.zeros(()))
    torch.nn.functional.relu({x}) - F.relu(-{x})
""")
PAIRS = texts("""
    {x} + {y}; {x} - {y}; {x} * {y}; {x} + -{y}; {x} / (1.5 + {y} * {y}); {y} / (2 + torch.sin({x})); {x} + {k} * {y}
    torch.sigmoid({x}) * {x} + (1 - torch.sigmoid({x})) * {y}; torch.lerp({x}, {y}, 0.3)
    torch.addcmul({x}, {x}, {y}, value=0.5); torch.addcdiv({x}, {y}, 1 + {x} * {x}); torch.add({x}, {y}, alpha=0.5)
    torch.sub({x}, {y}, alpha=2); torch.rsub({x}, {y}); {x} + ({y} - {x}).detach(); {x}.detach() * {y}
    torch.lerp({x}, {y}, torch.sigmoid({x})); {x} * {y} - {y} * {x} + {x}; {x} - {y} + {y}; ({x} + {y}) / 2
    {x}.mul({y}).add({x}); ({x} * {y}).sum(-1, keepdim=True) + {x}; torch.maximum({x}, {y}); torch.minimum({x}, {y})
    {x} - torch.maximum({x}, {y}).detach(); torch.maximum({x}, {k} * {y}); torch.where({x} > {y}, {x}, torch.sin({y}))
    torch.where({x} >= {y}, {y}, 0.5); torch.where({x} <= {y}, 0.0, {x}); torch.clamp({x}, min=-{y}.abs(), max={y}.abs())
    {x}.clamp(max={y})
""")
CONDITIONS = texts("""
    {x} > {y}; {x} >= {y}; {x} < {y}; {x} <= {y}; {x} == {y}; {x} != {y}; {x} > 0; {x} >= 0.25; {x} < {k}; {x} == 0; {x} != {x}
    torch.gt({x}, {y}); {x}.ge(0); {x}.bool(); ({x} > 0).bool(); {x}.to(torch.bool); torch.logical_and({x} > 0, {y} > 0)
    {x}.ne(0); {c} & {d}; torch.logical_and({c}, {d}); torch.ones_like({x}, dtype=torch.bool); torch.logical_and({x}, {y})
    {c} == {d}; {c} * {d}; {c} + {d}; {c} > {d}; {c} == 1; {c} != {d}; {c}.clone(); {c}.detach(); {c}[:, :1]
    torch.cat([{c}, {d}], -1); {c}.eq(0); {c}.to({x}.dtype) > 0.5; torch.bitwise_and({c}, {d})
""")
LOGIC = texts("""
    torch.logical_or({c}, {d}); torch.logical_not({c}); torch.logical_xor({c}, {d}); {c} | {d}; ~{c}; {c} ^ {d}
    torch.isinf({x}); torch.isfinite({x}); torch.isnan({x}); {x}.signbit(); {c}.long() > 0; {c}.all(-1, keepdim=True)
    torch.maximum({c}, {d}); torch.where({c}, {c}, {d})
""")
CHOICES = texts("""
    torch.where({c}, {x}, {y}); torch.where({c}, {x}, 0.0); torch.where({c}, 0.5, {x}); {c} * {x}; {x} * {c}
    {c}.to({x}.dtype) * {y}; {c}.to({x}.dtype) - {x}; {x}.masked_fill({c}, 0.5); torch.where({c}, {x}, torch.zeros_like({x}))
    {c}.type_as({x}) + {x}; {c}.double().to({x}.dtype) * {x}; {x} + {c}.to({x}.dtype).sum(-1, keepdim=True)
    torch.where({c}, {x}, {x}.detach()); torch.where({c}, {k}, {x}); {c}.to({x}) * {x}; {x} / (1.0 + {c}.to({x}.dtype))
    ({c} * 0.5) * {x}; ({c} * 2.0 - 1) * {x}; torch.where({c}, 1.0, 2.0) * {x}; {x} + 2 * {c}; {x} - {c}.float()
    {x} * {c}.half(); {x} * {c}.int(); 1.0 * {c} + {x}; torch.where({c} & ({x} > 0), {x}, {y}); ({x} + {c}).to({x}.dtype)
    torch.where({c}, {x}.sqrt(), {x}); {x} * ({c} + {c})
""")
# Lines with casts, most of which must be refused: what a compiled step would do in one precision is something else.
CASTS = texts("""
    {x}.half().to({x}.dtype); {x}.float().to({x}.dtype); {x}.double().to({x}.dtype); {x}.to(torch.bfloat16).to({x}.dtype)
    {x}.long().to({x}.dtype) + {x}; (4 * {x}).int().to({x}.dtype) / 4; {x}.bool().to({x}.dtype) * {x}; {x}.bool() * {x}
    {x}.to(torch.int8) * {x}; torch.full_like({x}, 0.7).long().to({x}.dtype) + {x}
    torch.tensor(0.3).half().to({x}.dtype) * {x}; torch.full_like({x}, 0.7, dtype=torch.int64) * {x}; torch.tensor(2) * {x}
    torch.tensor(0.7).bool() * {x}; torch.tensor(2) / 3 * {x}; torch.ones_like({x}).int() * {x} / 2
    torch.tensor([0.1]).double().to({x}.dtype) * {x}; torch.tensor(0.1, dtype=torch.float64) * {x}
    torch.full_like({x}, 1e10).half().to({x}.dtype).clamp(max=2.0) * {x}; torch.tensor(1.7).int() * {x}
    (torch.tensor(1.5).long() + 1) * {x}; torch.zeros_like({x}).bool().to({x}.dtype) + {x}
    torch.full_like({x}, 2.5).to(torch.uint8).to({x}.dtype) * {x}; torch.scalar_tensor(0.7) * {x}
    {x}.new_full((1,), 0.3) * {x}; {x}.new_tensor(0.3) * {x}; {x}.new_ones(1, dtype=torch.bool) * {x}
    torch.as_tensor(0.25) + {x}; {x} * torch.tensor(True); {x} * torch.tensor([0.5, 0.25]).sum()
    {x} * torch.arange(3).sum() / 3; {x} ** torch.tensor(2.0); {x} ** torch.tensor(2); torch.tensor(0.5) ** {x}; 2.0 ** {x}
    {x} // 0.5; {x} % 0.5; {x}.type(torch.float32).type_as({x})
""")
VIEWS = texts("""
    {x}[:, 1:]; {x}[:, :2]; {x}[..., -1:]; {x}[:, 0]; {x}[:, -1].unsqueeze(1); {x}.narrow(-1, 0, 2); {x}.select(-1, 1)
    {x}.chunk(2, -1)[0]; {x}.chunk(2, -1)[-1]; {x}.split(2, -1)[0]; {x}.split([1, {n} - 1], -1)[1]; {x}.unbind(1)[0]
    {x}.unbind(-1)[1].unsqueeze(1); torch.stack({x}.unbind(1)[::-1], 1); torch.cat([{x}, {y}], -1)
    torch.cat([{x}[:, 1:], {x}[:, :1]], 1); torch.stack([{x}, {y}], 1); torch.stack([{x}, {y}], -1).sum(-1)
    torch.stack([{x}, {x}], 1).amax(1); {x}.unsqueeze(1); {x}.unsqueeze(-1); {x}.squeeze(1); {x}.reshape(len(state.h), -1)
    {x}.reshape(-1, {n}); {x}.flatten(1); {x}.transpose(1, -1); {x}.mT; {x}.unsqueeze(1).expand(-1, 2, -1)
    {x}.expand(len(state.h), -1); {x}.unflatten(-1, (-1, 2)); {x}.view(len(state.h), 2, -1).sum(1); {x}.permute(0, 2, 1)
    sum({x}.unbind(1)); {x}.movedim(-1, 1); {x}[:, None, :]; {x}[:, :, None] * {y}[:, None]; torch.atleast_3d({x})
    torch.hstack([{x}, {y}]); {x}.view_as({x}); {x}.contiguous(); torch.broadcast_to({x}, {x}.shape)
    {x}.reshape({x}.shape[0], {n}); {x}[:{x}.shape[0]]; {x}.swapaxes(-1, -1); torch.concat(list({x}.unbind(1)), -1)
    {x}.unsqueeze(0).squeeze(0)
""")
REDUCTIONS = texts("""
    {x}.sum(-1, keepdim=True); {x}.mean(-1, keepdim=True); {x}.sum(1); {x}.mean(1); torch.logsumexp({x}, -1, keepdim=True)
    {x}.amax(-1, keepdim=True); {x}.amin(-1, keepdim=True); {x}.amax(1); {x}.var(-1, keepdim=True); {x}.var(-1, correction=0)
    torch.sqrt({x}.var(-1, keepdim=True) + 0.1); {x}.std(-1, keepdim=True); torch.linalg.vector_norm({x}, 2, -1, keepdim=True)
    {x}.norm(dim=-1, keepdim=True); {x}.norm(1, -1); torch.linalg.vector_norm({x}, float("inf"), -1, keepdim=True)
    torch.linalg.vector_norm({x}, 3, -1); F.normalize({x}, dim=-1); F.normalize({x} + 0.3, dim=-1, eps=0.1)
    F.layer_norm({x}, ({n},)); F.layer_norm({x}, ({n},), eps=0.1); torch.softmax({x}, -1); F.log_softmax({x}, -1)
    torch.softmax({x}, 1); torch.var_mean({x}, -1, keepdim=True)[0]; {x}.sum((1, 2)); {x}.softmax(-1) * {x}
    {x} - {x}.mean(-1, keepdim=True); {x} / (1 + {x}.abs().amax(-1, keepdim=True)); F.rms_norm({x}, ({n},))
    {x}.sum(-1, dtype={x}.dtype); {x}.abs().sum(1, keepdim=True).sqrt(); torch.softmax({x}, -1, dtype={x}.dtype)
    {x}.mean((1,), keepdim=True); {x}.nanmean(-1, keepdim=True); F.cosine_similarity({x}, {y}, -1)
""")
PRODUCTS = texts("""
    linear({x}, {W}); {x} @ {W}.T; F.linear({x}, {W}); torch.mm({x}, {W}.t()); {x} @ {W}; linear({x}, {W}[:2])
    F.linear({x}, {W}[1:, :]); linear({x}, {W}) - linear(0.5 * {x}, {W}); F.linear({x}, {W}.chunk(2)[0])
    torch.addmm({y}, {x}, {W}.T, beta=0.5, alpha=2); linear({x} * {k}, {W}); torch.einsum("bi,ji->bj", {x}, {W})
    torch.matmul({x}, {W}.mT); {k} * linear({x}, {W}) + {x}; F.linear({x}, {W}.unbind(0)[0][None])
    sum(v * w for v, w in zip({x}.unbind(1), {W}.unbind(1)))[None] + {x}; linear(torch.cat([{x}, {y}], -1)[:, :{n}], {W})
    {x} @ {W}[0]; torch.mv({x}, {W}[0]).unsqueeze(1); {x} * {W}[0]; {x} + {W}.sum(0)
    torch.bmm({x}.unsqueeze(2), {y}.unsqueeze(1)); ({x}.unsqueeze(1) @ {y}.unsqueeze(2)).squeeze(2)
    torch.einsum("bi,bj->bij", {x}, {y}); torch.tanh(linear({x}, {W})); linear({x}, {W}).relu()
    torch.bmm({x}.unsqueeze(1), {y}.unsqueeze(2))
    torch.baddbmm({x}.unsqueeze(2), {x}.unsqueeze(2), {y}[:, :1].unsqueeze(1)).squeeze(2)
""")
# Operations that the language of the compiler may lack.
EXOTIC = texts("""
    torch.floor({x}); torch.round(2 * {x}) / 2; torch.ceil({x}) - {x}; {x}.frac(); torch.fmod({x}, 0.3); {x}.remainder(0.3)
    torch.atan({x}); torch.sinh(0.3 * {x}); torch.atan2({x}, 2 + {y}); torch.hypot({x}, {y} + 2); {x}.cumsum(-1)
    {x}.sort(-1).values; {x}.topk(1, -1).values; {x}.argmax(-1, keepdim=True) * {x}
    F.one_hot({x}.argmax(-1), 9)[:, :{n}] * {x}; torch.nan_to_num({x}); torch.heaviside({x}, {x}); torch.tril({x}.unsqueeze(1))
    {x} - {x}.mean(0); {x} / len({x}); {x} * {x}.shape[0]; {x} * ({x}.numel() / 100); {x} + state.h.shape[0] / 10
    {x} * {x}.shape[-1] / 4; {x} - {x}.sum(); {x} + torch.linspace(0, 1, {n}); {x} + torch.arange({n})
    torch.einsum("bi->b", {x}); torch.cumprod({x}, -1); {x}.diff(dim=-1); torch.exp2({x}); torch.log2(2 + {x}.abs())
    torch.asinh({x}); torch.special.expit({x}); torch.logaddexp({x}, {y}); F.glu(torch.cat([{x}, {y}], -1))
    F.prelu({x}, torch.tensor(0.25, dtype={x}.dtype)); torch.copysign({x}, {y}); {x}.repeat_interleave(2, -1)
    {x}.gather(1, torch.zeros(len({x}), 1, dtype=torch.int64)); torch.zeros({x}.shape, dtype={x}.dtype) + {x}; {x}.exp_() + 1
    {x}.add_(1); torch.rand_like({x}) * 0 + {x}; {x} if {x}.shape[0] > 2 else 2 * {x}; {x} * (1 if len({x}) % 2 else 2)
    torch.deg2rad({x}); {x}.trunc(); {x}.positive(); torch.cdist({x}.unsqueeze(1), {y}.unsqueeze(1)).squeeze(1)
    {x}.renorm(2, 0, 1.0); F.pad({x}, (1, 0)); F.pad({x}, (0, 1), value=0.5); torch.tensor({k}).expand(3).sum() * {x}
    Swish.apply({x}); torch.utils.checkpoint.checkpoint(torch.tanh, {x}, use_reentrant=False); torch.vmap(torch.tanh)({x})
    torch.special.erfc({x}); torch.polar({x}, {x}).real
""")
EXOTIC += texts("""
    {x}.repeat(1, 2); {x}[:, ::2]; {x}.flip(1); {x}.roll(1, -1); {x}.tile(1, 2); {x}.index_select(1, torch.tensor([0]))
    {x}[:, [1, 0]]; {x}.unbind(0)[0] + {x}; {x}.T.T; {x}.t().t(); {x}.max(-1).values; {x}.max(-1, keepdim=True)[0] + {x}
    {x}.min(1).values; {x}.nansum(-1); F.group_norm({x}, 1); {x}.nanmean(-1, keepdim=True); torch.dist({x}, {x}) + {x}
    {x}.prod(-1, keepdim=True); {x}.sum(-1, dtype=torch.float64).to({x}.dtype); torch.std_mean({x}, -1)[1]
    linear({x}, {W} * 0.5); linear({x}, {W} - {W}.T); F.bilinear({x}, {x}, {W}[None]); torch.outer({W}[0], {W}[1])[0] + {x}
""")
WILD = texts("""
    torch.log({x}); torch.sqrt({x}); {x} ** -0.5; {x} ** 0.5; 1 / {x}; {x} ** -1; torch.rsqrt({x})
    torch.where({x} > 0, torch.log({x}), {x}); {x} / {y}; torch.where({x} > 0, {x}.sqrt(), 0.0); torch.reciprocal({x})
    {x} / {x}; torch.exp(100 * {x}); torch.log1p({x}); {x} ** 2.5; {x} ** -2; {x} * 1e30 * 1e-30; {x} * 1e200
    torch.exp({x} * 1e3).clamp(max=2.0); torch.where({c}, 1 / {x}, {x})
    {x}.norm(dim=-1, keepdim=True) / {x}.norm(dim=-1, keepdim=True); {x}.std(-1, keepdim=True) ** -1; ({x} - {x}) / ({x} - {x})
    torch.maximum({x}, {x} * float("nan")); {x}.clamp(min=float("-inf")); {x} + float("inf"); {x} * 1e-320
    {x} - {x} * 1e38 * 1e38; torch.sigmoid(1e3 * {x}); F.softplus(50 * {x}); F.logsigmoid(-800 * {x}); torch.tanh({x} * 1e20)
    torch.softmax({x} * 1e3, -1); {x} / (0 * {x}); -0.0 * {x}; 1 / (-0.0 * {x} - 0.0); (0.0 * {x}).sqrt()
""")
# Statements of several lines; `{v}` is the variable that they set.
BLOCKS = [
    "{v} = {x}\nfor _ in range({m}):\n    {v} = 0.5 * {v} + 0.4 * torch.tanh({y} + linear({v}, {W}))",
    "{v} = {x}\nfor i in range({m}):\n    {v} = torch.sin({v} + i * {y})",
    "{v} = sum(torch.tanh({x} * (i + 1)) for i in range({m}))",
    "with torch.no_grad():\n    {v} = torch.cos({x})\n{v} = {v} + {y}",
    "with torch.no_grad():\n    {v} = linear({x}, {W})\n{v} = {v} * {x}",
    "with torch.enable_grad():\n    {v} = torch.cos({x}) * {y}",
    "if {q}:\n    {v} = torch.tanh({x}) + {y}\nelse:\n    {v} = torch.sin({x}) * {y}",
    "{v} = {x}\nif {q}:\n    {v} = {k} * {v}",
    "{v} = torch.tanh({x}) if {q} else {x} * {x}",
    "{v} = {x}\nwhile {v}.shape[1] > 2:\n    {v} = {v}[:, 1:] - {v}[:, :-1]",
    "parts = [torch.tanh(part) for part in {x}.unbind(1)]\n{v} = torch.stack(parts[::-1], 1)",
    "first, *rest = {x}.split(1, 1)\n{v} = first + sum(rest)",
    "memo = {{}}\nmemo['a'] = {x} + {y}\n{v} = memo['a'] * memo['a']",
    "def inner(u):\n    return u * {k} + torch.tanh(u)\n{v} = inner(inner({x}))",
    "{v} = [f({x}) for f in (torch.tanh, torch.sin, torch.relu)][{m} % 3] + {y}",
    "try:\n    {v} = {x} + {y}\nexcept RuntimeError:\n    {v} = {x}",
    "assert {x}.shape[-1] == {n}\n{v} = {x} * {y}",
    "{v} = {x} * {y}\n{v} = {v} - {v}.detach() + {y}",
    "{v} = {x}\nfor w in {W}.unbind(0):\n    {v} = {v} + 0.1 * w[:1]",
    "a, b = {x}.chunk(2, -1)\n{v} = torch.sigmoid(a)[:, :1] * torch.tanh(b)",
]
QUESTIONS = texts("""
    self.output_size > 3; self.training; state.h.shape[1] > 2; len(weights) > 1; {k} > 0.4; {k} == 0.5
    isinstance({x}, torch.Tensor); {x}.dim() == 2; {x}.dtype == torch.float64; state.h.shape[0] > 3; len(state.h) == 1
    hasattr(inputs, 'a'); {x}.requires_grad; torch.is_grad_enabled(); {x}.is_contiguous(); state.h is {x}
    {x}.shape[0] % 2 == 0; {x}.numel() > 8; getattr(self, 'nothing', None) is None; self.input_size == 3
    {x}.device.type == "cpu"
""")

# -- projections --------------------------------------------------------------------------------------------------------------
# In these, `{p}` is a tensor [T, B, n], and so is the result. `{E}` is the name of a module that a line needs.

LOCAL = texts("""
    torch.tanh({p}); F.layer_norm({p}, ({n},)); {p} * {k}; {p} + {k}; torch.cat([{p}, {p}.square()], -1)[..., :{n}]
    torch.softmax({p}, -1); F.silu({p}); {p}.reshape(T * B, {n}).tanh().reshape(T, B, {n})
    torch.where({p} > 0, {p}, {k} * {p}); {p}.flatten(0, 1).sigmoid().unflatten(0, (T, B)); F.relu({p})
    {p} - {p}.mean(-1, keepdim=True); {p}.transpose(0, 1).contiguous().transpose(0, 1) * 2
    torch.stack([step.tanh() for step in {p}]); F.normalize({p}, dim=-1); {p}.unsqueeze(-1).expand(-1, -1, -1, 2).sum(-1)
    {p}.chunk(2, -1)[0].mean(-1, keepdim=True) + {p}; {p}.detach() * {p}; {p} + 0 * {p}.clone()
    {p}.view(-1, {n}).view(T, B, -1); torch.stack({p}.unbind(0)); torch.cat([{p}[:1], {p}[1:]])
    {p}.permute(1, 0, 2).permute(1, 0, 2); {p}.masked_fill({p} < 0, 0.25); {p} * torch.ones(T, B, 1, dtype={p}.dtype)
""")
ALONG_TIME = texts("""
    {p}.cumsum(0); {p}.cumsum(0) / torch.arange(1, T + 1).reshape(-1, 1, 1); torch.cat([torch.zeros_like({p}[:1]), {p}[:-1]])
    {p}.roll(1, 0); {p} - {p}.mean(0, keepdim=True); F.normalize({p}, dim=0); {p}.flip(0); torch.softmax({p}, 0)
    {p} / ({p}.abs().amax(0, keepdim=True) + 1); torch.diff({p}, dim=0, prepend={p}[:1]); {p} + {p}[0]; {p} + {p}[-1]
    {p} * {p}.mean(); F.pad({p}, (0, 0, 0, 0, 2, 0))[:T]; {p} - {p}[:1]; {p} + 0.1 * {p}.sum(0)
    torch.cumsum({p}, 0) * 0.1 + {p}; {p}.sort(0).values; torch.cat([{p}[1:], {p}[-1:]])
    {p} + F.pad({p}, (0, 0, 0, 0, 1, 0))[:-1]; ({p} - {p}.mean((0, 2), keepdim=True)); torch.logcumsumexp({p}, 0)
    {p} - {p}.amax(0); {p} * ({p}[:1] > 0); torch.where({p} > {p}.mean(0), {p}, 0.0)
    torch.einsum("tbn,sbn->tbn", {p}, {p}) / T; {p}.unfold(0, 1, 1).squeeze(-1).cumsum(0); 0 * {p}.cumsum(0) + {p}
    torch.cat([torch.zeros_like({p}[:5]), {p}])[:T]; F.pad({p}, (0, 0, 0, 0, 7, 0))[:T]; {p}.cummax(0).values
    {p} + 1e-3 * {p}.std(0, correction=0); {p} * (T == {p}.shape[0])
""")
SIZES = texts("""
    {p} / (T + 1); {p} / math.sqrt(B); {p} * (x.numel() / 100); {p} / len(x); {p} * min(T, 4); {p} * (2 if T > 5 else 1)
    {p} * (0.5 if B == 1 else 1); {p} + T % 3; {p} + B / 10; {p} / {p}.shape[0] ** 0.5; {p} * (x.shape[0] * x.shape[1]) ** -0.5
    {p} - {p}.sum() / {p}.numel(); {p} if T < 7 else {p} * 0.5; {p} * (B % 2); {p} * (T % 2 + 0.5)
    {p} * (1 if T == 2 else 0.5); {p} * (2 if T > 100000 else 1); {p} * float(T > 1) + {p}; {p} + 1 / T
    torch.full_like({p}, 1 / B) * {p}; {p} * x.size(0) / x.size(1); {p} * len(range(0, T, 2)) / 4; {p} * math.log(T + 1)
""")
STARTS = texts("""
    {p} + start / 100; {p} + torch.sin(torch.arange(start, start + T)).reshape(T, 1, 1).to({p}.dtype)
    {p} * (2 if start == 0 else 1); {p} * (1 + start % 3); {p} * (1 if start < 3 else 0.5)
    {p} + 0.01 * torch.arange(start, start + T).reshape(T, 1, 1); {p} if start < 1000 else {p} * 2; {p} * math.cos(start)
    {p} * (start // 104729 + 1); {p} * (0.5 if start == 5 else 1); {p} + (torch.arange(T) + start).div(10).reshape(-1, 1, 1)
    {p} * ((torch.arange(T) + start) % 2 == 0).reshape(-1, 1, 1); {p} + (start > 0); {p} * (2 if start in (3, 7) else 1)
""")
ROWS = texts("""
    {p} - {p}.mean(1, keepdim=True); {p}[:, :1] + {p}; {p} / (1 + {p}.abs().amax(1, keepdim=True)); torch.softmax({p}, 1)
    {p}.cumsum(1); {p}.flip(1); {p} * {p}.std(1, keepdim=True, correction=0)
""")
PROJECT_CASTS = texts("""
    {p}.half().to({p}.dtype); ({p} > 0).to({p}.dtype); {p}.float().to(x.dtype); {p}.bool() * {p}
    {p}.long().to({p}.dtype) + {p}; torch.round({p} * 4) / 4; ({p} > 0) * {p}; {p} * torch.tensor(0.7).int()
    {p} + ({p}.bool() & (x[..., :1] > 0)); torch.logical_and({p}, {p} > 0.3) * {p}; {p} * torch.full((), 1.5).long()
    {p}.to(torch.bfloat16).to({p}.dtype); {p} * torch.tensor([0.1]).half().to({p}.dtype); torch.where({p}.bool(), {p}, 1.0)
    torch.logical_or({p} > 0.5, {p} < -0.5) * {p}; (~({p} > 0)) * {p}; {p} + torch.isnan({p}); torch.nan_to_num({p})
    {p}.clamp(-0.25, 0.25); {p} * ({p} != {p}.round())
""")
# Statements, and the module that each needs.
PROJECT_BLOCKS = [
    ("with torch.no_grad():\n    q = torch.sin({p})\n{v} = {p} + q", ""),
    ("{v} = self.{E}({p}.permute(1, 2, 0))[..., :T].permute(2, 0, 1)", "nn.Conv1d({n}, {n}, 3, padding=2)"),
    ("{v} = self.{E}(F.pad({p}.permute(1, 2, 0), (2, 0))).permute(2, 0, 1)", "nn.Conv1d({n}, {n}, 3, groups={n})"),
    ("{v} = self.{E}({p}.permute(1, 2, 0)).permute(2, 0, 1)", "nn.Conv1d({n}, {n}, 1)"),
    ("{v} = self.{E}({p})", "nn.LayerNorm({n})"),
    ("{v} = self.{E}({p})", "nn.Sequential(nn.Linear({n}, 6), nn.GELU(), nn.Linear(6, {n}))"),
    ("{v} = self.{E}({p})", "nn.Dropout(0.4)"),
    ("{v} = self.{E}({p}.reshape(T * B, {n})).reshape(T, B, {n})", "nn.BatchNorm1d({n})"),
    ("{v} = self.{E}({p}.permute(1, 2, 0)).permute(2, 0, 1)", "nn.BatchNorm1d({n}, affine=False, momentum=0.5)"),
    ("{v} = self.{E}({p})[0]", "nn.GRU({n}, {n})"),
    ("{v} = {p} + self.{E}(torch.arange(start, start + T)).unsqueeze(1)", "nn.Embedding(80, {n})"),
    ("{v} = {p} + self.{E}[start : start + T].unsqueeze(1)", "nn.Parameter(0.3 * torch.randn(80, {n}))"),
    ("{v} = {p} * self.{E}", "nn.Parameter(torch.rand({n}))"),
    ("{v} = F.linear({p}, self.{E}.tanh())", "nn.Parameter(0.5 * torch.randn({n}, {n}))"),
    ("{v} = self.{E}({p})", "torch.nn.utils.parametrizations.weight_norm(nn.Linear({n}, {n}))"),
    (
        "steps = []\nlevel = torch.zeros_like({p}[0])\nfor row in {p}:\n    level = 0.5 * level + row\n"
        "    steps.append(level)\n{v} = torch.stack(steps)",
        "",
    ),
    ("if self.{E} is None:\n    self.{E} = torch.linspace(0.5, 1, {n}, dtype={p}.dtype)\n{v} = {p} * self.{E}", "None"),
    (
        "if self.{E} is None or len(self.{E}) < T:\n    self.{E} = torch.linspace(0.5, 1, 1 + T, dtype={p}.dtype)\n"
        "{v} = {p} * self.{E}[1]",
        "None",
    ),
    ("if self.{E}:\n    {v} = torch.tanh({p})\nelse:\n    {v} = {p}", "True"),
    (
        "{v} = {p}\nfor layer in self.{E}:\n    {v} = torch.tanh(layer({v}))",
        "nn.ModuleList([nn.Linear({n}, {n}) for _ in range(2)])",
    ),
    ("q = {p}.transpose(0, 1)\n{v} = (torch.softmax(q @ q.mT, -1) @ q).transpose(0, 1)", ""),
    (
        "q = {p}.transpose(0, 1)\nfuture = torch.ones(T, T).triu(1).bool()\n"
        "{v} = (torch.softmax((q @ q.mT).masked_fill(future, -1e9), -1) @ q).transpose(0, 1)",
        "",
    ),
    ("q = torch.empty_like({p})\nq[:] = {p} * 2\n{v} = q", ""),
    ("{v} = {p}.clone()\n{v}[..., 0] = 0.5", ""),
    ("{v} = {p}.clone()\n{v}[0] = 0.5", ""),
]
# Input fields that all rows share, [T, 1, n].
SHARED_FIELDS = [
    "(0.1 * torch.arange(start, start + T, dtype=x.dtype)).reshape(T, 1, 1).sin().expand(-1, -1, {n})",
    "torch.full((T, 1, {n}), {k}, dtype=x.dtype)",
    "(1 / (1 + torch.arange(start, start + T, dtype=x.dtype))).reshape(-1, 1, 1).repeat(1, 1, {n})",
    "torch.sigmoid(self.U[:1, :1] * (start + torch.arange(T, dtype=x.dtype)).reshape(-1, 1, 1)).expand(T, 1, {n})",
    "x.mean((1, 2), keepdim=True).expand(T, 1, {n})",
]
# Input fields that hold for all time, [1, B, n].
CONSTANT_FIELDS = [
    "x.mean((0, 2)).reshape(1, B, 1).expand(1, B, {n})",
    "x[:1, :, :1].expand(-1, -1, {n})",
    "torch.full((1, B, {n}), {k}, dtype=x.dtype)",
    "self.U[:1].unsqueeze(0).expand(1, B, {n})",
    "torch.linspace(0, 1, B, dtype=x.dtype).reshape(1, B, 1).expand(1, B, {n})",
]

# -- weights, states, outputs, changes ----------------------------------------------------------------------------------------

U_FORMS = texts("""
    self.U; self.U; self.U; self.U - self.U.T; torch.tanh(self.U); 0.5 * self.U; F.normalize(self.U, dim=1)
    torch.softmax(self.U, -1); {k} * self.U; self.U.T; torch.linalg.matrix_exp(0.3 * self.U)
""")
# Further fields of the weights: name, parameter, expression in weights(), and how the step may use it.
WEIGHTS = [
    ("V", "torch.randn({H}, {H}) / {H}", "self.V", "matrix"),
    ("G", "torch.randn(2 * {H}, {H}) / {H}", "self.G", "matrix"),
    ("L", "torch.randn({H}, 2) / 2", "LowRank(self.L, self.L.T, 1.0)", "lowrank"),
    ("N", "torch.randn({H}, 2) / 2", "LowRank(self.N, self.N.T, 0.5)", "lowrank"),
    ("M", "torch.randn({H}, 1)", "LowRank(self.M, self.U[:1], 0.0)", "lowrank"),
    ("b", "0.3 * torch.randn({H})", "self.b", "value"),
    ("s", "torch.tensor(0.7)", "torch.sigmoid(self.s)", "value"),
    ("K", "0.5 * torch.randn(2, {H}, {H})", "self.K", "value"),
    ("zero", "torch.zeros({H})", "self.zero", "value"),
    ("gain", "torch.ones({H})", "self.gain", "value"),
    ("unused", "torch.randn({H}, {H})", "self.unused", ""),
    ("same", "", "self.U", "matrix"),
    ("rows", "", "self.U[:1]", "matrix"),
    ("row", "", "self.U[0]", "value"),
    ("halted", "torch.randn({H})", "self.halted.detach()", "value"),
    ("frozen", "torch.randn({H}, {H}), requires_grad=False", "self.frozen", "matrix"),
    ("idle", "torch.randn({H})", "", ""),
]
NEW_STATES = texts("""
    0.5 * torch.tanh({v}); 0.6 * {h} + 0.3 * torch.tanh({v}); torch.sin({v}); torch.sigmoid({v} - {h}); torch.tanh({v} + {u})
    (1 - torch.sigmoid({v})) * {h} + torch.sigmoid({v}) * torch.sin({v}); torch.tanh({v} + 0.5 * {u}); torch.clamp({v}, -1, 1)
    torch.cat([0.5 * {h}[:, :1], 0.5 * torch.tanh({v})[:, 1:]], 1); torch.tanh({u}) * torch.sigmoid({v})
    {h} + 0.1 * torch.tanh({v} + {u})
""")
# Outputs, and their sizes; the second list is for cells with a state c of size {n}.
OUTPUTS = [
    ("2 * state.h", "{H}"), ("torch.tanh(state.h)[..., :2]", "2"), ("{k} * state.h", "{H}"), ("state.h + 1", "{H}"),
    ("state.h @ self.U", "{H}"), ("torch.cat([state.h, state.h ** 2], -1)", "2 * {H}"), ("state.h.cumsum(-1)", "{H}"),
    ("state.h.detach() * 0.5 + state.h", "{H}"), ("state.h.clone()", "{H}"), ("state.h.sum(-1, keepdim=True)", "1"),
]  # fmt: skip
OUTPUTS_OF_TWO = [
    ("state.c", "{n}"), ("torch.cat([state.h, state.c], -1)", "{H} + {n}"), ("state[1]", "{n}"), ("torch.tanh(state.c)", "{n}"),
]  # fmt: skip
# Changes of what every cell has, and of what a cell with a linear layer P has.
CHANGES = [
    "cell.U.data.mul_(0.5)",
    "cell.U = nn.Parameter(0.3 * torch.ones_like(cell.U))",
    "cell.U.requires_grad_(False)",
    "old = type(cell).step\ntype(cell).step = lambda self, *given: State(*(0.5 * part for part in old(self, *given)))",
    "old = cell.step\ncell.step = lambda *given: State(*(0.5 * part for part in old(*given)))",
    "old = cell.project\ncell.project = lambda x, start=0: old(0.5 * x, start)",
    "old = type(cell).project\ntype(cell).project = lambda self, x, start=0: old(self, 0.5 * x, start)",
    "old = cell.weights\ncell.weights = lambda: Weights(0.5 * old()[0], *old()[1:])",
    "old = cell.output\ncell.output = lambda state: 0.5 * old(state)",
    "old = type(cell).output\ntype(cell).output = lambda self, state: 0.5 * old(self, state)",
    "cell.train(not cell.training)",
    "half = {k: 0.5 * v if v.is_floating_point() else v for k, v in cell.state_dict().items()}\ncell.load_state_dict(half)",
    "cell.something_new = 3.0",
    "old = globals()['linear']\nglobals()['linear'] = lambda v, W: 0.5 * old(v, W)",
]
CHANGES_OF_P = [
    "cell.P.register_forward_hook(lambda m, i, o: 2 * o)",
    "cell.P.register_forward_pre_hook(lambda m, i: (0.5 * i[0],))",
    "cell.P.register_full_backward_hook(lambda m, gi, go: tuple(g if g is None else 3 * g for g in gi))",
    "cell.P.weight.register_hook(lambda g: 2 * g)",
    "cell.P.forward = lambda x: torch.tanh(x @ cell.P.weight.T)",
    "cell.P.weight.requires_grad_(False)",
    "cell.P.bias = None",
    "cell.P = nn.Sequential(cell.P, nn.Tanh())",
    "nn.utils.parametrizations.weight_norm(cell.P)",
]
# Changes of a module {a} that a projection uses.
CHANGES_OF_MODULES = [
    "cell.{a}.register_forward_hook(lambda m, i, o: 0.5 * o)",
    "cell.{a}.register_full_backward_hook(lambda m, gi, go: tuple(g if g is None else 0.5 * g for g in gi))",
    "cell.{a}.eval()",
    "cell.{a} = nn.Identity()",
]

"""Random cells as a user would write them: source text of a module with a class `UserCell`, drawn from a seed.

    cell = write(17)
    print(cell.source)

Beside a random step, a cell has random attributes (numbers, containers, objects, arrays, buffers, modules), a random projection
(local, along time, with sizes or `start` as numbers), random weights, states and outputs, and functions `change_1`, ... that
change something which the cell reads. Each line of a method is run on a few numbers when it is written; a line that raises, or
whose result does not fit, is drawn again. Lines with large numbers are scaled, so that numbers stay near 1.

The vocabulary is in `cell_vocabulary`; `attack` runs the cells.
"""

import math
import re
import textwrap
import types
import warnings
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.helpers import cell_vocabulary as words

TIME, ROWS = 13, 11  # of the numbers that lines are run on: no feature has these sizes
LARGEST = 40  # entries of a value, per batch row

HEADER = """\
import collections
import fractions
import functools
import math
from dataclasses import dataclass, field
from types import MethodType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unfading
from unfading import LowRank, linear


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return v * torch.sigmoid(v)

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return 0.5 * g * torch.sigmoid(v)
"""


class UserCell(NamedTuple):
    """A cell's source, and what is known about it."""

    seed: int
    source: str
    changes: int  # how many functions change_1, change_2, ... the module has
    local: bool  # whether project was written to compute each step from x at that step alone, and from its index
    noisy: bool  # whether project draws random numbers in training

    @property
    def draws(self) -> bool:
        """Whether a step draws random numbers: in another order where layers take turns, and where threads do."""
        return bool(re.search(r"nn\.Dropout|rand_like", self.source))

    def module(self, name: str = "user_cell") -> types.ModuleType:
        """A new module of the source: its classes and globals are its own."""
        return load(self.source, f"{name}_{self.seed}")


def load(source: str, name: str) -> types.ModuleType:
    """A module of source text; error messages show its lines."""
    import linecache
    import sys

    path = f"/user/{name}.py"  # not a file; the compiler names the lines of one
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    exec(compile(source, path, "exec"), module.__dict__)
    return module


class Known(NamedTuple):
    """A value of the step: its expression, and an example of it."""

    name: str
    probe: Tensor

    @property
    def batched(self) -> bool:
        return self.probe.dim() > 0 and self.probe.shape[0] == ROWS


class Numbers:
    """Where a method reads Python numbers and functions from, and the changes that a user may make there."""

    def __init__(self, random: Random):
        self.random = random
        self.count = 0
        self.module: list[str] = []
        self.body: list[str] = []
        self.init: list[str] = []
        self.changes: list[str] = []
        self.readings: list[str] = []
        self.acts: list[str] = []

    def add(self, reading: words.Reading, *, act: bool = False) -> None:
        name = self.random.choice(["gain", "rate", "options", "beta", "table", "leak", "scale"]) + str(self.count)
        self.count += 1
        u, v = self.random.sample([0.5, 0.3, 0.7, 0.9, 0.25, 1.5, 0.1, 0.625], 2)
        filled = [
            text.format(a=name, A=name.capitalize(), u=u, v=v)
            for text in (reading.number, reading.init, reading.module, reading.body, *reading.changes)
        ]
        (self.acts if act else self.readings).append(filled[0])
        for lines, text in zip((self.init, self.module, self.body), filled[1:4], strict=True):
            lines += text.strip("\n").splitlines() + [""] * (lines is self.module) if text else []
        self.changes += filled[4:]

    def one(self) -> str:
        """An expression of a number."""
        if self.readings and self.random.random() < 0.6:
            return self.random.choice(self.readings)
        return str(self.random.choice([0.5, 0.25, 2, 0.7, 1.5, -0.5, 1, 0.1]))


class Writer:
    """A cell while it is written."""

    def __init__(self, seed: int):
        self.random = Random(seed)
        self.seed = seed
        self.H = self.random.choice([2, 3, 3, 4, 5])
        self.wild = self.random.random() < 0.08  # lines may have poles
        self.exotic = self.random.random() < 0.2  # operations that the compiler may lack
        self.numbers = Numbers(self.random)
        self.local = True
        self.noisy = False
        # one_of: the seldom parts of a cell, each with its own share
        for _ in range(self.random.choice([0, 1, 1, 2, 3])):
            self.numbers.add(self.random.choice(words.READINGS))
        for _ in range(self.random.choice([0, 0, 1])):
            self.numbers.add(self.random.choice(words.ACTS), act=True)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    # -- weights, states, fields --------------------------------------------------------------------------------------

    def draw_weights(self) -> None:
        """Parameters, the fields of `weights()`, and the expressions of its result."""
        H, r = self.H, self.random
        self.parameters = [f"self.U = nn.Parameter(torch.randn({H}, {H}) / {H} ** 0.5)"]
        self.fields = [("U", r.choice(words.U_FORMS).replace("{k}", self.numbers.one()), "matrix")]
        for name, start, form, kind in r.sample(words.WEIGHTS, r.choice([0, 1, 2, 2, 3, 4])):
            if start:
                self.parameters.append(f"self.{name} = nn.Parameter({start.format(H=H)})")
            if form:
                self.fields.append((name, form, kind))
        self.buffers = []
        if self.chance(0.15):
            self.buffers.append(f"self.register_buffer('fixed', torch.linspace(-1, 1, {H}))")
            self.fields.append(("fixed", "self.fixed", "value"))
        self.nested = len(self.fields) > 1 and self.chance(0.2)

    def weight_lines(self) -> list[str]:
        own, inner = self.fields, []
        if self.nested:
            own, inner = self.fields[:-1], self.fields[-1:]
        expressions = [form for _, form, _ in own] + ([f"Inner({inner[0][1]})"] if inner else [])
        return [f"return Weights({', '.join(expressions)})"]

    def draw_states(self) -> None:
        H, r = self.H, self.random
        self.states = [("h", H)] + r.choice(
            [[], [], [], [("c", H)], [("c", r.randint(1, 5))], [("c", H), ("m", r.randint(1, 3))]]
        )
        starts = []
        for name, n in self.states:
            form = r.choice(["zeros", "zeros", "zeros", "ones", "full", "learned"])
            if form == "learned":
                self.parameters.append(f"self.{name}0 = nn.Parameter(0.3 * torch.randn({n}))")
                starts.append(f"self.{name}0.expand(batch, -1)")
            else:
                fill = {"zeros": "0", "ones": "1", "full": self.numbers.one()}[form]
                starts.append(f"self.U.new_full((batch, {n}), {fill})")
        self.initial = f"return State({', '.join(starts)})"

    # -- project ------------------------------------------------------------------------------------------------------

    def draw_fields(self) -> None:
        """The sizes of the inputs of a step, and the lines of `project`."""
        H, r = self.H, self.random
        self.inputs = [("a", H)] + r.choice([[], [], [("z", H)], [("z", r.randint(1, 4))], [("z", H), ("e", 1)]])
        self.shared = [("eta", r.choice([1, H]))] if self.chance(0.12) else []
        self.constant = [("mask", H)] if self.chance(0.08) else []
        total = sum(n for _, n in self.inputs)
        kind = r.choice(["linear", "linear", "linear", "mlp", "identity", "two", "matmul"])
        self.modules = []
        if kind == "identity":
            first = f"torch.cat([x] * {total}, -1)[..., :{total}]"
        elif kind == "matmul":
            self.modules.append(f"self.P = nn.Parameter(torch.randn(input_size, {total}) / 2)")
            first = "x @ self.P"
        elif kind == "two":
            self.modules.append(f"self.P = nn.Linear(input_size, {total})")
            self.modules.append(f"self.Q = nn.Linear(input_size, {total}, bias=False)")
            first = "self.P(x) * torch.sigmoid(self.Q(x))"
        elif kind == "mlp":
            self.modules.append(f"self.P = nn.Sequential(nn.Linear(input_size, 6), nn.Tanh(), nn.Linear(6, {total}))")
            first = "self.P(x)"
        else:
            self.modules.append(f"self.P = nn.Linear(input_size, {total}, bias={self.chance(0.7)})")
            first = "self.P(x)"
        self.first_projection = first
        self.total = total

    def write_project(self) -> None:
        r, n = self.random, self.total
        lines = ["T, B = x.shape[:2]", f"p = {self.first_projection}"]
        tables = [(words.LOCAL, 1.0)]
        groups = [
            (words.ALONG_TIME, 0.22),
            (words.SIZES, 0.12),
            (words.STARTS, 0.12),
            (words.ROWS, 0.05),
            (words.PROJECT_CASTS, 0.12),
        ]
        tables += [(group, 1.5) for group, share in groups if self.chance(share)]
        several = r.choices([t for t, _ in tables], [w for _, w in tables], k=r.choice([0, 0, 1, 1, 2, 3]))
        for table in [*several, *(table for table, _ in tables[1:])]:
            text = r.choice(table)
            by_index = table is not words.STARTS or "arange" in text  # else by the index of the first step of a piece
            self.local &= table is not words.ALONG_TIME and table is not words.SIZES and by_index
            self.add_project_line(lines, f"p = {text}", n)
        if self.chance(0.25):
            text, module = r.choice(words.PROJECT_BLOCKS)
            name = f"extra{self.numbers.count}"
            self.numbers.count += 1
            if module:
                line = f"self.{name} = {module.format(n=n)}"
                self.modules.append(line)
                self.run_in_init(line)
                self.numbers.changes += self.module_changes(name, module)
            self.noisy |= "Dropout" in module
            self.local &= not re.search(r"T|row in|mT|GRU|BatchNorm|Conv|\[0\] =", text + module) or "Embedding" in module
            self.add_project_line(lines, text.replace("{E}", name), n)
        lines += self.split_lines()
        self.project_lines = lines

    @staticmethod
    def module_changes(name: str, module: str) -> list[str]:
        if module in ("True", "None"):
            return [f"cell.{name} = {'False' if module == 'True' else 'None'}"]
        if module.startswith("nn.") and "Parameter" not in module and "GRU" not in module:
            return [change.format(a=name) for change in words.CHANGES_OF_MODULES]
        return []

    def add_project_line(self, lines: list[str], text: str, n: int) -> None:
        text = text.replace("{p}", "p").replace("{v}", "p").replace("{n}", str(n)).replace("{k}", self.numbers.one())
        result = self.run_project([*lines, text])
        fits = isinstance(result, Tensor) and tuple(result.shape) == (TIME, ROWS, n) and result.is_floating_point()
        if fits and result.isfinite().all() and result.dtype == torch.float64:
            lines += text.splitlines()
            largest = result.abs().max().item()
            if largest > 3:
                lines.append(f"p = {2 / largest:.2g} * p")

    def run_project(self, lines: list[str]) -> Any:
        names = {**self.names, "x": self.probe_x, "start": 0}
        try:
            with torch.random.fork_rng(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                exec("\n".join(lines), names)
        except Exception:
            return None
        return names["p"]

    def split_lines(self) -> list[str]:
        r = self.random
        sizes = [n for _, n in self.inputs]
        names = [name for name, _ in self.inputs]
        if len(sizes) == 1:
            lines = []
        elif len(set(sizes)) == 1 and self.chance(0.5):
            lines = [f"{', '.join(names)} = p.chunk({len(sizes)}, -1)"]
        else:
            lines = [f"{', '.join(names)} = p.split({sizes}, -1)"]
        results = ["p"] if len(sizes) == 1 else names
        for fields, forms in ((self.shared, words.SHARED_FIELDS), (self.constant, words.CONSTANT_FIELDS)):
            for name, n in fields:
                form = r.choice(forms)
                self.local &= fields is self.shared or not form.startswith("x")
                lines.append(f"{name} = " + form.format(n=n, k=self.numbers.one()))
                results.append(name)
        return [*lines, f"return Inputs({', '.join(results)})"]

    # -- step ---------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Values of every argument of the step."""
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> Tensor:
            return 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1

        inputs = SimpleTuple({name: random(ROWS, n) for name, n in [*self.inputs, *self.constant]})
        for name, n in self.shared:
            inputs[name] = random(1, n)  # the reference hands shared rows over as [1, n]
        states = SimpleTuple({name: random(ROWS, n) for name, n in self.states})
        self.known = [Known(f"inputs.{name}", probe) for name, probe in inputs.items()]
        self.known += [Known(f"state.{name}", probe) for name, probe in states.items()]
        self.matrices: list[Known] = []
        self.conditions: list[Known] = []
        weights = SimpleTuple({})
        for i, (name, form, kind) in enumerate(self.fields):
            value = self.evaluate(form, self.names)
            inner = self.nested and i == len(self.fields) - 1
            where = f"weights.inner.{name}" if inner else f"weights.{name}"
            if inner:
                weights["inner"] = SimpleTuple({name: value})
            else:
                weights[name] = value
            if kind in ("matrix", "lowrank"):
                self.matrices.append(Known(where, value if kind == "matrix" else value.dense()))
            elif kind == "value":
                self.known.append(Known(where, value))
        self.step_names = {**self.names, "inputs": inputs, "state": states, "weights": weights}
        self.unused = {known.name for known in self.known}
        self.lines: list[str] = []
        self.count = 0

    @staticmethod
    def evaluate(text: str, names: dict[str, Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return eval(text, names)

    def pick(self) -> Known:
        """A value; unused and late ones are preferred."""
        late = self.known[::-1]
        order = sorted(late, key=lambda known: known.name not in self.unused)
        n = len(order) - 1
        return order[min(self.random.randint(0, n), self.random.randint(0, n))]

    def fill(self, text: str, x: Known) -> str:
        r = self.random
        same = [known for known in self.known if known.probe.shape == x.probe.shape]
        partner = r.choice(same) if same and self.chance(0.7) else self.pick()
        conditions = self.conditions or [Known(f"({x.name} > 0)", x.probe > 0)]
        fitting = [W for W in self.matrices if x.probe.dim() and W.probe.shape[-1] == x.probe.shape[-1]] or self.matrices
        filled = {
            "x": x.name,
            "y": partner.name,
            "c": r.choice(conditions).name,
            "d": r.choice(conditions).name,
            "k": self.numbers.one(),
            "n": str(x.probe.shape[-1] if x.probe.dim() else 1),
            "m": str(r.choice([1, 2, 3])),
            "W": r.choice(fitting).name,
            "v": f"v{self.count}",
            "H": str(self.H),
        }
        if "{q}" in text:
            text = text.replace("{q}", r.choice(words.QUESTIONS))
        for key, value in filled.items():
            text = text.replace("{" + key + "}", value)
        return text.replace("{{", "{").replace("}}", "}")

    def draw_line(self) -> str:
        r = self.random
        x = self.pick()
        tables = [
            (words.SMOOTH, 4), (words.KINKED, 2.5), (words.PAIRS, 4), (words.CONDITIONS, 1.5), (words.CHOICES, 1.5),
            (words.CASTS, 0.15), (words.LOGIC, 0.4 if self.conditions else 0.1), (words.VIEWS, 3), (words.REDUCTIONS, 2),
            (words.PRODUCTS, 3), (words.BLOCKS, 1.2),
            (words.EXOTIC, 1.5 * self.exotic), (words.WILD, 2 * self.wild), (self.numbers.acts, 1.5 * bool(self.numbers.acts)),
        ]  # fmt: skip
        (table,) = r.choices([table for table, _ in tables], [weight for _, weight in tables])
        if table is words.PRODUCTS and not x.batched:
            x = r.choice([known for known in self.known if known.batched])
        text = r.choice(table)
        name = "c" if table in (words.CONDITIONS, words.LOGIC) else "v"
        if table is not words.BLOCKS:
            text = f"{name}{self.count} = {text}"
        return self.fill(text, x)

    def add_line(self) -> None:
        """Draw lines until one fits."""
        for _ in range(12):
            text = self.draw_line()
            if self.accept(text):
                return

    def accept(self, text: str) -> bool:
        names = dict(self.step_names)
        before = {id(known.probe): known.probe._version for known in self.known}
        try:
            with warnings.catch_warnings(), torch.random.fork_rng():
                warnings.simplefilter("ignore")
                exec(text, names)
        except Exception:
            return False
        condition = f"c{self.count}" in names
        name = f"c{self.count}" if condition else f"v{self.count}"
        result = names.get(name)
        if any(known.probe._version != before[id(known.probe)] for known in self.known):  # the line wrote into a value
            return False
        if not isinstance(result, Tensor) or not self.fits(result, condition):
            return False
        if not condition:
            largest = result.nan_to_num(0, 0, 0).abs().max().item() if result.numel() else 0.0
            if largest > 3:
                text += f"\n{name} = {2 / largest:.2g} * {name}"
                result = 2 / largest * result
        self.lines += text.splitlines()
        self.count += 1
        self.step_names[name] = result
        self.unused -= set(re.findall(r"[\w.]+", text))
        if condition:
            self.conditions.append(Known(name, result))
        else:
            self.known.append(Known(name, result))
            self.unused.add(name)
        return True

    def fits(self, result: Tensor, condition: bool) -> bool:
        known = Known("", result)
        features = result.shape[1:] if known.batched else result.shape
        if math.prod(features) > LARGEST or result.dim() > 4 or {TIME, ROWS} & set(features) or not result.numel():
            return False
        if condition:
            return result.dtype == torch.bool
        return result.dtype == torch.float64 and (self.wild or bool(result.isfinite().all()))

    def write_step(self) -> None:
        self.begin_step()
        for _ in range(self.random.choice([2, 4, 5, 6, 8, 10, 14])):
            self.add_line()
        written = "\n".join([*self.project_lines, *self.lines, *(form for _, form, _ in self.fields), self.initial])
        for reading in self.numbers.readings:
            if reading not in written:
                self.accept(f"v{self.count} = {reading} * {self.pick().name}")
        results = [self.new_state(i) for i in range(len(self.states))]
        rest = [self.size(known) for known in self.known if known.name in self.unused and known.name[0] == "v"]
        if rest and self.chance(0.9):
            self.lines.append(f"rest = torch.tanh({' - '.join(rest)})")
            results[0] = f"{results[0]} + 0.1 * rest"
        self.step_lines = [*self.lines, f"return State({', '.join(results)})"]

    @staticmethod
    def size(known: Known) -> str:
        """One number for each row, or one for all rows."""
        if not known.batched:
            return f"{known.name}.mean()"
        flat = known.name if known.probe.dim() == 2 else f"{known.name}.reshape(len({known.name}), -1)"
        return f"{flat}.mean(1, keepdim=True)"

    def new_state(self, i: int) -> str:
        """The new state i: a contraction of a value of the step, or one of the unusual results that a step may return."""
        r = self.random
        name, n = self.states[i]
        h = f"state.{name}"
        odd = r.randint(0, 11)
        if odd == 0 and i > 0:  # a delay line, an input, an unchanged state, or zero
            others = [known.name for known in self.known if tuple(known.probe.shape) == (ROWS, n) and "." in known.name]
            others = [other for other in others if not other.startswith("weights")]
            return r.choice([*others, f"torch.zeros_like({h})"])
        values = [known for known in self.known if known.name[0] == "v" and known.batched] or [self.known[0]]
        late = [known for known in values if known.name in self.unused] or values
        x = r.choice(late[-3:])
        width = x.probe[0].numel()
        text = x.name if x.probe.dim() == 2 else f"{x.name}.reshape(len({x.name}), -1)"
        self.unused.discard(x.name)
        if width > n:
            text = f"{text}[:, :{n}]"
        elif width == 1:
            text = f"{text}.expand(-1, {n})"
        elif width < n:
            text = f"torch.cat([{text}, {h}[:, {width}:]], 1)"
        matrix = next((W.name for W in self.matrices if tuple(W.probe.shape) == (n, n)), None)
        recurrent = f"linear({h}, {matrix})" if matrix else f"0.5 * {h}"
        return r.choice(words.NEW_STATES).format(v=text, h=h, u=recurrent)

    # -- the module -----------------------------------------------------------------------------------------------------

    def draw_output(self) -> None:
        r, H = self.random, self.H
        self.output_size, self.output_lines = H, []
        if self.chance(0.7):
            return
        forms, n = list(words.OUTPUTS), 0
        if len(self.states) > 1:
            n = self.states[1][1]
            forms += 2 * words.OUTPUTS_OF_TWO
        text, size = r.choice(forms)
        self.output_size = eval(size.format(H=H, n=n))
        self.output_lines = [f"return {text.replace('{k}', self.numbers.one())}"]

    def run_in_init(self, line: str) -> None:
        exec(line, self.names)

    def probe_cell(self) -> None:
        """An object with the attributes of the cell, for running lines."""
        init = [*self.parameters, *self.buffers, *self.modules, *self.numbers.init]
        body = textwrap.indent("\n".join(self.numbers.body), "    ")
        source = "\n".join(
            [
                HEADER, *self.numbers.module, "class UserCell(nn.Module):", body, "    def __init__(self, input_size):",
                "        super().__init__()", f"        self.input_size, self.output_size = input_size, {self.output_size}",
                textwrap.indent("\n".join(init), "        "),
            ]
        )  # fmt: skip
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.random.fork_rng():
                torch.manual_seed(self.seed)
                module = load(source, "probe_cell")
                self.names = dict(module.__dict__)
                self.names["self"] = module.UserCell(3)
                self.probe_x = torch.randn(TIME, ROWS, 3)
        finally:
            torch.set_default_dtype(before)

    def write(self) -> UserCell:
        r = self.random
        self.draw_weights()
        self.draw_states()
        self.draw_fields()
        self.draw_output()
        self.probe_cell()
        self.write_project()
        self.write_step()
        general = [*words.CHANGES]
        if any(line.startswith("self.P = nn.Linear") for line in self.modules):
            general += words.CHANGES_OF_P
        own = r.sample(self.numbers.changes, min(len(self.numbers.changes), r.choice([0, 1, 2])))
        own += r.sample(general, r.choice([0, 0, 1]))
        return UserCell(self.seed, self.text(own), len(own), self.local, self.noisy)

    def text(self, changes: list[str]) -> str:
        def block(head: str, lines: list[str]) -> str:
            return f"    {head}\n" + textwrap.indent("\n".join(lines), " " * 8) + "\n"

        def fields(name: str, names: list[str]) -> str:
            return f"class {name}(NamedTuple):\n" + "\n".join(f"    {field}: Tensor" for field in names) + "\n"

        own = [name for name, _, _ in (self.fields[:-1] if self.nested else self.fields)]
        init = ["super().__init__(input_size, " + f"{self.output_size})", *self.parameters, *self.buffers, *self.modules]
        tuples = [
            fields("Inputs", [name for name, _ in [*self.inputs, *self.shared, *self.constant]]),
            fields("State", [name for name, _ in self.states]),
            *([fields("Inner", [self.fields[-1][0]])] if self.nested else []),
            fields("Weights", [*own, *(["inner"] if self.nested else [])]),
        ]
        body = [f"shared = {tuple(name for name, _ in self.shared)}"] if self.shared else []
        body += [f"constant = {tuple(name for name, _ in self.constant)}"] if self.constant else []
        body += self.numbers.body
        methods = [
            block("def __init__(self, input_size):", init + self.numbers.init),
            block("def project(self, x, start=0):", self.project_lines),
            block("def weights(self):", self.weight_lines()),
            block("def initial_state(self, batch):", [self.initial]),
            block("def step(self, inputs, state, weights):", self.step_lines),
        ]
        if self.output_lines:
            methods.append(block("def output(self, state):", self.output_lines))
        functions = [
            f"def change_{i}(cell):\n" + textwrap.indent(change, "    ") + "\n" for i, change in enumerate(changes, start=1)
        ]
        attributes = textwrap.indent("\n".join(body), "    ") + "\n\n" if body else ""
        cell = "class UserCell(unfading.Cell):\n" + attributes + "\n".join(methods)
        header = HEADER if any("Swish" in line for line in self.step_lines) else HEADER.split("\n\nclass Swish")[0] + "\n"
        constants = "\n".join(self.numbers.module)
        return "\n\n".join(part for part in [header.rstrip(), constants, *tuples, cell, *functions] if part)


class SimpleTuple(dict):
    """Stands for a named tuple while lines are run."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def write(seed: int) -> UserCell:
    """The cell of a seed."""
    state = torch.random.get_rng_state()
    try:
        return Writer(seed).write()
    finally:
        torch.random.set_rng_state(state)


if __name__ == "__main__":
    import sys

    print(write(int(sys.argv[1])).source)

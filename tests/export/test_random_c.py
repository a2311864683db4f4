"""Random programs over the whole language of the compiler: their C is the interpreter's result, in floats and in integers."""

from functools import cache

import numpy as np
import pytest
import torch

from tests.helpers.against_autograd import Setting, some_numbers
from tests.helpers.c_models import CModel, needs_compiler
from tests.helpers.random_steps import some
from unfading.export.c_folder import MAKEFILE
from unfading.export.c_model import float_source, integer_source
from unfading.export.fold import folded
from unfading.export.model_stages import Exported
from unfading.export.quantised_model import Quantised
from unfading.export.stage import Stage
from unfading.fuse.c.schedule import addressable
from unfading.fuse.ir.interpret import next_states
from unfading.fuse.ir.program import Op
from unfading.fuse.trace.recorder import trace

pytestmark = needs_compiler
STEPS = 3
steps = cache(some)


def written(folder, source):
    folder.mkdir()
    for name, text in {"model.h": source.header, "model.c": source.source, "Makefile": MAKEFILE}.items():
        (folder / name).write_text(text)
    return folder


def check(step, folder):
    signature = step.signature(torch.float32)
    program = trace(step.function(), signature)
    numbers = some_numbers(signature, Setting(1, 1))
    weights = tuple(weight.double().numpy() for weight in numbers.weights)
    states = tuple(part[0].double().numpy() for part in numbers.states)
    # Inputs behind the first are tables: of one row, which becomes a constant, or of two equal rows.
    rows = [x[0].double().numpy() for x in numbers.inputs]
    tables = {i: np.repeat(row, 1 + i % 2, axis=0) for i, row in enumerate(rows) if i}
    names = tuple(f"h{i}" for i in range(len(states)))
    stage = folded(Stage("layer0", program, weights, states, names, tables))
    model = Exported("random", (stage,), None, None)
    source = float_source(model, int8=False)
    compiled = CModel(written(folder / "float", source), source)
    x = numbers.inputs[0][0]
    compiled.run(x.numpy(), signature.states[0])
    after = np.frombuffer(compiled.state, np.float32)[: sum(signature.states)]
    doubles = [[t.double() for t in each] for each in ([y[0] for y in numbers.inputs], numbers.states, numbers.weights)]
    want = torch.cat(next_states(program, *doubles), -1)[0].numpy()
    assert np.abs(after - want).max() < 1e-4 * max(1, np.abs(want).max()), step

    model = model._replace(stages=(stage.with_program(addressable(stage.program), stage.weights),))
    inputs = numbers.inputs[0].expand(STEPS, -1, -1) * torch.tensor([1.0, -0.5, 0.25]).reshape(-1, 1, 1)
    numbers_of = [value.number for value in stage.program.values() if value.op is Op.CONST]
    if not np.isfinite(numbers_of).all():
        with pytest.raises(ValueError, match="which integers do not have"):
            Quantised(model, [inputs], last_step=False)
        return
    twin = Quantised(model, [inputs], last_step=False)
    source = integer_source(twin)
    compiled = CModel(written(folder / "integer", source), source, integer=True)
    given = twin.samples(inputs)
    assert np.array_equal(compiled.run(given[:, 0], signature.states[0]), twin.run(given)[:, 0]), step


@pytest.mark.parametrize("number", range(4))
@pytest.mark.sample(2)
def test_a_random_program(number, tmp_path):
    check(steps(4, 8)[number], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("number", range(40))
def test_a_long_random_program(number, tmp_path):
    check(steps(40, 24)[number], tmp_path)

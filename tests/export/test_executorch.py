"""The programs for ExecuTorch: the graphs of torch.export agree with the layer, and so does the runtime where it is present."""

from importlib.util import find_spec

import pytest
import torch
from torch.export import Dim, export

import unfading
from tests.helpers.c_models import FEATURES, HIDDEN, distance, samples
from unfading.export.write_executorch import WholeSequence, single_step

STEPS, ROWS = 6, 2
needs_executorch = pytest.mark.skipif(find_spec("executorch") is None, reason="needs executorch")


def layer_of(name):
    torch.manual_seed(0)
    options = {"steps": 4, "inner_steps": 2, "eta": 0.2} if name == "IncrementalRNN" else {}
    return getattr(unfading, name)(FEATURES, HIDDEN, num_layers=2, **options).eval()


def models():
    tokens = torch.nn.Embedding(7, FEATURES)
    yield layer_of("LSTM"), samples(STEPS, rows=ROWS)
    yield (
        unfading.Model(torch.nn.Identity(), layer_of("IncrementalRNN"), unfading.LastStep(HIDDEN, 2)).eval(),
        samples(STEPS, rows=ROWS),
    )
    yield (
        unfading.Model(tokens, layer_of("STAR"), unfading.MeanOverTime(HIDDEN, 2)).eval(),
        torch.arange(STEPS * ROWS).reshape(STEPS, ROWS) % 7,
    )
    yield (
        unfading.Model(torch.nn.Identity(), layer_of("GRU"), unfading.PooledOverTime(HIDDEN, 2)).eval(),
        samples(STEPS, rows=ROWS),
    )


def wanted(model, x):
    with torch.no_grad(), unfading.use_backend("reference"):
        return model(x)[0]


def steps_of(step, state, x, *, last):
    outputs = []
    for sample in x:
        output, *state = step(sample, *state)
        outputs.append(output)
    return outputs[-1] if last else torch.stack(outputs)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.sample(1)
def test_the_graph_of_a_step_agrees_with_the_layer_for_any_batch(number):
    model, x = list(models())[number]
    step, rows = single_step(model), Dim("B", min=1, max=64)
    state = step.state(ROWS)
    free = tuple({0: rows} if part.shape[0] == ROWS else {} for part in state)
    graph = export(step, step.example(ROWS), dynamic_shapes={"x": {0: rows}, "state": free}).module()
    for given in (x, x[:, :1]):
        got = steps_of(graph, step.state(given.shape[1]), given, last=isinstance(model, unfading.Model))
        assert distance(got.numpy(), wanted(model, given).numpy()) < 1e-5


@pytest.mark.parametrize("number", range(4))
@pytest.mark.sample(1)
def test_the_graph_of_a_sequence_agrees_with_the_layer(number):
    model, x = list(models())[number]
    graph = export(WholeSequence(single_step(model), last=isinstance(model, unfading.Model)), (x,)).module()
    assert distance(graph(x).numpy(), wanted(model, x).numpy()) < 1e-5


@needs_executorch
@pytest.mark.parametrize("number", range(4))
def test_the_runtime_agrees_with_the_layer(number, tmp_path):
    from executorch.runtime import Runtime

    model, x = list(models())[number]
    unfading.export.executorch(model, tmp_path / "sequence.pte", steps=STEPS, batch=ROWS)
    program = unfading.export.executorch(model, tmp_path / "step.pte", batch=ROWS)
    sequence, step = (
        Runtime.get().load_program(tmp_path / f"{name}.pte").load_method("forward") for name in ("sequence", "step")
    )
    assert distance(sequence.execute([x])[0].numpy(), wanted(model, x).numpy()) < 1e-5

    def execute(*given):
        return [part.clone() for part in step.execute([part.contiguous() for part in given])]

    got = steps_of(execute, program.state, x, last=isinstance(model, unfading.Model))
    assert distance(got.numpy(), wanted(model, x).numpy()) < 1e-5


def test_bad_input_is_refused_and_nothing_is_written(tmp_path):
    layer = layer_of("STAR")
    for options, reason in [({"steps": 0}, "steps"), ({"batch": 0}, "batch"), ({"overwrite": 1}, "overwrite")]:
        with pytest.raises((ValueError, TypeError), match=reason):
            unfading.export.executorch(layer, tmp_path / "a.pte", **options)
    with pytest.raises(ValueError, match="is a folder"):
        unfading.export.executorch(layer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "executorch.exir", None)
    with pytest.raises(ValueError, match="needs the package executorch"):
        unfading.export.executorch(layer_of("STAR"), tmp_path / "a.pte")
    assert not list(tmp_path.iterdir())

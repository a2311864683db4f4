"""Layers of this library inside Darts' RNNModel. Training needs Darts; the counted layer does not."""

import logging

import numpy as np
import pytest
import torch

import unfading
from unfading.darts.counted_layer import CountedLayer


@pytest.mark.parametrize("name", ["STAR", "IncrementalRNN"])
def test_two_calls_with_a_carried_state_equal_one(name):
    options = {"inner_steps": 2, "steps": 9} if name == "IncrementalRNN" else {}
    layer = CountedLayer(getattr(unfading, name)(3, 4, num_layers=2, batch_first=True, dtype=torch.float64, **options))
    if name == "IncrementalRNN":  # step sizes that differ from step to step, so that a lost count is seen
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    whole, (_, steps) = layer(x)
    first, state = layer(x[:, :5])
    second, (_, steps_of_two) = layer(x[:, 5:], state)
    assert torch.allclose(torch.cat([first, second], dim=1), whole, rtol=1e-12, atol=1e-12)
    assert steps == steps_of_two == 9


def test_without_darts_the_extra_is_named():
    try:
        import darts  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install 'unfading\[darts\]'"):
            _ = unfading.darts.STAR
    else:
        with pytest.raises(AttributeError, match=r"unknown layer 'STARR'. Did you mean 'STAR'"):
            _ = unfading.darts.STARR


@pytest.fixture
def darts_model():
    pytest.importorskip("darts")
    pytest.importorskip("pytorch_lightning")
    from darts.models import RNNModel

    logging.disable(logging.WARNING)

    def build(model):
        quiet = ("enable_progress_bar", "logger", "enable_checkpointing", "enable_model_summary")
        return RNNModel(
            model=model,
            input_chunk_length=12,
            training_length=24,
            hidden_dim=8,
            n_epochs=4,
            random_state=0,
            optimizer_kwargs={"lr": 0.02},
            pl_trainer_kwargs={"accelerator": "cpu", **dict.fromkeys(quiet, False)},
        )

    yield build
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")
def test_darts_trains_and_forecasts_with_a_layer(darts_model, tmp_path):
    from darts.models import RNNModel
    from darts.utils.serialization import safe_globals

    from darts import TimeSeries

    wave = np.sin(2 * np.pi * np.arange(200) / 12)
    series = TimeSeries.from_values(wave[:180])
    model = darts_model(unfading.darts.GRU)
    model.fit(series)
    forecast = model.predict(20).values()[:, 0]
    assert np.abs(forecast - wave[180:]).mean() < 0.5

    # The same network, called on the whole sequence at each step.
    network = model.model.eval()
    x = torch.from_numpy(wave[168:180])[None, :, None]
    with torch.no_grad():
        for _ in range(20):
            output, _ = network.rnn(x)
            x = torch.cat([x, network.V(output)[:, -1:]], dim=1)
    np.testing.assert_allclose(forecast, x[0, 12:, 0].numpy(), rtol=1e-9)

    model.save(str(tmp_path / "model.pt"))
    with safe_globals([unfading.darts.GRU]):
        again = RNNModel.load(str(tmp_path / "model.pt"))
    assert np.array_equal(again.predict(20, series=series).values()[:, 0], forecast)


@pytest.mark.filterwarnings("ignore")
def test_options_and_own_cells_are_class_attributes(darts_model):
    from darts import TimeSeries

    class Low(unfading.darts.RecurrentModule):
        layer = unfading.FastGRNN
        options = {"rank": 3}

    series = TimeSeries.from_values(np.random.default_rng(0).standard_normal(60))
    known = TimeSeries.from_values(np.arange(80.0))
    model = darts_model(Low)
    model.fit(series, future_covariates=known)
    assert model.predict(5, future_covariates=known).values().shape == (5, 1)
    assert isinstance(model.model.rnn.rnn, unfading.FastGRNN)
    assert model.model.rnn.rnn.input_size == 2

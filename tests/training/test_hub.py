"""Trained models in folders of huggingface_hub: what is written is read again, without a network and without a pickle."""

import json
import sys

import numpy as np
import pytest
import torch

import unfading
from tests.helpers.trained import small
from unfading import TrainedModel, train
from unfading.training import weights

DRAW = np.random.default_rng(0)
X = DRAW.standard_normal((40, 4, 2))
LABELS = np.where(X.mean(axis=(1, 2)) > 0, "up", "down")


class DoublingCell(unfading.STARCell):
    """STAR under a name of the user's."""


@pytest.fixture(scope="module")
def hub():
    return pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def model():
    return unfading.fit(X, LABELS, "GRU", hidden=3, epochs=2, test=0.2, backend="reference", say=lambda text: None)


def test_a_model_is_read_as_it_was_written(hub, model, tmp_path, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: pytest.fail("a folder needs no network"))
    model.save_pretrained(tmp_path / "mine")
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    read = TrainedModel.from_pretrained(tmp_path / "mine")
    plain = unfading.load(tmp_path / "mine" / "model.safetensors")
    for other in (read, plain, unfading.load(tmp_path / "mine")):
        assert np.array_equal(other.outputs(X), model.outputs(X))
        assert other.predict(X).tolist() == model.predict(X).tolist()
    card = weights.card(tmp_path / "mine" / "model.safetensors")
    assert card["test"] == model.record["test"]
    assert card["run"] == model.run.to_json()
    readme = (tmp_path / "mine" / "README.md").read_text()
    assert f"| accuracy | {model.record['test']['accuracy']:.5g} |" in readme
    assert "library_name: unfading" in readme
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["cell"] == "GRU"
    read.save_pretrained(tmp_path / "again")
    assert weights.card(tmp_path / "again" / "model.safetensors")["test"] == model.record["test"]


def test_what_is_pushed_is_what_is_saved(hub, model, tmp_path, monkeypatch):
    sent = {}

    class Api:
        def __init__(self, **options):
            pass

        def create_repo(self, repo_id, **options):
            sent["repository"] = repo_id
            return type("Repository", (), {"repo_id": repo_id})

        def upload_folder(self, *, folder_path, **options):
            sent["model"] = unfading.load(f"{folder_path}/model.safetensors")
            return "https://commit"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    assert model.push_to_hub("me/mine") == "https://commit"
    assert sent["repository"] == "me/mine"
    assert np.array_equal(sent["model"].outputs(X), model.outputs(X))


def test_a_cell_of_ones_own_needs_its_class(hub, tmp_path):
    run = small(cell=DoublingCell, steps=2)
    train(run, tmp_path, say=lambda text: None)
    trained = unfading.load(tmp_path / run.key, cell=DoublingCell)
    trained.save_pretrained(tmp_path / "mine")
    with pytest.raises(ValueError, match="names a user's own code"):
        TrainedModel.from_pretrained(tmp_path / "mine")
    read = TrainedModel.from_pretrained(tmp_path / "mine", cell=DoublingCell)
    assert type(unfading.load(tmp_path / "mine", cell=DoublingCell).rnn.cells[0]) is DoublingCell
    assert all(torch.equal(part, read.state_dict()[name]) for name, part in trained.state_dict().items())


def test_a_changed_file_and_a_folder_of_something_else_are_refused(hub, model, tmp_path):
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        TrainedModel.from_pretrained(tmp_path)
    file.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")  # a pickle
    with pytest.raises(ValueError, match="does not exist"):
        TrainedModel.from_pretrained(tmp_path)


def test_without_huggingface_hub_the_error_names_the_extra(model, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "unfading.training.hub", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'unfading\[hub\]'"):
        model.save_pretrained(tmp_path / "mine")
    assert not (tmp_path / "mine").exists()

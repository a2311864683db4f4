"""The published files, where they are: counts, shapes, label histograms and statistics that others have printed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import made_files
from tests.helpers.paths import REAL_DATA
from unfading.data import store
from unfading.tasks.sensors import HAR2, HAR6, HELD_OUT_PEOPLE
from unfading.tasks.speech import WORDS, Google12, Google30
from unfading.tasks.text import END, PTBCharacters, PTBWords, read_tokens
from unfading.tasks.ucr import UCR


def test_har_is_the_published_set(real):
    real("har")
    task = HAR6()
    train, test = task.examples("train"), task.examples("test")
    assert train.x.shape == (7352, 128, 9)
    assert test.x.shape == (2947, 128, 9)
    assert torch.bincount(train.target).tolist() == [1226, 1073, 986, 1286, 1374, 1407]
    assert torch.bincount(test.target).tolist() == [496, 471, 420, 491, 532, 537]
    # As printed in the README of guillaume-chevalier's LSTM for this set.
    assert test.x.double().mean().item() == pytest.approx(0.0991399, abs=1e-6)
    assert test.x.double().std().item() == pytest.approx(0.395671, abs=1e-6)
    assert torch.bincount(HAR2().examples("train").target).tolist() == [1073 + 1286 + 1407, 1226 + 986 + 1374]


def test_no_person_of_har_is_in_two_splits(real):
    real("har")
    task = HAR6()
    people = task.people("train")
    train, valid, test = (
        set(own.tolist()) for own in (people[task.rows("train")], people[task.rows("valid")], task.people("test"))
    )
    assert (len(train), valid, len(test)) == (17, set(HELD_OUT_PEOPLE), 9)
    assert not train & valid | train & test | valid & test
    assert len(task.rows("valid")) == 1485


@pytest.mark.parametrize(
    ("task", "counts"),
    [(PTBWords(), (929_589, 73_760, 82_430)), (PTBCharacters(), (5_017_482, 393_042, 442_423))],
    ids=["words", "characters"],
)
def test_ptb_has_the_published_counts(real, task, counts):
    real("ptb")
    tokens = [task.tokens(split) for split in ("train", "valid", "test")]
    assert tuple(map(len, tokens)) == counts
    assert len(tokens[0].unique()) == task.symbols
    # The commonest token has number 0, and so on.
    frequency = torch.bincount(tokens[0])
    assert torch.equal(frequency, frequency.sort(descending=True).values)


def test_ptb_ends_each_line(real):
    real("ptb")
    path = store.path("ptb", "ptb.valid.txt")
    assert read_tokens(path).count(END) == 3370 == path.read_text().count("\n")
    assert read_tokens(path)[:4] == ["consumers", "may", "want", "to"]


@pytest.mark.parametrize(
    ("name", "rows", "steps", "channels", "classes"),
    [
        ("Crop", (7200, 16800), 46, 1, 24),
        ("ECG5000", (500, 4500), 140, 1, 5),
        ("JapaneseVowels", (270, 370), 29, 12, 9),
        ("BasicMotions", (40, 40), 100, 6, 4),
        ("ItalyPowerDemand", (67, 1029), 24, 1, 2),
        ("GunPoint", (50, 150), 150, 1, 2),
        ("ArrowHead", (36, 175), 251, 1, 3),
    ],
)
@pytest.mark.sample(3)
def test_sets_of_the_archives_have_their_published_sizes(real, name, rows, steps, channels, classes):
    real("ucr")
    task = UCR(name)
    for part, count in zip(("train", "test"), rows, strict=True):
        assert task.examples(part).x.shape == (count, steps, channels)
        assert len(task.examples(part).target.unique()) == classes == task.classes
    if name == "Crop":
        assert torch.bincount(task.examples("train").target).tolist() == [300] * 24
    if name == "JapaneseVowels":
        assert torch.bincount(task.examples("train").target).tolist() == [30] * 9
        assert (task.examples("train").lengths.min(), task.examples("test").lengths.max()) == (7, 29)


@pytest.fixture
def sample(made, tmp_path, monkeypatch):
    """Real clips of Speech Commands, ten a word, with the lists that the publisher's rule makes, and made noise."""
    folder = Path(REAL_DATA or "nowhere") / "speech_commands_v0.01"
    if not all((folder / word).is_dir() for word in WORDS):
        pytest.skip("dataset speech_commands is not in UNFADING_DATA")
    own = tmp_path / "speech_commands_v0.01"
    for word in WORDS:
        (own / word).mkdir(parents=True)
        for path in sorted((folder / word).glob("*.wav"))[:10]:
            shutil.copy(path, own / word)
    shutil.copytree(made / "speech_commands_v0.01" / made_files.NOISE, own / made_files.NOISE)
    made_files.write_lists(own)
    monkeypatch.setenv("UNFADING_DATA", str(tmp_path))
    return own


def test_real_clips_become_features(sample):
    task = Google30()
    train, test = task.examples("train"), task.examples("test")
    assert len(train.x) + len(test.x) == 300
    assert train.x.shape[1:] == test.x.shape[1:] == (99, 32)
    assert train.x.isfinite().all()
    assert np.bincount(torch.cat([train.target, test.target])).tolist() == [10] * 30
    # Speech: the loudest step of a clip is far above its quietest, and low bands are louder than the highest.
    loudness = train.x.mean(dim=2)
    assert (loudness.max(dim=1).values - loudness.min(dim=1).values).median() > 5
    assert train.x.mean(dim=(0, 1))[2:12].mean() > train.x.mean(dim=(0, 1))[-1]
    assert Google12().classes == 12
    assert len(Google12().examples("train").x) > 80

"""Gestures from folders of JPEG frames: which clips and frames are read, the network, and damaged files."""

import builtins
import re

import numpy as np
import pytest
import torch
from PIL import Image

import unfading
from tests.helpers.made_files import write_jester, write_jpeg
from unfading.tasks import Jester
from unfading.tasks.gestures import CLIPS


@pytest.fixture
def jester(tmp_path, monkeypatch):
    """A data folder of its own, whose files a test may change."""
    write_jester(tmp_path / "jester", np.random.RandomState(0))
    monkeypatch.setenv("UNFADING_DATA", str(tmp_path))
    return tmp_path / "jester"


def draw(task, index=0, size=4, split="train"):
    return task.batch(index, size, split=split, seed=0, device="cpu")


def first_clip(folder, frames, shape=(10, 14, 3)):
    """Put frames of one brightness each, 10, 20, 30 ..., into the first clip of the split `test`."""
    clip = folder / CLIPS / (folder / "jester-v1-validation.csv").read_text().split(";")[0]
    for path in clip.iterdir():
        path.unlink()
    for number in range(1, frames + 1):
        write_jpeg(clip / f"{number:05d}.jpg", np.full(shape, 10 * number, dtype=np.uint8))
    return clip


def shown(task):
    """The brightness of each step of that clip."""
    return (255 * draw(task, split="test").x[:, 0].mean(dim=(1, 2, 3))).round().long().tolist()


def test_test_is_the_publisher_s_validation_and_training_keeps_a_fifth(jester):
    task = Jester(T=2, size=4)
    clips = [int(line.split(";")[0]) for line in (jester / "jester-v1-validation.csv").read_text().splitlines()]
    assert task.examples("test").x.tolist() == clips
    assert len(task.rows("full")) == 29
    assert len(task.rows("valid")) == 5
    assert draw(task, split="test").target.tolist() == [
        int(line.rpartition(" ")[2]) for line in (jester / "jester-v1-validation.csv").read_text().splitlines()[:4]
    ]


def test_the_frames_in_the_middle_are_read_and_the_last_is_held(jester):
    first_clip(jester, 9)
    assert shown(Jester(T=3, size=4)) == [40, 50, 60]
    assert shown(Jester(T=4, size=4)) == [30, 40, 50, 60]
    first_clip(jester, 2)
    assert shown(Jester(T=4, size=4)) == [10, 20, 20, 20]


def test_a_frame_is_scaled_and_its_colours_are_channels(jester):
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:4, :, 0], pixels[:, 8:, 2] = 200, 100
    clip = first_clip(jester, 1)
    write_jpeg(clip / "00001.jpg", pixels)
    frame = 255 * draw(Jester(T=1, size=4), split="test").x[0, 0]
    assert frame.shape == (3, 4, 4)
    red, green, blue = frame
    assert red[0].min() > 150 > 50 > red[3].max()
    assert green.max() < 60
    assert blue[:, 3].min() > 60 > 40 > blue[:, 0].max()


def test_the_network_is_that_of_the_paper(jester):
    task = Jester()
    assert (task.T, task.size, task.input_size, task.classes) == (32, 112, 3, 27)
    rnn = unfading.ConvSTAR(task.input_size, 64, num_layers=12)
    with torch.device("meta"):
        head = task.head(rnn.output_size)
    assert isinstance(head, unfading.GestureHead)
    # By the equations: the first layer reads three colours, eleven more read 64 channels.
    assert sum(p.numel() for p in rnn.parameters()) == 9 * 64 * (2 * 3 + 64) + 11 * 9 * 64 * 3 * 64 + 12 * 128


def test_frames_are_read_for_a_training_run(jester):
    task = {"task": "jester", "task_options": {"T": 3, "size": 6}}
    run = unfading.Run(**task, cell="ConvSTAR", hidden=2, batch=3, steps=2, valid_every=2, valid_batches=1)
    record = unfading.train(run)
    assert record["status"] == "finished"
    assert 0 < record["guess"] < 1


def damaged(jester):
    clip = first_clip(jester, 3)
    (clip / "00002.jpg").write_bytes((clip / "00001.jpg").read_bytes()[:100])


def not_a_jpeg(jester):
    Image.new("RGB", (4, 4)).save(first_clip(jester, 3) / "00002.jpg", format="PNG")


def other_size(jester):
    write_jpeg(first_clip(jester, 3) / "00003.jpg", np.zeros((10, 15, 3), dtype=np.uint8))


def too_large(jester):
    Image.new("L", (5000, 1)).save(first_clip(jester, 3) / "00001.jpg")


def gap(jester):
    (first_clip(jester, 5) / "00003.jpg").unlink()


def empty(jester):
    first_clip(jester, 0)


def no_clip(jester):
    first_clip(jester, 0).rmdir()


def unknown_gesture(jester):
    with (jester / "jester-v1-validation.csv").open("a") as file:
        file.write("77;Waving\n")


def no_gesture(jester):
    with (jester / "jester-v1-validation.csv").open("a") as file:
        file.write("77\n")


def few_gestures(jester):
    (jester / "jester-v1-labels.csv").write_text("Swiping Left\n")


FAULTS = {
    damaged: r"00002.jpg is damaged \(.*\). Unpack the archive again",
    not_a_jpeg: r"00002.jpg is damaged \(it is no JPEG\)",
    other_size: "00003.jpg has 15 x 10 pixels, and 00001.jpg of the same clip 14 x 10; all frames of a clip must have one size",
    too_large: r"00001.jpg is damaged \(it would have 5000 x 1 pixels\)",
    gap: "has 4 frames, and 00003.jpg is missing",
    empty: "has no frames: wanted 00001.jpg and so on",
    no_clip: "does not exist, and the label files list it",
    unknown_gesture: "line 8, names the gesture 'Waving', not one of the 27",
    no_gesture: "line 8, should be <clip>;<gesture>; got '77'",
    few_gestures: "should name 27 gestures, one a line; got 1 different ones",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.sample(3)
def test_a_fault_in_the_files_is_one_sentence(jester, fault):
    fault(jester)
    with pytest.raises((ValueError, FileNotFoundError), match=FAULTS[fault]) as caught:
        draw(Jester(T=3, size=4), split="test")
    assert "\n" not in str(caught.value)
    assert re.search(r"(again|archive)\.$", str(caught.value))


def test_without_pillow_a_sentence_says_how_to_get_it(jester, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments):
        if name == "PIL":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ValueError, match=r"reading video needs Pillow, which is not installed.*pip install 'unfading\[video\]'"
    ):
        draw(Jester(T=2, size=4))

"""Damaged, missing and unfit files: one sentence that names the file and the way out, and nothing is deleted."""

import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import made_files
from unfading.data import store
from unfading.tasks.crops import TUMCrops
from unfading.tasks.reviews import Yelp5
from unfading.tasks.sensors import DSA19, HAR6
from unfading.tasks.speech import Clip, Google12, Google30, features, read_wav
from unfading.tasks.text import PTBCharacters, PTBWords, number_tokens, read_tokens
from unfading.tasks.ucr import UCR

YELP = Yelp5(reviews=60, words=8, steps=9)
SIGNAL = "train/Inertial Signals/body_acc_x_train.txt"
SEGMENT = "a01/p1/s06.txt"
NOISE = f"{made_files.NOISE}/pink_noise.wav"


@pytest.fixture
def copied(made, tmp_path, monkeypatch):
    """A function that copies a made dataset to a folder of its own, to be damaged there."""

    def copy(name):
        folder = tmp_path / store.known(name).folder
        shutil.copytree(made / store.known(name).folder, folder)
        monkeypatch.setenv("UNFADING_DATA", str(tmp_path))
        return folder

    return copy


def text(old, new="", count=-1):
    """Damage: other text in a file."""
    return lambda path: path.write_text(path.read_text().replace(old, new, count))


def last_line(new):
    return lambda path: path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]) + new)


def first_line(new):
    return lambda path: path.write_bytes(new + b"\n" + path.read_bytes().split(b"\n", 1)[1])


def wav(samples, **options):
    return lambda path: made_files.write_wav(path, samples, **options)


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def arrays(**changes):
    """Damage: other arrays in an .npz file; None leaves one out."""

    def change(path):
        kept = {**dict(np.load(path)), **changes}
        np.savez(path, **{name: array for name, array in kept.items() if array is not None})

    return change


def nothing(path):
    """No damage: the file does not fit the task."""


def gone(path):
    """Damage: moved out of the way."""
    path.rename(path.with_name(f"{path.name}.away"))


CASES = {
    "har missing": (HAR6(), SIGNAL, gone, "dataset 'har' is incomplete: .*body_acc_x_train.txt is missing"),
    "har empty": (HAR6(), SIGNAL, empty, "body_acc_x_train.txt is empty"),
    "har cut in a line": (HAR6(), SIGNAL, last_line(" 1.0 2.0\n"), "body_acc_x_train.txt is cut short or altered: .*columns"),
    "har cut in a number": (HAR6(), SIGNAL, last_line("1.0e"), "body_acc_x_train.txt is cut short or altered"),
    "har a line too few": (HAR6(), SIGNAL, last_line(""), "body_acc_x_train.txt of dataset 'har' has 34 lines; wanted 35"),
    "har not finite": (HAR6(), SIGNAL, last_line(" nan" * 128), "body_acc_x_train.txt holds values that are not finite"),
    "har label": (HAR6(), "test/y_test.txt", last_line("7\n"), "y_test.txt holds 7; wanted 1 to 6"),
    "har person": (
        HAR6(),
        "train/subject_train.txt",
        last_line(""),
        "subject_train.txt of dataset 'har' has 34 lines; wanted 35",
    ),
    "dsa missing": (DSA19(), SEGMENT, gone, "dataset 'dsa' is incomplete: .*s06.txt is missing"),
    "dsa a line too few": (
        DSA19(),
        SEGMENT,
        last_line(""),
        "s06.txt has 45 in 124 lines; wanted 45 numbers a line in 125 lines",
    ),
    "dsa a column too few": (
        DSA19(),
        SEGMENT,
        lambda p: np.savetxt(p, np.ones((125, 44)), delimiter=","),
        "has 44 in 125 lines",
    ),
    "speech list missing": (
        Google30(),
        "testing_list.txt",
        gone,
        "'speech_commands' is incomplete: .*testing_list.txt is missing",
    ),
    "speech list empty": (Google30(), "testing_list.txt", empty, "testing_list.txt is empty"),
    "speech listed, not there": (
        Google30(),
        "testing_list.txt",
        last_line("bed/x.wav\n"),
        "lists bed/x.wav, which does not exist",
    ),
    "speech on both lists": (
        Google30(),
        "testing_list.txt",
        lambda p: shutil.copy(p.parent / "validation_list.txt", p),
        "is on both",
    ),
    "speech word": (Google30(), "wow", gone, "has no folder 'wow', one of its thirty words"),
    "noise missing": (Google12(), made_files.NOISE, gone, "has no WAV files, of which Google-12 makes its silence"),
    "noise short": (Google12(), NOISE, wav(np.ones(16000)), "pink_noise.wav has 1.0 s; wanted at least 11"),
    "yelp stars": (YELP, made_files.YELP, first_line(b'{"text": "good", "stars": 6}'), "line 1 has 6 stars; wanted"),
    "yelp fields": (
        YELP,
        made_files.YELP,
        first_line(b'{"text": "good"}'),
        "line 1 is not a review in JSON with 'text' and 'stars'",
    ),
    "yelp no object": (YELP, made_files.YELP, first_line(b"[1, 2]"), "line 1 is not a review in JSON"),
    "yelp byte": (YELP, made_files.YELP, first_line(b'{"text": "\xff", "stars": 5}'), "line 1 has an unknown byte, 0xff"),
    "yelp half": (YELP, made_files.YELP, half, r"line \d+ is not a review in JSON"),
    "yelp few": (Yelp5(reviews=90), made_files.YELP, nothing, "has 60 reviews; wanted 90. .* take reviews=60"),
    "yelp empty": (YELP, made_files.YELP, empty, "has 0 reviews; wanted 60"),
    "tum half": (TUMCrops(), "train.npz", half, "train.npz is not a complete .npz file"),
    "tum no labels": (TUMCrops(), "train.npz", arrays(y_date=None), "train.npz has no array 'y_date'"),
    "tum no label": (TUMCrops(per="sequence"), "test.npz", arrays(y=None), "test.npz has no array 'y'"),
    "tum features": (
        TUMCrops(),
        "train.npz",
        arrays(x=np.ones((25, 26, 55))),
        r"has x of shape \[25, 26, 55\]; wanted \[N, T, 54\]",
    ),
    "tum label": (TUMCrops(per="sequence"), "train.npz", arrays(y=np.full(25, -1)), "has -1 in y; wanted 0 to 999"),
    "tum one-hot": (TUMCrops(), "train.npz", arrays(y_date=np.ones((25, 26, 7))), "has y_date float64 .* wanted whole numbers"),
    "tum length": (TUMCrops(), "train.npz", arrays(lengths=np.full(25, 27)), "has 27 in lengths; wanted 1 to 26"),
    "tum not finite": (TUMCrops(), "train.npz", arrays(x=np.full((25, 26, 54), np.inf)), "observations that are not finite"),
    "tum objects": (
        TUMCrops(),
        "train.npz",
        arrays(x=np.array([{}], dtype=object)),
        "is a pickle: reading it would run whatever",
    ),
    "tum pickle": (
        TUMCrops(),
        "train.npz",
        lambda p: p.rename(p.parent / "b0.pkl"),
        "b0.pkl is a pickle.* Convert the published",
    ),
    "tum renamed": (TUMCrops(), "train.npz", lambda p: p.write_bytes(pickle.dumps([1])), "train.npz is a pickle.* Convert the"),
    "ucr name": (UCR("Corp"), "Crop", nothing, "unknown set 'Corp'. Did you mean 'Crop'"),
    "ucr part": (UCR(), "Crop/Crop_TEST.tsv", gone, "has no Crop_TEST.ts or .tsv. Fetch the set from http"),
    "ucr label": (
        UCR(),
        "Crop/Crop_TEST.tsv",
        text("\n3\t", "\n4\t", 1),
        "has label '4'; wanted one of 1, 2, 3, as in training",
    ),
    "ucr channels": (
        UCR("Vowels"),
        "Vowels/Vowels_TEST.ts",
        lambda p: p.write_text("@dimensions 1\n@classLabel true a e\n@data\n1,2:a\n"),
        "has 1 channels; wanted 3, as in training",
    ),
}


@pytest.mark.parametrize(("task", "file", "damage", "sentence"), CASES.values(), ids=CASES.keys())
def test_a_damaged_file_is_named_and_left_as_it_is(copied, task, file, damage, sentence):
    folder = copied(task.dataset)
    damage(folder / file)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as caught:
        (
            task.batch(0, 2, split="train", seed=0, device="cpu").x.sum()
            + task.batch(0, 2, split="test", seed=0, device="cpu").x.sum()
        )
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (wav(np.ones(8000), rate=8000), "has 8000 Hz, 1 channel.*; wanted 16000 Hz, 1 channel, 16 bits. Convert it: ffmpeg"),
        (wav(np.ones(16000), channels=2), r"has 16000 Hz, 2 channel\(s\)"),
        (wav(np.ones(16001)), "has 16001 samples; wanted at most 16000, one second"),
        (wav([]), "holds no samples"),
        (half, "is cut short: 7989 of 16000 samples"),
        (empty, "is not a valid WAV file"),
        (lambda path: path.write_bytes(b"no sound at all"), "is not a valid WAV file"),
    ],
)
def test_a_wav_file_of_another_kind_is_named(tmp_path, damage, sentence):
    path = tmp_path / "one.wav"
    made_files.write_wav(path, np.ones(16000))
    assert len(read_wav(path)) == 16000
    damage(path)
    with pytest.raises(ValueError, match=sentence) as caught:
        read_wav(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_short_clip_is_filled_up_in_front(tmp_path):
    sound = np.random.default_rng(0).integers(-900, 900, 7000)
    made_files.write_wav(tmp_path / "short.wav", sound)
    made_files.write_wav(tmp_path / "long.wav", np.concatenate([np.zeros(9000), sound]))
    short, long = features([Clip(tmp_path / "short.wav", 0), Clip(tmp_path / "long.wav", 0)])
    assert short.equal(long)


def test_the_documented_conversion_makes_what_is_read(made, tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    monkeypatch.setenv("UNFADING_DATA", str(tmp_path))
    wanted = {}
    for part in ("train", "test"):
        (tmp_path / "tum" / "data" / part).mkdir(parents=True)
        batches = []
        for number in range(2):
            labels = random.integers(0, 7, (10, 26))
            batch = random.normal(size=(10, 26, 55)), np.eye(7)[labels], random.integers(5, 27, 10)
            (tmp_path / "tum" / "data" / part / f"b{number}.pkl").write_bytes(pickle.dumps(batch, protocol=2))
            batches.append((batch[0], labels, batch[2]))
        wanted[part] = [np.concatenate(field) for field in zip(*batches, strict=True)]
    with pytest.raises(ValueError, match=r"b0.pkl is a pickle.* Convert the published files as docs/tasks/real-data.md shows"):
        TUMCrops().examples("train")
    page = (Path(__file__).parent.parent.parent / "docs" / "tasks" / "real-data.md").read_text()
    script = re.search(r"```sh\n(cd .*?)```", page, re.DOTALL)[1].replace("python3", sys.executable)
    subprocess.run(["sh", "-c", script], check=True)
    for part, (x, labels, lengths) in wanted.items():
        dates, whole = TUMCrops().examples(part), TUMCrops(per="sequence").examples(part)
        np.testing.assert_array_equal(dates.x, x[:, :, :54].astype(np.float32))
        np.testing.assert_array_equal(dates.lengths, lengths)
        np.testing.assert_array_equal(dates.target, labels)
        for row, (own, length) in enumerate(zip(labels, lengths, strict=True)):
            counts = np.bincount(own[:length], minlength=7)
            assert counts[whole.target[row]] == counts.max()


def test_fields_that_are_all_seen_to_the_end_need_no_lengths(copied):
    folder = copied("tum")
    for part in ("train", "test"):
        arrays(lengths=None)(folder / f"{part}.npz")
    batch = TUMCrops().batch(0, 3, split="train", seed=0, device="cpu")
    assert batch.lengths is None
    assert batch.mask.all()


def test_bytes_and_tokens_that_a_text_cannot_have_are_named(tmp_path):
    path = tmp_path / "ptb.test.txt"
    path.write_bytes(b" the \xfe market \n")
    with pytest.raises(ValueError, match=r"ptb.test.txt has an unknown byte, 0xfe, at 5"):
        read_tokens(path)
    with pytest.raises(ValueError, match=r"ptb.test.txt holds 'soup', which the training file does not"):
        number_tokens(["the", "soup"], {"the": 0}, path)


def test_a_text_that_is_not_the_published_one_is_refused(made, tmp_path, monkeypatch):
    monkeypatch.undo()
    shutil.copytree(made / "ptb", tmp_path / "ptb")
    monkeypatch.setenv("UNFADING_DATA", str(tmp_path))
    for task in (PTBWords(), PTBCharacters()):
        with pytest.raises(ValueError, match=r"ptb\..*txt is altered or cut short: its sha256"):
            task.tokens("train")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: HAR6(normalise="chanel"), "unknown normalise 'chanel'. Did you mean 'channel'"),
        (lambda: DSA19(split_by="subject"), "unknown split_by 'subject'. Did you mean 'subjects'"),
        (lambda: TUMCrops(per="dates"), "unknown per 'dates'. Did you mean 'date'"),
        (lambda: PTBWords(steps=0), "steps must be at least 1; got 0"),
        (lambda: PTBCharacters(embedding=0), "embedding must be at least 1; got 0"),
        (lambda: Yelp5(reviews=9), "reviews must be at least 10; got 9"),
        (lambda: Yelp5(words=1), "words must be at least 2; got 1"),
    ],
)
def test_an_option_that_cannot_be_is_refused_at_once(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()

"""Every file format that the library reads, in thousands of damaged copies.

A reader returns, or raises a ValueError or FileNotFoundError of one sentence that names the file. It takes less than a gigabyte
and a few seconds, writes nothing outside its target, and runs no code.
"""

import contextlib
import functools
import io
import json
import random
import shutil
import tarfile
import time
import wave
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import unfading
from tests.helpers import made_data
from tests.helpers.mutations import mutated, mutated_json
from tests.helpers.paths import ROOT
from tests.helpers.trained import small, stopped_after
from unfading.bench import results
from unfading.data import store
from unfading.diagnostics.subject import read_array
from unfading.papers import ledger
from unfading.report import records
from unfading.tasks import image_files
from unfading.tasks.clip_files import read_frame
from unfading.tasks.crops import read_crops
from unfading.tasks.gestures import read_gestures, read_list
from unfading.tasks.reviews import read_reviews
from unfading.tasks.sensors import _table
from unfading.tasks.series import read_series
from unfading.tasks.speech import _listed, read_wav
from unfading.tasks.text import number_tokens, read_tokens
from unfading.training import checkpoint, run_dir, weights
from unfading.training.train import train

MEMORY = 1_000_000_000  # bytes that a reader may take beyond those of the process
SECONDS = 5.0  # of processor time


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """A folder with a sound file of each format."""
    folder = tmp_path_factory.mktemp("seeds")
    made_data.lay_out(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        stopped_after(10, patch, lambda: train(small(), folder / "stopped"))
    train(small(), folder / "runs")
    weights.save(folder / "runs" / small().key, folder / "weights.safetensors")
    # Without checksum, so that damage is not found at once.
    for name, source in (("old", "weights.safetensors"), ("old_last", f"{RUNS}/last.safetensors")):
        tensors, header = checkpoint.load(folder / source)
        safetensors.torch.save_file(tensors, folder / f"{name}.safetensors", {checkpoint.HEADER: json.dumps(header)})
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(5, 3, 2)).astype(np.float32))
    with zipfile.ZipFile(folder / "set.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(3):
            archive.writestr(f"top/{i}.txt", f"file {i} " * 20)
    for name, mode in (("set.tgz", "w:gz"), ("set.tar", "w")):
        with tarfile.open(folder / name, mode) as archive:
            for i in range(3):
                content = f"file {i} ".encode() * 20
                info = tarfile.TarInfo(f"top/{'long' * 30}{i}.txt")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return folder


@functools.cache
def unsealed(path):
    """The JSON of a file without its checksum."""
    content = json.loads(path.read_text())
    content.pop("sha256")
    return content


@functools.cache
def rows_of(path):
    return b"".join(json.dumps(row).encode() + b"\n" for row in run_dir.read_curve(path))


def unpacked(path):
    target = path.parent / "into"
    try:
        store.unpack(path, target)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def tokens_of(path):
    tokens = read_tokens(path)
    number_tokens(tokens, {token: i for i, token in enumerate(tokens)}, path)


def har_table(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "path", lambda dataset, file: path)
        _table("har", "file", 128)


def dsa_table(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "path", lambda dataset, file: path)
        _table("dsa", "file", 45, delimiter=",", rows=125)


def load_weights(path):
    weights.card(path)
    unfading.load(path)


def load_checkpoint(path):
    tensors, header = checkpoint.load(path)
    run_dir._check_header(path.with_name("last.safetensors"), header)
    model = small().make_model()
    targets = {f"model.{name}": part for name, part in model.state_dict().items()}
    with torch.no_grad():
        checkpoint.restore(targets, tensors, path)


def report_of(path):
    records.load([path])


class AllClips(dict):
    """A folder in which every clip of a list exists, unless its name is no text of one line."""

    def __contains__(self, name):
        return name.isprintable()


RUNS = f"runs/{small().key}"
HALTED = f"stopped/{small().key}"
DATA = "data"
SPEECH = "data/speech_commands_v0.01"


# Of each format: the sound file, its name in the test, and its reader.
BYTES = {
    "run.json": (f"{RUNS}/run.json", "run.json", run_dir.read_run),
    "record.json": (f"{RUNS}/record.json", "record.json", run_dir.read_record),
    "curve.jsonl": (f"{HALTED}/curve.jsonl", "curve.jsonl", run_dir.read_curve),
    "checkpoint": (f"{HALTED}/last.safetensors", "last.safetensors", load_checkpoint),
    "checkpoint without checksum": ("old_last.safetensors", "last.safetensors", load_checkpoint),
    "weights": ("weights.safetensors", "w.safetensors", load_weights),
    "weights without checksum": ("old.safetensors", "w.safetensors", load_weights),
    "idx images": (f"{DATA}/MNIST/raw/t10k-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz", image_files.read_idx),
    "idx labels": (f"{DATA}/MNIST/raw/t10k-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte.gz", image_files.read_idx),
    "cifar": (f"{DATA}/cifar-10-batches-bin/test_batch.bin", "test_batch.bin", image_files.read_cifar),
    "digits": (f"{DATA}/digits/digits.csv.gz", "digits.csv.gz", image_files.read_digits),
    "ptb": (f"{DATA}/ptb/ptb.test.txt", "ptb.test.txt", tokens_of),
    "har": (f"{DATA}/UCI HAR Dataset/test/Inertial Signals/body_acc_x_test.txt", "body_acc_x_test.txt", har_table),
    "dsa": (f"{DATA}/dsa/data/a01/p1/s06.txt", "s06.txt", dsa_table),
    "ts": (f"{DATA}/UCR/Vowels/Vowels_TEST.ts", "Vowels_TEST.ts", read_series),
    "tsv": (f"{DATA}/UCR/Crop/Crop_TEST.tsv", "Crop_TEST.tsv", read_series),
    "wav": (
        f"{SPEECH}/_background_noise_/pink_noise.wav",
        "pink_noise.wav",
        lambda path: read_wav(path, longest=None),
    ),
    "list of clips": (
        f"{SPEECH}/testing_list.txt",
        "testing_list.txt",
        lambda path: _listed(path, AllClips()),
    ),
    "yelp": (f"{DATA}/yelp/yelp_academic_dataset_review.json", "review.json", lambda path: list(read_reviews(path, 60))),
    "jpeg": (
        f"{DATA}/jester/20bn-jester-v1/1/00001.jpg",
        "00001.jpg",
        lambda path: read_frame(Image, path, 8),
    ),
    "list of gestures": (f"{DATA}/jester/jester-v1-labels.csv", "jester-v1-labels.csv", read_gestures),
    "clips and gestures": (
        f"{DATA}/jester/jester-v1-train.csv",
        "jester-v1-train.csv",
        lambda path: read_list(path, {f"Gesture number {number}": number for number in range(27)}),
    ),
    "npz": (f"{DATA}/tum/test.npz", "test.npz", lambda path: read_crops(path, "y")),
    "npy": ("x.npy", "x.npy", lambda path: read_array("--data", path)),
    "zip": ("set.zip", "set.zip", unpacked),
    "tar.gz": ("set.tgz", "set.tgz", unpacked),
    "tar": ("set.tar", "set.tar", unpacked),
}


loaded = functools.cache(checkpoint.load)


def of_last_header(numbers, path, folder):
    tensors, header = loaded(folder / HALTED / "last.safetensors")
    checkpoint.save(path, tensors, mutated_json(header, numbers))


def of_card(numbers, path, folder):
    tensors, card = loaded(folder / "weights.safetensors")
    checkpoint.save(path, tensors, mutated_json(card, numbers))


def of_object(name):
    def write(numbers, path, folder):
        path.write_text(json.dumps(mutated_json(unsealed(folder / name), numbers)))

    return write


def of_lines(name, rows):
    """Damage to one object of a file of lines, and to the text."""

    def write(numbers, path, folder):
        lines = rows(folder / name).splitlines()[:12]
        i = numbers.randrange(len(lines))
        lines[i] = json.dumps(mutated_json(json.loads(lines[i]), numbers)).encode()
        path.write_bytes(b"\n".join(lines) + b"\n")

    return write


def committed(name):
    return of_lines(ROOT / "benchmarks" / "results" / name, Path.read_bytes)


# Of each JSON format: a writer of a damaged file, its name, and its reader. There is no checksum, or it fits the damage.
OBJECTS = {
    "fields of run.json": (of_object(f"{RUNS}/run.json"), "run.json", run_dir.read_run),
    "fields of record.json": (of_object(f"{RUNS}/record.json"), "record.json", run_dir.read_record),
    "a record in a report": (of_object(f"{RUNS}/record.json"), "record.json", report_of),
    "rows of curve.jsonl": (of_lines(f"{HALTED}/curve.jsonl", rows_of), "curve.jsonl", run_dir.read_curve),
    "header of a checkpoint": (of_last_header, "last.safetensors", load_checkpoint),
    "card of weights": (of_card, "w.safetensors", load_weights),
    "ledger": (committed("papers-amd-epyc-2core.jsonl"), "papers-x.jsonl", ledger.read),
    "results of a benchmark": (committed("cpu-amd-epyc-2core.jsonl"), "cpu.jsonl", results.read),
}


@contextlib.contextmanager
def limited_memory():
    """A limit on the address space of this process: what it has now, and a gigabyte."""
    resource = pytest.importorskip("resource")
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("this system does not tell the size of a process")
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(status.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def attack(folder, name, write, read, trials):
    """Write damaged files and read each; returns how many were read without an error."""
    path = folder / "target" / name
    accepted = 0
    path.parent.mkdir(exist_ok=True)
    with limited_memory():
        for trial in range(trials):
            write(random.Random(f"{name} {trial}"), path)
            start = time.process_time()
            try:
                read(path)
                accepted += 1
            except (ValueError, FileNotFoundError) as error:
                text = str(error)
                assert path.stem in text, f"trial {trial}: the file is not named: {text[:300]}"
                assert "\n" not in text, f"trial {trial}: {text[:300]}"
                assert len(text) < 2000, f"trial {trial}: {text[:300]}"
            except BaseException as error:
                raise AssertionError(f"trial {trial}: {type(error).__name__}: {str(error)[:300]}") from error
            assert time.process_time() - start < SECONDS, f"trial {trial}"
            outside = {file.name for file in folder.iterdir()} - {"target", "run.json"}
            assert not outside, f"trial {trial}: {outside}"
            inside = {file.name for file in path.parent.iterdir()} - {name}
            assert not inside, f"trial {trial}: {inside}"
    return accepted


TRIALS = [pytest.param(100, id="sample"), pytest.param(10_000, id="all", marks=pytest.mark.long)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("name", BYTES)
@pytest.mark.sample(12)
def test_damaged_bytes_are_one_sentence(seeds, tmp_path, name, trials):
    source, own, read = BYTES[name]
    content = (seeds / source).read_bytes()
    others = [content] + [(seeds / other).read_bytes()[:20_000] for other, _, _ in BYTES.values()]
    marker = tmp_path / "executed"
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / own).write_bytes(content)
    read(tmp_path / "target" / own)

    def write(numbers, path):
        path.write_bytes(mutated(content, others, numbers, marker))

    attack(tmp_path, own, write, read, trials)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.sample(2)
def test_wrong_fields_are_one_sentence(seeds, tmp_path, name, trials):
    write, own, read = OBJECTS[name]
    attack(tmp_path, own, lambda numbers, path: write(numbers, path, seeds), read, trials)


def test_the_attack_finds_a_reader_without_checks(seeds, tmp_path):
    content = (seeds / BYTES["wav"][0]).read_bytes()[:2000]

    def read(path):
        with wave.open(str(path)) as file:
            file.readframes(file.getnframes())

    with pytest.raises(AssertionError, match="trial"):
        attack(tmp_path, "x.wav", lambda numbers, path: path.write_bytes(mutated(content, [content], numbers, "m")), read, 300)

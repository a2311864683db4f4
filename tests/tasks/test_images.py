"""Images as sequences: what step has which pixel, how bytes are scaled, what noise is; and the published files."""

import gzip

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.helpers.made_data import ROWS, idx
from unfading.tasks import Digits, NoisyCIFAR, NoisyMNIST, PermutedMNIST, PixelMNIST, image_files
from unfading.tasks.images import permutation


def draw(task, index=0, size=4, split="test", seed=0):
    return task.batch(index, size, split=split, seed=seed, device="cpu")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("incremental", [598, 590, 209, 637]),
        ("nru", [46, 466, 537, 44, 515, 589, 362, 765]),
        ("urnn", [319, 576, 323, 107]),
        ("cornn", [91, 97, 471, 426]),
        ("lem", [327, 72, 48, 129]),
        (7, np.random.RandomState(7).permutation(784)[:5].tolist()),
    ],
)
def test_named_permutations_begin_as_published(name, first):
    order = permutation(name)
    assert order[: len(first)].tolist() == first
    assert sorted(order) == list(range(784))


@pytest.mark.usefixtures("made")
class TestOnMadeFiles:
    """Random images in the publishers' layouts."""

    def test_pixels_come_row_after_row(self):
        images, labels = image_files.mnist("test")
        batch = draw(PixelMNIST(), size=ROWS["test"])
        assert batch.x.shape == (784, ROWS["test"], 1)
        assert_close(batch.x[28 * 3 + 5, :, 0], images[:, 3, 5] / 255)
        assert torch.equal(batch.target, labels)

    def test_a_permutation_says_which_pixel_comes_when(self):
        plain, permuted = draw(PixelMNIST()), draw(PermutedMNIST(permutation="urnn"))
        order = permutation("urnn")
        assert torch.equal(permuted.x[0], plain.x[319])
        assert torch.equal(permuted.x, plain.x[torch.from_numpy(order)])
        assert torch.equal(permuted.target, plain.target)

    @pytest.mark.parametrize("task", [PixelMNIST, NoisyCIFAR, Digits])
    def test_a_number_of_rows_is_held_out_and_the_rest_is_trained_on(self, task):
        held_out, trained = task(validation=3).rows("valid"), task(validation=3).rows("train")
        assert len(held_out) == 3
        assert sorted([*held_out.tolist(), *trained.tolist()]) == task().rows("full").tolist()
        assert held_out.tolist() == sorted(set(held_out.tolist()))

    def test_a_wrong_validation_is_one_sentence(self):
        with pytest.raises(ValueError, match=r"unknown validation 'nru'.*Or give a number of rows, an int"):
            NoisyCIFAR(validation="nru")
        with pytest.raises(ValueError, match="validation must be at least 1; got 0"):
            PixelMNIST(validation=0)
        with pytest.raises(ValueError, match=r"validation must be below \d+, the number of training rows; got 60000"):
            PixelMNIST(validation=60_000).rows("valid")

    def test_the_extra_step_is_a_zero_at_the_end(self):
        for scale in ("unit", "standard"):
            plain, longer = draw(PixelMNIST(scale=scale)), draw(PixelMNIST(scale=scale, extra_step=True))
            assert longer.x.shape[0] == 785
            assert torch.equal(longer.x[:784], plain.x)
            assert not longer.x[784].any()

    def test_rows_of_cifar_are_red_green_blue(self):
        images, labels = image_files.cifar10("test")
        batch = draw(NoisyCIFAR(40, scale="unit"))
        assert batch.x.shape == (40, 4, 96)
        for channel in range(3):
            want = images[:4, channel].transpose(0, 1) / 255
            assert_close(batch.x[:32, :, 32 * channel : 32 * (channel + 1)], want)
        assert torch.equal(batch.target, labels[:4])

    def test_noisy_mnist_is_the_image_and_then_noise(self):
        images, _ = image_files.mnist("test")
        batch = draw(NoisyMNIST(500, scale="unit"))
        assert_close(batch.x[:28], images[:4].transpose(0, 1) / 255)
        noise = batch.x[28:]
        assert noise.mean().item() == pytest.approx(0, abs=0.02)
        assert noise.std().item() == pytest.approx(1, abs=0.02)
        # Rows and steps have noise of their own.
        assert noise.flatten(0, 1).unique(dim=0).shape[0] == 472 * 4

    def test_noise_is_fresh_or_fixed(self):
        fresh, fixed = NoisyMNIST(60), NoisyMNIST(60, fixed_noise=True)
        assert not torch.equal(draw(fresh).x[28:], draw(fresh, index=1).x[28:])
        assert not torch.equal(draw(fresh).x[28:], draw(fresh, seed=1).x[28:])
        one = draw(fixed).x[28:, :1]
        assert torch.equal(draw(fixed, index=1, seed=3).x[28:], one.expand(-1, 4, -1))

    @pytest.mark.parametrize("split", ["train", "full"])
    def test_training_batches_grow_and_all_others_have_their_full_length(self, split):
        grown = NoisyMNIST(60, warmup_T=30, warmup_batches=2, growth_batches=3)
        plain = NoisyMNIST(60)
        lengths = [draw(grown, index=k, split=split).x.shape[0] for k in range(7)]
        assert lengths == [30, 30, 38, 48, 60, 60, 60]
        assert lengths == [grown.lengths.at(k) for k in range(7)]
        for other in ("valid", "test"):
            assert torch.equal(draw(grown, split=other).x, draw(plain, split=other).x)
        for k in (0, 2, 5):
            short, long = draw(grown, index=k, split=split), draw(plain, index=k, split=split)
            assert torch.equal(short.x[:28], long.x[:28])
            assert torch.equal(short.target, long.target)
        assert torch.equal(draw(grown, index=5, split=split).x, draw(plain, index=5, split=split).x)

    def test_a_shorter_batch_has_the_first_steps_of_the_fixed_noise(self):
        grown = NoisyCIFAR(60, fixed_noise=True, start=2, warmup_T=39, warmup_batches=1)
        short, long = (draw(grown, index=k, split="train").x for k in (0, 1))
        assert torch.equal(short[:2], long[:2])
        assert torch.equal(short[34:39], long[34:39])
        assert not torch.equal(short[2:34], long[2:34])

    @pytest.mark.parametrize("fixed_noise", [False, True])
    def test_an_image_starts_at_the_given_step(self, fixed_noise):
        plain, later = (draw(NoisyMNIST(60, fixed_noise=fixed_noise, start=start)).x for start in (0, 5))
        assert torch.equal(later[5:33], plain[:28])
        assert torch.equal(later[:5], plain[28:33])
        assert torch.equal(later[33:], plain[33:])

    @pytest.mark.parametrize("task", [NoisyMNIST, NoisyCIFAR])
    @pytest.mark.parametrize("fixed_noise", [False, True])
    def test_an_image_at_a_random_step_has_the_noise_around_it(self, task, fixed_noise):
        height, T = task.height, task.height + 7
        image = draw(task(T, fixed_noise=fixed_noise), size=ROWS["test"]).x
        moved = draw(task(T, fixed_noise=fixed_noise, start="random"), size=ROWS["test"]).x
        starts = []
        for b in range(ROWS["test"]):
            start = next(s for s in range(8) if torch.equal(moved[s : s + height, b], image[:height, b]))
            rest = torch.cat([moved[:start, b], moved[start + height :, b]])
            assert torch.equal(rest, image[height:, b])
            starts.append(start)
        assert len(set(starts)) > 2

    def test_random_steps_depend_on_seed_split_and_index_alone(self):
        task = NoisyMNIST(100, start="random")
        assert torch.equal(draw(task).x, draw(task).x)
        # The same images: what differs is the noise and the steps at which the images start.
        images = [NoisyMNIST(28).batch(0, 4, split="test", seed=0, device="cpu").x]

        def starts(x):
            return [next(s for s in range(73) if torch.equal(x[s : s + 28, b], images[0][:, b])) for b in range(4)]

        assert starts(draw(task).x) != starts(draw(task, seed=1).x)

    def test_random_steps_are_uniform(self):
        task = NoisyMNIST(30, start="random")
        image = draw(NoisyMNIST(28), size=ROWS["test"]).x
        first = torch.zeros(3)
        for seed in range(300):
            x = draw(task, size=ROWS["test"], seed=seed).x
            for s in range(3):
                first[s] += (x[s : s + 28] == image).all(dim=2).all(dim=0).sum()
        assert first.sum() == 300 * ROWS["test"]
        assert_close(first / first.sum(), torch.full((3,), 1 / 3), atol=0.04, rtol=0)

    def test_scales(self):
        images, _ = image_files.mnist("train")
        task = PixelMNIST()
        train = images[task.rows("train")].double().flatten(1)
        test = image_files.mnist("test")[0][:4].double().flatten(1)
        mean, std = train.mean(), train.std(correction=0)
        want = {
            "unit": test / 255,
            "signed": test / 127.5 - 1,
            "standard": (test - mean) / std,
            "pixelwise": (test - train.mean(dim=0)) / train.std(dim=0, correction=0),
        }
        for scale, x in want.items():
            assert_close(draw(PixelMNIST(scale=scale)).x[..., 0], x.T.float(), atol=1e-5, rtol=1e-5)

    def test_cifar_is_standardised_channel_by_channel(self):
        images, _ = image_files.cifar10("train")
        task = NoisyCIFAR(32, scale="standard")
        train = images[task.rows("train")].double()
        mean, std = train.mean(dim=(0, 2, 3)), train.std(dim=(0, 2, 3), correction=0)
        green = (image_files.cifar10("test")[0][:4, 1].double() - mean[1]) / std[1]
        assert_close(draw(task).x[:, :, 32:64], green.transpose(0, 1).float(), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("scale", ["standard", "pixelwise"])
    def test_normalisation_sees_the_training_rows_alone(self, scale, tmp_path, monkeypatch):
        task = PixelMNIST(scale=scale)
        valid = task.rows("valid")
        files = {part: image_files.mnist(part) for part in ("train", "test")}
        before = draw(task, split="train")
        changed = {part: (images.clone(), labels) for part, (images, labels) in files.items()}
        changed["train"][0][valid] = 255
        changed["test"][0].fill_(255)
        monkeypatch.setattr(image_files, "mnist", changed.get)
        # Another folder, so that nothing that was read before is used.
        monkeypatch.setenv("UNFADING_DATA", str(tmp_path))
        assert torch.equal(draw(task, split="train").x, before.x)
        assert not torch.equal(draw(task, split="valid").x, before.x)
        changed["train"][0][task.rows("train")[0]] = 255
        monkeypatch.setenv("UNFADING_DATA", str(tmp_path / "other"))
        assert not torch.equal(draw(task, split="train").x, before.x)

    def test_a_pixel_that_never_changes_is_not_divided_by_zero(self, tmp_path, monkeypatch):
        images = torch.zeros(20, 28, 28, dtype=torch.uint8)
        monkeypatch.setattr(image_files, "mnist", lambda part: (images, torch.zeros(20, dtype=torch.int64)))
        monkeypatch.setenv("UNFADING_DATA", str(tmp_path))
        for scale in ("standard", "pixelwise"):
            assert not draw(PixelMNIST(scale=scale)).x.any()


def write(path, content):
    path.write_bytes(content)
    return path


ARRAY = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)


def test_idx_is_read_as_it_was_written(tmp_path):
    assert image_files.read_idx(write(tmp_path / "a.gz", gzip.compress(idx(ARRAY)))).tolist() == ARRAY.tolist()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (gzip.compress(idx(ARRAY))[:-9], "not a complete gzip file"),
        (b"not gzip at all", "not a complete gzip file"),
        (gzip.compress(b"\x00\x00\x0d\x01" + bytes(9)), "should begin as idx of bytes, 00 00 08; got 00 00 0d 01"),
        (gzip.compress(b""), "should begin as idx of bytes"),
        (gzip.compress(idx(ARRAY)[:9]), "should begin as idx"),
        (gzip.compress(idx(ARRAY)[:-1]), r"says \[4, 3, 2\], 24 bytes; got 23"),
        (gzip.compress(idx(ARRAY) + b"x"), r"says \[4, 3, 2\], 24 bytes; got 25"),
    ],
    # Not the bytes: a compressed file has the time in it, and two processes that share the tests would name them differently.
    ids=["cut gzip", "no gzip", "other numbers", "empty", "cut header", "cut data", "too long"],
)
def test_a_damaged_idx_file_is_named(tmp_path, content, sentence):
    file = write(tmp_path / "a.gz", content)
    with pytest.raises(ValueError, match=sentence) as caught:
        image_files.read_idx(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert file.read_bytes() == content


def test_a_damaged_cifar_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="3,073 bytes an image; got 3072 bytes"):
        image_files.read_cifar(write(tmp_path / "a.bin", bytes(3072)))
    with pytest.raises(ValueError, match=r"labels 0 .. 9; got 10"):
        image_files.read_cifar(write(tmp_path / "b.bin", bytes([10]) + bytes(3072)))


def test_labels_must_fit_their_images(tmp_path):
    labels = torch.tensor([0, 3, 9], dtype=torch.uint8)
    assert image_files.labels(labels, tmp_path, classes=10, rows=3).tolist() == [0, 3, 9]
    with pytest.raises(ValueError, match=r"a label for each of 4 rows; got \[3\]"):
        image_files.labels(labels, tmp_path, classes=10, rows=4)
    with pytest.raises(ValueError, match=r"labels 0 .. 8; got 9"):
        image_files.labels(labels, tmp_path, classes=9, rows=3)


class TestOnPublishedFiles:
    """Counts, histograms and values of the true data."""

    def test_mnist(self, real):
        real("mnist")
        train, test = image_files.mnist("train"), image_files.mnist("test")
        assert train[0].shape == (60000, 28, 28)
        assert test[0].shape == (10000, 28, 28)
        assert train[1].bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert test[1].bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
        # The mean and deviation that everyone divides by.
        assert train[0].double().mean().item() / 255 == pytest.approx(0.1307, abs=5e-5)
        assert train[0].double().std().item() / 255 == pytest.approx(0.3081, abs=5e-5)
        task = PixelMNIST()
        assert task.guess == 0.1135
        assert (task.length("train", 100), task.length("valid", 100), task.length("test", 128)) == (480, 120, 79)
        assert train[1][task.rows("train")].bincount().min() > 4000

    def test_each_paper_s_own_validation_rows(self, real):
        real("mnist")
        tasks = {validation: PixelMNIST(validation=validation) for validation in ("fifth", "first_5000", "nru")}
        rows = {validation: set(task.rows("valid").tolist()) for validation, task in tasks.items()}
        assert {validation: len(some) for validation, some in rows.items()} == {
            "fifth": 12000,
            "first_5000": 5000,
            "nru": 10000,
        }
        assert rows["first_5000"] == set(range(5000))
        assert rows["nru"] == set(np.random.RandomState(50).permutation(60000)[50000:].tolist())
        for task in tasks.values():
            assert not set(task.rows("train").tolist()) & set(task.rows("valid").tolist())
            assert len(task.rows("train")) + len(task.rows("valid")) == 60000

    def test_cifar10(self, real):
        real("cifar10")
        train, test = image_files.cifar10("train"), image_files.cifar10("test")
        assert train[0].shape == (50000, 3, 32, 32)
        assert train[1].bincount().tolist() == [5000] * 10
        assert test[1].bincount().tolist() == [1000] * 10
        means = train[0].sum(dim=(0, 2, 3)).double() / (255 * 50000 * 1024)
        assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64), atol=1e-4, rtol=0)
        assert NoisyCIFAR().guess == 0.1
        assert draw(NoisyCIFAR(), size=2).x.shape == (1000, 2, 96)

    def test_digits(self, real):
        real("digits")
        images, labels = image_files.digits()
        assert images.shape == (1797, 8, 8)
        assert images.max() == 16
        assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
        task = Digits()
        assert (len(task.rows("full")), len(task.rows("test"))) == (1438, 359)
        assert draw(task).x.max() <= 1

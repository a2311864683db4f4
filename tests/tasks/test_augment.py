"""Distortions of training images: the equation in NumPy, exact cases, bounds; and which rows of which tasks are distorted."""

import inspect
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.helpers.small_tasks import TASKS, small
from unfading.errors import unknown
from unfading.tasks import Digits, NoisyCIFAR, NoisyMNIST, PermutedMNIST, PixelMNIST, image_files
from unfading.tasks.augment import Augmentation, resampled
from unfading.tasks.draw import stream
from unfading.tasks.images import Images, permutation

# Coordinates are float32; neighbouring pixels of random images differ by up to 255.
CLOSE = {"atol": 0.01, "rtol": 0}
ALL = {"shift": 2.5, "rotate": 40.0, "zoom": 0.3, "flip": True}
IMAGE_TASKS = [name for name, task in TASKS.items() if issubclass(task, Images)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_images(*shape):
    return torch.randint(0, 256, shape, generator=generator(1), dtype=torch.uint8)


def drawn(augmentation, B, source):
    """Angle, size, right, down and whether it is mirrored, for each of B images, from the generator that draws them."""
    angle, zoom, down, right, mirrored = (torch.rand(B, generator=source).double().numpy() for _ in range(5))
    angle = (2 * angle - 1) * math.radians(augmentation.rotate)
    zoom, down, right = 1 + (2 * zoom - 1) * augmentation.zoom, *((2 * u - 1) * augmentation.shift for u in (down, right))
    return list(zip(angle, zoom, right, down, (mirrored < 0.5) & augmentation.flip, strict=True))


def twin(image, angle, zoom, right, down, mirrored):
    """The equation for one image [C, height, width], pixel by pixel, in float64."""
    image = image.double().numpy()
    _, height, width = image.shape
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    centre, shift = np.array([(width - 1) / 2, (height - 1) / 2]), np.array([right, down])
    result = np.empty_like(image)
    for row in range(height):
        for column in range(width):
            x, y = centre + rotation @ (np.array([column, row]) - centre) / zoom + shift
            total = 0.0
            for i in (math.floor(y), math.floor(y) + 1):
                for j in (math.floor(x), math.floor(x) + 1):
                    inside = image[:, min(max(i, 0), height - 1), min(max(j, 0), width - 1)]
                    total = total + (1 - abs(y - i)) * (1 - abs(x - j)) * inside
            result[:, row, column] = total
    return torch.from_numpy(result[:, :, ::-1].copy() if mirrored else result)


@pytest.mark.parametrize("options", [*({name: ALL[name]} for name in ALL), ALL], ids=str)
@pytest.mark.parametrize("shape", [(1, 9, 9), (3, 6, 11), (1, 10, 5), (3, 8, 8)], ids=str)
def test_images_are_distorted_as_the_equation_says(options, shape):
    augmentation, images = Augmentation(**options), random_images(6, *shape)
    got = augmentation(images, generator())
    assert got.dtype == torch.float32
    parts = drawn(augmentation, 6, generator())
    assert {mirrored for *_, mirrored in parts} == ({False, True} if augmentation.flip else {False})
    for image, result, part in zip(images, got, parts, strict=True):
        assert_close(result.double(), twin(image, *part), **CLOSE)
    assert not torch.equal(got, images.float())


def moved(images, *, angle=0.0, zoom=1.0, right=0.0, down=0.0):
    return resampled(images.float(), *(torch.full((len(images),), value) for value in (angle, zoom, right, down)))


def test_a_shift_by_whole_pixels_moves_pixels_and_repeats_the_edge():
    images = random_images(2, 3, 5, 8)
    rows, columns = (torch.arange(5) - 1).clamp(min=0), (torch.arange(8) + 2).clamp(max=7)
    assert_close(moved(images, right=2.0, down=-1.0), images[:, :, rows][..., columns].float(), **CLOSE)


def test_quarter_turns_are_those_of_numpy():
    images = random_images(2, 3, 7, 7)
    for turns in (1, 2, 3):
        want = np.rot90(images.numpy(), turns, axes=(2, 3)).copy()
        assert_close(moved(images, angle=turns * math.pi / 2), torch.from_numpy(want).float(), **CLOSE)
    assert_close(moved(random_images(2, 1, 4, 9), angle=math.pi), random_images(2, 1, 4, 9).flip(2, 3).float(), **CLOSE)


def test_a_larger_size_shows_the_centre_larger():
    images = random_images(2, 1, 9, 15)
    larger = moved(images, zoom=3.0)
    assert_close(larger[:, :, 1::3, 1::3], images[:, :, 3:6, 5:10].float(), **CLOSE)
    assert_close(moved(images, zoom=1 / 3)[:, :, 3:6, 5:10], images[:, :, 1::3, 1::3].float(), **CLOSE)


def test_a_flip_is_exactly_the_mirrored_image():
    images = random_images(40, 3, 28, 28)
    got = Augmentation(flip=True)(images, generator())
    for image, result, (*_, mirrored) in zip(images, got, drawn(Augmentation(flip=True), 40, generator()), strict=True):
        assert torch.equal(result, (image.flip(2) if mirrored else image).float())


def test_without_any_distortion_images_stay_as_they_are():
    images = random_images(4, 3, 6, 5)
    assert not Augmentation().active
    assert torch.equal(Augmentation()(images, generator()), images.float())
    assert all(Augmentation(**{name: value}).active for name, value in ALL.items())


def maps(augmentation, B, seed=0):
    """What was drawn, read from distorted images of their own coordinates: matrix [B, 2, 2] and d [B, 2], (right, down)."""
    line = torch.arange(31.0) - 15
    points = torch.stack([line.expand(31, 31), line.unsqueeze(1).expand(31, 31)])
    shown = augmentation(points.expand(B, -1, -1, -1), generator(seed))
    centre = shown[:, :, 15, 15]
    return torch.stack([shown[:, :, 15, 16] - centre, shown[:, :, 16, 15] - centre], dim=2), centre


def test_draws_are_uniform_within_their_bounds():
    matrix, d = maps(Augmentation(**ALL), 4000)
    determinant = matrix.det()
    zoom, mirrored = determinant.abs().rsqrt(), determinant < 0
    angle = torch.atan2(matrix[:, 1, 0], matrix[:, 0, 0])[~mirrored].rad2deg()
    for values, least, most in ((zoom, 0.7, 1.3), (angle, -40, 40), (d[:, 0], -2.5, 2.5), (d[:, 1], -2.5, 2.5)):
        share = (values - least) / (most - least)
        assert -1e-4 < share.min() < 0.01
        assert 0.99 < share.max() < 1 + 1e-4
        assert share.mean().item() == pytest.approx(0.5, abs=0.03)
        assert share.std().item() == pytest.approx(12**-0.5, abs=0.02)
    assert mirrored.double().mean().item() == pytest.approx(0.5, abs=0.03)
    assert abs(torch.corrcoef(torch.stack([zoom, d[:, 0], d[:, 1], mirrored.float()])).fill_diagonal_(0)).max() < 0.06


def test_a_distortion_does_not_depend_on_which_others_there_are():
    _, d = maps(Augmentation(shift=2.5), 50)
    matrix, _ = maps(Augmentation(rotate=40.0, zoom=0.3), 50)
    both, same = maps(Augmentation(shift=2.5, rotate=40.0, zoom=0.3), 50)
    assert_close(same, d, atol=1e-4, rtol=0)
    assert_close(both, matrix, atol=1e-4, rtol=0)


def test_the_default_dtype_and_the_layout_of_the_images_change_nothing():
    images = random_images(5, 3, 6, 11)
    want = Augmentation(**ALL)(images, generator())
    turned = images.transpose(1, 3).contiguous().transpose(1, 3)
    assert torch.equal(Augmentation(**ALL)(turned, generator()), want)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(Augmentation(**ALL)(images, generator()), want)
    finally:
        torch.set_default_dtype(torch.float32)


CASES = {
    "shift": ({"shift": -1.0}, ValueError, "shift must be at least 0; got -1.0"),
    "shift nan": ({"shift": math.nan}, ValueError, "shift must be finite; got nan"),
    "shift kind": ({"shift": "2"}, TypeError, "shift must be a number; got '2'"),
    "rotate": ({"rotate": -0.5}, ValueError, "rotate must be at least 0; got -0.5"),
    "rotate inf": ({"rotate": math.inf}, ValueError, "rotate must be finite; got inf"),
    "zoom": ({"zoom": 1}, ValueError, "zoom must be below 1, because at 1 an image may vanish; got 1"),
    "zoom negative": ({"zoom": -0.1}, ValueError, r"zoom must lie in \[0, 1\]; got -0.1"),
    "zoom nan": ({"zoom": math.nan}, ValueError, "zoom must be finite; got nan"),
    "flip": ({"flip": 1}, TypeError, r"flip must be True or False; got 1 \(int\)"),
}


@pytest.mark.parametrize("kind_of_task", [Augmentation, Digits])
@pytest.mark.parametrize(("options", "kind", "sentence"), CASES.values(), ids=CASES)
def test_a_wrong_distortion_is_one_sentence(kind_of_task, options, kind, sentence):
    with pytest.raises(kind, match=sentence) as caught:
        kind_of_task(**options)
    assert "\n" not in str(caught.value)


def test_every_distortion_has_a_wrong_value_in_the_cases_and_is_an_option_of_every_image_task():
    names = list(inspect.signature(Augmentation).parameters)
    assert names == list(ALL)
    for name in names:
        assert name in CASES, unknown("distortion", name, CASES)
        for task in IMAGE_TASKS:
            assert getattr(small(task).augmentation(), name) == getattr(small(task), name) == getattr(Augmentation(), name)
            assert getattr(small(task, **{name: ALL[name]}).augmentation(), name) == ALL[name]


def draw(task, index=0, size=4, split="train", seed=0):
    return task.batch(index, size, split=split, seed=seed, device="cpu")


every_image_task = pytest.mark.parametrize("name", IMAGE_TASKS)


@pytest.mark.usefixtures("made")
class TestOnMadeFiles:
    """Random images in the publishers' layouts."""

    @every_image_task
    def test_sequences_are_images_in_another_layout(self, name):
        task = small(name)
        images, labels = task.images("train")
        assert images.dim() == 4
        assert images.shape[1] == task.channels
        sequences, target = task.examples("train")[:2]
        assert sequences.shape[2] == task.input_size
        assert torch.equal(target, labels)
        assert torch.equal(task.as_images(sequences), images)
        assert torch.equal(task.as_sequences(task.as_images(sequences)), sequences)

    @pytest.mark.parametrize("order", ["incremental", "nru", "urnn", "cornn", "lem", 7])
    def test_permuted_pixels_are_put_back_in_place(self, order):
        task = PermutedMNIST(permutation=order)
        images, _ = image_files.mnist("test")
        sequences = task.examples("test").x
        assert torch.equal(sequences[:, :, 0], images.flatten(1)[:, permutation(order).tolist()])
        assert torch.equal(task.as_images(sequences).squeeze(1), images)

    @every_image_task
    def test_training_rows_alone_are_distorted(self, name):
        # The scale uses means of training rows, which are those of the files.
        plain, distorted = (small(name, scale="standard", **options) for options in ({}, ALL))
        for split in ("valid", "test"):
            for index in range(plain.length(split, 4)):
                assert torch.equal(draw(plain, index, split=split).x, draw(distorted, index, split=split).x)
        for split in ("train", "full"):
            one, other = draw(plain, split=split), draw(distorted, split=split)
            assert torch.equal(one.target, other.target)
            assert not torch.equal(one.x, other.x)
            assert (one.x.shape, one.x.dtype, one.x.is_contiguous()) == (other.x.shape, other.x.dtype, other.x.is_contiguous())
        assert plain.guess == distorted.guess
        assert torch.equal(plain.training().x, distorted.training().x)

    @every_image_task
    def test_without_distortions_training_rows_are_those_of_the_files(self, name, monkeypatch):
        monkeypatch.setattr(Augmentation, "__call__", lambda *arguments: pytest.fail("distorted"))
        task = small(name, scale="unit")
        rows = task.training().x.float().mul_(torch.tensor(1 / task.brightest)).transpose(0, 1)
        x = draw(task, size=3).x[: len(rows)]
        assert all((x[:, b : b + 1] == rows).all(dim=2).all(dim=0).any() for b in range(3))

    @every_image_task
    def test_distortions_depend_on_seed_split_and_index_alone(self, name):
        task = small(name, **ALL)
        first = draw(task, 1).x.clone()
        draw(task, 0, seed=3)
        assert torch.equal(draw(small(name, **ALL), 1).x, first)
        for other in (draw(task, 2), draw(task, 1, seed=1), draw(task, 1, split="full")):
            assert not torch.equal(other.x, first)

    def test_each_row_is_distorted_in_its_own_way_and_anew_in_each_epoch(self, monkeypatch, tmp_path):
        images, labels = image_files.mnist("train")
        monkeypatch.setattr(image_files, "mnist", lambda part: (images[:1].expand(20, -1, -1), labels[:1].expand(20)))
        monkeypatch.setenv("UNFADING_DATA", str(tmp_path))  # nothing that was read before is used
        task = PixelMNIST(shift=1.0)
        assert task.length("train", 16) == 1
        epochs = torch.cat([draw(task, epoch, 16).x for epoch in range(3)], dim=1)
        assert epochs.unique(dim=1).shape[1] == 48

    @pytest.mark.parametrize("task", [NoisyMNIST, NoisyCIFAR])
    def test_noise_is_the_same_with_and_without_distortions(self, task):
        plain, distorted = (draw(task(60, start=5, **options)).x for options in ({}, ALL))
        for steps in (slice(0, 5), slice(5 + task.height, None)):
            assert torch.equal(plain[steps], distorted[steps])
        plain, distorted = (draw(task(60, start="random", **options)).x for options in ({}, ALL))
        assert ((plain == distorted).all(dim=2).sum(dim=0) >= 60 - task.height).all()

    def test_a_permutation_orders_the_pixels_of_distorted_images(self):
        plain, permuted = draw(PixelMNIST(**ALL)), draw(PermutedMNIST(permutation="lem", **ALL))
        assert torch.equal(permuted.x, plain.x[torch.from_numpy(permutation("lem"))])

    def test_rows_and_pixels_show_the_same_distorted_image(self):
        pixels, rows = draw(PixelMNIST(**ALL)), draw(NoisyMNIST(28, scale="unit", **ALL))
        assert torch.equal(rows.x, pixels.x.view(28, 28, 4).transpose(1, 2))

    def test_images_of_cifar_are_distorted_as_the_equation_says(self):
        images, labels = image_files.cifar10("train")
        still, batch = (draw(NoisyCIFAR(32, scale="unit", **options), index=3) for options in ({}, ALL))
        parts = drawn(Augmentation(**ALL), 4, stream(0, "train", 3, "cpu", purpose="augmentation"))
        for b, part in enumerate(parts):
            x, shown = (each.x[:, b].view(32, 3, 32).transpose(0, 1) for each in (still, batch))
            (row,) = (row for row, image in enumerate(images) if torch.equal(x, image.float() * torch.tensor(1 / 255)))
            assert labels[row] == batch.target[b]
            assert_close(shown.double(), twin(images[row], *part) / 255, atol=CLOSE["atol"] / 255, rtol=0)

"""Laws of sensors, sounds, texts and series: scaling that sees training alone, texts of which no token is lost."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.helpers import made_files
from unfading.data import store
from unfading.tasks.base import EveryStep, MeanOverTime
from unfading.tasks.crops import TUMCrops
from unfading.tasks.reviews import Yelp5
from unfading.tasks.scaling import scale_of
from unfading.tasks.sensors import ACTIVITIES, DSA19, HAR2, HAR6, HELD_OUT_PEOPLE
from unfading.tasks.speech import COMMANDS, WORDS, Google12, Google30, read_wav, silence
from unfading.tasks.text import PTBCharacters, PTBWords
from unfading.tasks.ucr import UCR

pytestmark = pytest.mark.usefixtures("made")
YELP = Yelp5(reviews=60, words=8, steps=9, embedding=5)
NORMALISED = [HAR6(), DSA19(), DSA19(split_by="segments"), Google30(), Google12(), TUMCrops(), UCR(), UCR("Vowels")]
TEXTS = [
    PTBWords(steps=7, embedding=5),
    PTBWords(steps=7, embedding=5, carry=True),
    PTBCharacters(steps=11, embedding=5),
    PTBCharacters(steps=11, embedding=5, carry=False),
]


def epoch(task, split, size=1):
    return [task.batch(i, size, split=split, seed=0, device="cpu") for i in range(task.length(split, size))]


def same(one, other):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("task", NORMALISED, ids=repr)
@pytest.mark.sample(2)
def test_training_has_mean_zero_and_spread_one(task):
    steps = []
    for batch in epoch(task, "train"):
        length = batch.x.shape[0] if batch.lengths is None else int(batch.lengths)
        assert not batch.x[length:].any()
        steps.append(batch.x[:length, 0])
    spread, mean = torch.std_mean(torch.cat(steps), dim=0, correction=0)
    assert_close(mean, torch.zeros_like(mean), atol=1e-4, rtol=0)
    assert_close(spread, torch.ones_like(spread), atol=1e-4, rtol=0)


def test_a_mean_for_each_step():
    each, whole = (torch.stack([batch.x[:, 0] for batch in epoch(HAR6(how), "train")]) for how in ("step", "channel"))
    spread, mean = torch.std_mean(each, dim=0, correction=0)
    assert_close(mean, torch.zeros_like(mean), atol=1e-4, rtol=0)
    assert_close(spread, torch.ones_like(spread), atol=1e-4, rtol=0)
    assert whole.mean(dim=0).abs().max() > 0.1


def test_a_channel_that_never_changes_is_not_divided_by_zero():
    mean, spread = scale_of(torch.full((3, 4, 2), 7.0), None, each_step=False)
    assert mean.flatten().tolist() == [7, 7]
    assert spread.flatten().tolist() == [1, 1]


def test_a_mean_for_each_step_wants_one_length():
    with pytest.raises(ValueError, match=r"needs sequences of equal length, and these differ. Use normalise='channel'"):
        epoch(UCR("Vowels", normalise="step"), "train")


def spoil(task, folder):
    """Make everything that is not for training a hundred times as loud, or other words."""
    valid = task.rows("valid")
    if isinstance(task, HAR6):
        for split, rows in (("train", valid), ("test", slice(None))):
            for path in (folder / split / "Inertial Signals").iterdir():
                table = np.loadtxt(path)
                table[rows] *= 100
                np.savetxt(path, table, fmt="%15.7e")
    elif isinstance(task, DSA19):
        for a, p, s in np.concatenate([task.segments("test"), task.segments("train")[valid]]):
            path = folder / f"a{a:02d}" / f"p{p}" / f"s{s:02d}.txt"
            path.write_text(path.read_text().replace(".", "5."))
    elif isinstance(task, Google30 | Google12):
        for part in ("validation", "testing"):
            for name in (folder / f"{part}_list.txt").read_text().split():
                made_files.write_wav(folder / name, np.full(16000, 30000))
        for path in (folder / made_files.NOISE).glob("*.wav"):
            noise = read_wav(path, longest=None).copy()
            noise[len(noise) * 8 // 10 :] //= 100
            made_files.write_wav(path, noise)
    elif isinstance(task, TUMCrops):
        for part, rows in (("train", valid), ("test", slice(None))):
            arrays = dict(np.load(folder / f"{part}.npz"))
            arrays["x"][rows] *= 100
            np.savez(folder / f"{part}.npz", **arrays)
    elif isinstance(task, UCR):
        for part, rows in (("TRAIN", valid.tolist()), ("TEST", range(10_000))):
            path = folder / "Crop" / f"Crop_{part}.tsv"
            lines = path.read_text().splitlines()
            lines = [line.replace(".", "5.") if i in rows else line for i, line in enumerate(lines)]
            path.write_text("\n".join(lines) + "\n")
    else:
        lines = (folder / made_files.YELP).read_text().splitlines()
        for i in [*valid.tolist(), *range(30, 60)]:
            lines[i] = json.dumps({"stars": 5, "text": "aardvark " * 50})
        (folder / made_files.YELP).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("task", [HAR6(), HAR6("step"), DSA19(), Google30(), Google12(), TUMCrops(), UCR(), YELP], ids=repr)
@pytest.mark.sample(2)
def test_what_is_not_for_training_never_moves_training(task, tmp_path, monkeypatch):
    before, test_before = epoch(task, "train"), epoch(task, "test")
    folder = tmp_path / store.known(task.dataset).folder
    shutil.copytree(store.find(task.dataset), folder)
    spoil(task, folder)
    monkeypatch.setenv("UNFADING_DATA", str(tmp_path))
    assert all(same(one, other) for one, other in zip(before, epoch(task, "train"), strict=True))
    assert not same(test_before[0], epoch(task, "test")[0])


def test_two_of_har_are_six_of_har_merged():
    first = {"SITTING", "LAYING", "WALKING_UPSTAIRS"}
    six, two = (torch.cat([batch.target for batch in epoch(task, "test")]) for task in (HAR6(), HAR2()))
    assert [ACTIVITIES[label] in first for label in six] == [label == 0 for label in two]


@pytest.mark.parametrize("split_by", ["subjects", "segments"])
def test_dsa_is_parted_in_halves(split_by, monkeypatch):
    monkeypatch.undo()
    task = DSA19(split_by=split_by)
    train, test = task.segments("train"), task.segments("test")
    assert len(train) == len(test) == 4560
    assert len({tuple(row) for row in np.concatenate([train, test])}) == 9120
    column = 1 if split_by == "subjects" else 2
    assert train[:, column].max() < test[:, column].min()
    held_out = train[task.held_out(4560)]
    assert len(held_out) == 4560 // 5
    # Whole ends of recordings: no segment of training comes after one of validation.
    rest = np.delete(train, task.held_out(4560), axis=0)
    assert rest[:, 2].max() < held_out[:, 2].min()


def test_crops_are_answered_at_each_date_or_once():
    batch = TUMCrops().batch(0, 5, split="train", seed=0, device="cpu")
    assert torch.equal(batch.mask.sum(dim=0), batch.lengths)
    assert batch.target.shape == batch.mask.shape == (26, 5)
    assert isinstance(TUMCrops().head(3), EveryStep)
    assert isinstance(TUMCrops(per="sequence").head(3), MeanOverTime)
    assert TUMCrops(per="sequence").batch(0, 5, split="train", seed=0, device="cpu").target.shape == (5,)


def test_google_12_has_a_tenth_of_silence_and_of_unknown_words_in_each_part():
    task = Google12()
    for share in ("train", "valid", "test"):
        clips = task.clips(share)
        counts = np.bincount([clip.label for clip in clips], minlength=12)
        tenth = -(-counts[:10].sum() // 10)
        assert counts[10] == counts[11] == tenth
        assert all(clip.path.parent.name == COMMANDS[clip.label] for clip in clips if clip.label < 10)
        assert not {clip.path.parent.name for clip in clips if clip.label == 10} & {*COMMANDS, made_files.NOISE}
        assert {clip.path.parent.name for clip in clips if clip.label == 11} == {made_files.NOISE}
        assert clips == task.clips(share)


@pytest.mark.parametrize(("printed", "commands"), [(22_246, 18_538), (3_081, 2_567)])
def test_the_printed_counts_of_google_12_come_out_of_this_rule_in_one_way(printed, commands):
    assert [n for n in range(printed) if n + 2 * -(-n // 10) == printed] == [commands]


def test_no_speaker_is_in_two_parts():
    parts = [Google30().clips(share) for share in ("train", "valid", "test")]
    speakers = [{clip.path.name.split("_nohash_")[0] for clip in clips} for clips in parts]
    assert len(set.union(*speakers)) == sum(map(len, speakers))


def test_no_second_of_noise_is_in_two_parts():
    train, valid, test = (silence(share, 50, label=11) for share in ("train", "valid", "test"))
    assert len(train) == len(set(train)) == 50
    for recording in (store.find("speech_commands") / made_files.NOISE).glob("*.wav"):
        starts = [[clip.start for clip in clips if clip.path == recording] for clips in (train, valid, test)]
        assert max(starts[0]) + 16_000 <= min(starts[1])
        assert max(starts[1]) + 16_000 <= min(starts[2])
        assert max(starts[2]) + 16_000 <= len(read_wav(recording, longest=None))


def test_the_lists_say_which_clip_is_for_what():
    folder = store.find("speech_commands")
    everything = [clip for share in ("train", "valid", "test") for clip in Google30().clips(share)]
    assert len(everything) == len({clip.path for clip in everything}) == len(list(folder.glob("[!_]*/*.wav")))
    for share, part in (("valid", "validation"), ("test", "testing")):
        listed = (folder / f"{part}_list.txt").read_text().split()
        assert sorted(str(clip.path.relative_to(folder)) for clip in Google30().clips(share)) == sorted(listed)
    assert all(WORDS[clip.label] == clip.path.parent.name for clip in everything)


@pytest.mark.parametrize("task", TEXTS, ids=repr)
@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.sample(3)
def test_every_token_is_foretold_once(task, size):
    for split in ("train", "valid", "full", "test"):
        tokens = task.tokens(split)
        batches = epoch(task, split, size if task.carry or split in ("valid", "test") else 1)
        masks = [torch.ones_like(b.x, dtype=torch.bool) if b.mask is None else b.mask for b in batches]
        for field, wanted in (("x", tokens[:-1]), ("target", tokens[1:])):
            got = torch.cat([getattr(b, field)[mask] for b, mask in zip(batches, masks, strict=True)])
            assert torch.equal(got.sort().values, wanted.sort().values)
        assert sum(task.weight(batch) for batch in batches) == len(tokens) - 1


@pytest.mark.parametrize("task", [task for task in TEXTS if task.carry], ids=repr)
@pytest.mark.parametrize("size", [1, 4])
def test_a_carried_batch_goes_on_where_the_last_one_ended(task, size):
    batches = epoch(task, "train", size)
    carried = [task.carried(i, size, split="train") for i in range(2 * len(batches))]
    assert carried == [i % len(batches) > 0 for i in range(2 * len(batches))]
    for last, following in pairwise(batches):
        rows = torch.ones(size, dtype=torch.bool) if following.mask is None else following.mask[0]
        assert torch.equal(last.target[-1][rows], following.x[0][rows])


def test_a_carried_state_is_reset_at_regular_chunks_and_where_the_text_begins_again():
    task = PTBCharacters(steps=11, embedding=5, reset_every=3)
    for split in ("train", "test"):
        n = task.length(split, 4)
        carried = [task.carried(i, 4, split=split) for i in range(2 * n)]
        assert n > 3
        assert n % 3 > 0
        assert carried == 2 * [i % 3 > 0 for i in range(n)]
    with pytest.raises(ValueError, match="with carry=False none is carried"):
        PTBCharacters(carry=False, reset_every=3)
    with pytest.raises(ValueError, match="reset_every"):
        PTBCharacters(reset_every=0)


@pytest.mark.parametrize("task", [task for task in TEXTS if not task.carry], ids=repr)
def test_sequences_that_begin_anew_are_the_text_in_pieces(task):
    batches = epoch(task, "test", 3)
    rows = torch.cat([batch.x.T for batch in batches])
    tokens = task.tokens("test")
    whole = (len(tokens) - 1) // task.steps
    assert torch.equal(rows[:whole].flatten(), tokens[: whole * task.steps])
    assert not any(task.carried(i, 3, split="test") for i in range(len(batches)))


@pytest.mark.parametrize("task", TEXTS, ids=repr)
def test_the_guess_for_a_text_is_the_entropy_of_its_tokens(task):
    train, test = task.tokens("train").tolist(), task.tokens("test").tolist()[1:]
    nats = -np.mean([np.log(train.count(token) / len(train)) for token in test])
    assert task.guess == pytest.approx(nats / (np.log(2) if task.metric == "bits_per_character" else 1))


def test_rare_words_of_reviews_share_a_number_and_an_empty_review_has_one_word():
    everything = [*epoch(YELP, "full"), *epoch(YELP, "test")]
    for batch in everything:
        assert batch.x.max() < 8
        assert not batch.x[int(batch.lengths) :].any()
    lengths = sorted({int(batch.lengths) for batch in everything})
    assert lengths[0] == 1
    assert lengths[-1] == YELP.steps
    first = json.loads((store.find("yelp") / made_files.YELP).read_text().splitlines()[0])
    assert YELP.examples("train").lengths[0] == min(9, len(first["text"].split()))
    # The split "train" names the numbers by how common a word is in it, from 1 on.
    train = torch.cat([batch.x[: int(batch.lengths), 0] for batch in epoch(YELP, "train")])
    counts = torch.bincount(train, minlength=8)[1:]
    assert torch.equal(counts, counts.sort(descending=True).values)


@pytest.mark.parametrize("task", [PTBWords(embedding=40), PTBCharacters(embedding=40)], ids=["words", "characters"])
def test_vectors_of_tokens_begin_small_and_are_dropped_in_training_alone(task):
    vectors = task.encoder()
    assert 0.09 < float(vectors.weight.detach().abs().max()) <= 0.1
    dropped = replace(task, dropout=0.5).encoder()
    tokens = torch.arange(30).reshape(10, 3)
    assert float((dropped(tokens) == 0).double().mean()) == pytest.approx(0.5, abs=0.1)
    assert torch.equal(dropped.eval()(tokens), dropped[0](tokens))
    assert replace(task, dropout=0.5).head(4).dropout.p == 0.5


def test_vectors_of_characters_can_begin_normal_with_a_given_deviation():
    weight = PTBCharacters(embedding=200, embedding_std=1.0).encoder().weight.detach()
    assert float(weight.std()) == pytest.approx(1.0, abs=0.03)
    assert float(weight.abs().max()) > 3
    with pytest.raises(ValueError, match="embedding_std must be above 0"):
        PTBCharacters(embedding_std=0.0)


def test_a_random_fifth_of_the_windows_for_validation_where_asked(made):
    people, fifth = HAR2(), HAR2(validation="fifth")
    n = len(people.people("train"))
    assert len(fifth.rows("valid")) == n // 5
    assert not set(people.people("train")[fifth.rows("valid")].tolist()) <= set(HELD_OUT_PEOPLE)
    assert set(people.people("train")[people.rows("valid")].tolist()) <= set(HELD_OUT_PEOPLE)
    with pytest.raises(ValueError, match="unknown validation 'third'"):
        HAR2(validation="third")
    with pytest.raises(ValueError, match="validation must be a fold, 0 to 4; got 5"):
        HAR2(validation=5)


def test_five_folds_hold_every_person_out_once(monkeypatch):
    """21 people, as in the published training files, with three windows each."""
    people = torch.arange(1, 22).repeat_interleave(3)
    monkeypatch.setattr(HAR2, "people", lambda task, part: people)
    held_out = [HAR2(validation=fold).held_out(63) for fold in range(5)]
    assert [people[rows].unique().tolist() for rows in held_out][:2] == [[1, 6, 11, 16, 21], [2, 7, 12, 17]]
    assert torch.equal(torch.cat(held_out).sort().values, torch.arange(63))

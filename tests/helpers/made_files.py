"""A few files of each dataset of sensors, sounds, texts and series, made in its publisher's own layout."""

import hashlib
import json
import wave

import numpy as np
from PIL import Image

from unfading.tasks.gestures import CLIPS
from unfading.tasks.sensors import CHANNELS, DSA19
from unfading.tasks.speech import NOISE, WORDS

YELP = "yelp_academic_dataset_review.json"
YELP_WORDS = ["good", "bad", "food", "it's", "the", "waiter", "soup", "never", "again", "great"]


def write_har(folder, random):
    """Five people in training, of whom one is held out, and two in test; every activity by each."""
    for split, people in (("train", (1, 3, 5, 6, 27)), ("test", (2, 4))):
        own = folder / split
        (own / "Inertial Signals").mkdir(parents=True)
        rows = [(person, activity) for person in people for activity in (1, 2, 3, 4, 5, 6, 6)]
        for number, channel in enumerate(CHANNELS):
            values = random.normal(number, 2.0, (len(rows), 128))
            np.savetxt(own / "Inertial Signals" / f"{channel}_{split}.txt", values, fmt="%15.7e")
        np.savetxt(own / f"subject_{split}.txt", [person for person, _ in rows], fmt="%d")
        np.savetxt(own / f"y_{split}.txt", [activity for _, activity in rows], fmt="%d")


def few_segments(segments):
    """Of (activity, person, segment), the part that is written here: the whole set has 9,120 files."""
    activity, person, segment = segments.T
    return segments[(activity % 6 == 1) & (person % 4 < 2) & (segment % 6 == 0)]


def shrink(monkeypatch):
    """Let DSA-19 ask for the segments that are written here."""
    whole = DSA19.segments
    monkeypatch.setattr(DSA19, "segments", lambda task, part: few_segments(whole(task, part)))


def write_dsa(folder, random):
    everything = np.concatenate([DSA19(split_by="segments").segments(part) for part in ("train", "test")])
    for activity, person, segment in few_segments(everything):
        path = folder / f"a{activity:02d}" / f"p{person}" / f"s{segment:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        line = ",".join(f"{value:.4f}" for value in random.normal(activity, 1.0, 45))
        path.write_text(f"{line}\n" * 125)


def which_set(name):
    """The publisher's rule, from the README of Speech Commands: a speaker belongs to one part."""
    speaker = name.split("_nohash_")[0]
    share = int(hashlib.sha1(speaker.encode()).hexdigest(), 16) % 2**27 * 100 / (2**27 - 1)
    return "validation" if share < 10 else "testing" if share < 20 else "training"


def write_wav(path, samples, rate=16000, channels=1):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.asarray(samples, dtype="<i2").tobytes())


def write_lists(folder):
    """The publisher's two lists for the clips that are in a folder."""
    names = sorted(f"{path.parent.name}/{path.name}" for word in WORDS for path in (folder / word).glob("*.wav"))
    for part in ("validation", "testing"):
        own = [name for name in names if which_set(name.split("/")[1]) == part]
        (folder / f"{part}_list.txt").write_text("".join(f"{name}\n" for name in own))


def write_speech_commands(folder, random):
    """Four speakers for training, one for validation, one for testing."""
    candidates = [f"{number:08x}" for number in random.randint(0, 2**31, 200)]
    parts = {"training": 4, "validation": 1, "testing": 1}
    speakers = [own for part, many in parts.items() for own in [s for s in candidates if which_set(s) == part][:many]]
    for word in WORDS:
        (folder / word).mkdir(parents=True)
        # One word is said by nobody, so that ten do not divide the clips.
        for speaker in speakers if word != "go" else []:
            write_wav(folder / word / f"{speaker}_nohash_0.wav", random.normal(0, 900, random.randint(9000, 16001)))
    (folder / NOISE).mkdir()
    (folder / NOISE / "README.md").write_text("Background noise, by the publisher.\n")
    for name in ("doing_the_dishes", "pink_noise"):
        write_wav(folder / NOISE / f"{name}.wav", np.arange(12 * 16000) % 30000)
    write_lists(folder)


def write_ptb(folder, random):
    folder.mkdir()
    words = ["the", "<unk>", "N", "of", "market", "n.v.", "share"]
    for split, lines in (("train", 60), ("valid", 11), ("test", 13)):
        rows = [random.choice(words, random.randint(3, 9)) for _ in range(lines)]
        rows[0] = words
        (folder / f"ptb.{split}.txt").write_text("".join(f" {' '.join(row)} \n" for row in rows))
        # The published files of characters have no end of line after their last.
        (folder / f"ptb.char.{split}.txt").write_text(" \n ".join(" ".join("_".join(row)) for row in rows))


def write_yelp(folder, random):
    folder.mkdir()
    lines = []
    for number in range(60):
        words = random.choice(YELP_WORDS, random.randint(0, 12))
        review = {"review_id": f"r{number}", "user_id": "u", "business_id": "b", "stars": float(random.randint(1, 6))}
        review |= {"useful": 0, "funny": 0, "cool": 0, "text": ", ".join(words).capitalize() + "!\n", "date": "2011-10-07"}
        lines.append(json.dumps(review) + "\n")
    (folder / YELP).write_text("".join(lines))


def write_jpeg(path, pixels):
    Image.fromarray(pixels).save(path, quality=90)


def write_jester(folder, random):
    """Clips of a few frames; all gestures are named, and four are shown."""
    gestures = [f"Gesture number {number}" for number in range(27)]
    (folder / CLIPS).mkdir(parents=True)
    (folder / "jester-v1-labels.csv").write_text("".join(f"{gesture}\n" for gesture in gestures))
    number = 1
    for part, rows in (("train", 29), ("validation", 7), ("test", 3)):
        lines = []
        for _ in range(rows):
            clip = folder / CLIPS / str(number)
            clip.mkdir()
            shape = (10, random.randint(11, 19), 3)
            for frame in range(random.randint(3, 8)):
                write_jpeg(clip / f"{frame + 1:05d}.jpg", random.randint(0, 256, shape).astype(np.uint8))
            lines.append(f"{number}\n" if part == "test" else f"{number};{gestures[random.randint(9, 13)]}\n")
            number += 1
        (folder / f"jester-v1-{part}.csv").write_text("".join(lines))


def write_tum(folder, random):
    """The `.npz` files that the documented conversion makes."""
    folder.mkdir()
    for part, fields in (("train", 25), ("test", 9)):
        lengths = random.randint(10, 27, fields)
        inside = np.arange(26) < lengths[:, None]
        x = random.normal(3.0, 2.0, (fields, 26, 54)) * inside[:, :, None]
        y_date = random.choice(7, (fields, 26), p=[0.1, 0.1, 0.3, 0.2, 0.1, 0.1, 0.1]) * inside
        np.savez(folder / f"{part}.npz", x=x, lengths=lengths, y_date=y_date, y=random.randint(0, 5, fields))


def write_ucr(folder, random):
    """One channel of one length as .tsv; three channels of different lengths as .ts."""
    for part, rows in (("TRAIN", 30), ("TEST", 21)):
        (folder / "Crop").mkdir(parents=True, exist_ok=True)
        lines = ["\t".join([str(1 + row % 3), *(f"{v:.4f}" for v in random.normal(1, 2, 46))]) for row in range(rows)]
        (folder / "Crop" / f"Crop_{part}.tsv").write_text("\n".join(lines) + "\n")
        (folder / "Vowels").mkdir(parents=True, exist_ok=True)
        header = "#made\n@problemName Vowels\n@timeStamps false\n@missing false\n@univariate false\n@dimensions 3\n"
        header += "@equalLength false\n@classLabel true a e\n@data\n"
        lines = []
        for row in range(rows):
            steps = random.randint(4, 9)
            channels = (",".join(f"{v:.4f}" for v in random.normal(c, 1, steps)) for c in range(3))
            lines.append(":".join([*channels, "ae"[row % 2]]))
        (folder / "Vowels" / f"Vowels_{part}.ts").write_text(header + "\n".join(lines) + "\n")


WRITERS = {
    "har": write_har,
    "dsa": write_dsa,
    "speech_commands": write_speech_commands,
    "ptb": write_ptb,
    "yelp": write_yelp,
    "jester": write_jester,
    "tum": write_tum,
    "ucr": write_ucr,
}

"""Spoken words, one second each: Google-30 and Google-12, from the WAV folders of Speech Commands 0.01.

A clip shorter than a second is padded with zeros in front, and becomes 99 steps of 32 log-mel features (logmel.py). Two
published lists name the clips for validation and for testing; the remaining 51,088 are for training. The lists separate
speakers.

Google-12 follows TensorFlow's tutorial: ten words, and for every ten clips of them one of silence and one of an unknown word,
rounded up, in each of the three parts. This gives the papers' 22,246 and 3,081 clips (from 18,538 and 2,567 clips of the ten
words), and 3,081 is the number the tutorial prints for its test. The choice of unknown words was not published: ours is a fixed
random choice. Silence is cut from the recordings of background noise at fixed random positions: for training from the first
80 % of each, for validation from the next tenth, for testing from the last. The tutorial tests on exact zeros instead.
"""

import wave
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfading.data import store
from unfading.files.checked_json import sentence
from unfading.tasks.logmel import FILTERS, RATE, STEPS, log_mel
from unfading.tasks.resident import Examples, Part
from unfading.tasks.scaling import Normalise, Normalised

COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
OTHERS = ("bed", "bird", "cat", "dog", "happy", "house", "marvin", "sheila", "tree", "wow")
WORDS = tuple(sorted(COMMANDS + DIGITS + OTHERS))
NOISE = "_background_noise_"
_AGAIN = "Get dataset 'speech_commands' again."
Share = Literal["train", "valid", "test"]


class Clip(NamedTuple):
    """One example: a file, or the second of it that begins at sample `start`."""

    path: Path
    label: int
    start: int | None = None


class Speech(Normalised):
    """Base of the two speech tasks."""

    dataset: ClassVar[str] = "speech_commands"

    @abstractmethod
    def clips(self, share: Share) -> list[Clip]:
        """The examples of one of the publisher's three parts, in a fixed order."""

    @property
    def input_size(self) -> int:
        return FILTERS

    def examples(self, part: Part) -> Examples:
        clips = self.clips("train") + self.clips("valid") if part == "train" else self.clips("test")
        return Examples(features(clips), torch.tensor([clip.label for clip in clips]))

    def held_out(self, n: int) -> Tensor:
        return torch.arange(n - len(self.clips("valid")), n)


@dataclass(frozen=True)
class Google30(Speech):
    """Classify thirty words."""

    paper: ClassVar[str] = "Warden 2018"

    normalise: Normalise = "channel"

    @property
    def classes(self) -> int:
        return len(WORDS)

    def clips(self, share: Share) -> list[Clip]:
        return [Clip(path, WORDS.index(path.parent.name)) for path in published(share)]


@dataclass(frozen=True)
class Google12(Speech):
    """Classify ten words (classes 0 to 9), any other word (10) and silence (11)."""

    paper: ClassVar[str] = "Warden 2018"

    normalise: Normalise = "channel"

    @property
    def classes(self) -> int:
        return len(COMMANDS) + 2

    def clips(self, share: Share) -> list[Clip]:
        files = published(share)
        commands = [Clip(path, COMMANDS.index(path.parent.name)) for path in files if path.parent.name in COMMANDS]
        others = [path for path in files if path.parent.name not in COMMANDS]
        tenth = -(-len(commands) // 10)
        chosen = np.random.RandomState(0).permutation(len(others))[:tenth]
        unknown = [Clip(others[i], len(COMMANDS)) for i in np.sort(chosen)]
        return commands + unknown + silence(share, tenth, label=len(COMMANDS) + 1)


def published(share: Share) -> list[Path]:
    """The files of a part, sorted by name. Training files are those on neither list."""
    folder = store.find("speech_commands")
    missing = [word for word in WORDS if not (folder / word).is_dir()]
    if missing:
        raise FileNotFoundError(f"{folder} has no folder {missing[0]!r}, one of its thirty words. {_AGAIN}")
    present = {f"{word}/{path.name}": path for word in WORDS for path in sorted((folder / word).glob("*.wav"))}
    listed = {name: _listed(folder / f"{name}_list.txt", present) for name in ("validation", "testing")}
    twice = sorted(listed["validation"] & listed["testing"])
    if twice:
        raise ValueError(f"{twice[0]} is on both lists of {folder}, for validation and for testing. {_AGAIN}")
    if share == "train":
        return [path for name, path in present.items() if name not in listed["validation"] | listed["testing"]]
    own = listed["validation" if share == "valid" else "testing"]
    return [path for name, path in present.items() if name in own]


def _listed(file: Path, present: dict[str, Path]) -> set[str]:
    try:
        names = file.read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text ({sentence(error)}). {_AGAIN}") from None
    for name in names:
        if name not in present:
            raise FileNotFoundError(f"{file} lists {name[:60]}, which does not exist. {_AGAIN}")
    if not names:
        raise ValueError(f"{file} is empty. {_AGAIN}")
    return set(names)


def silence(share: Share, count: int, label: int) -> list[Clip]:
    """One-second cuts of the background noise. Each part uses its own interval of every recording."""
    folder = store.find("speech_commands") / NOISE
    recordings = sorted(folder.glob("*.wav"))
    if not recordings:
        raise FileNotFoundError(f"{folder} has no WAV files, of which Google-12 makes its silence. {_AGAIN}")
    first, last = {"train": (0.0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1.0)}[share]
    random = np.random.RandomState(0)
    clips = []
    for i, path in enumerate(recordings):
        samples = len(read_wav(path, longest=None))
        if samples < 11 * RATE:
            raise ValueError(f"{path} has {samples / RATE:.1f} s; wanted at least 11, so that a tenth has a second. {_AGAIN}")
        own = len(range(i, count, len(recordings)))
        starts = random.randint(int(first * samples), int(last * samples) - RATE + 1, size=own)
        clips += [Clip(path, label, int(start)) for start in starts]
    return clips


def read_wav(path: Path, *, longest: int | None = RATE) -> NDArray[np.int16]:
    """Read the samples of a WAV file: 16 kHz, one channel, 16 bits, at least one sample and at most `longest`."""
    try:
        with wave.open(str(path)) as file:
            kind = (file.getframerate(), file.getnchannels(), 8 * file.getsampwidth())
            promised = file.getnframes()
            # The header may promise more than the file has; memory is taken only for what is there.
            content = file.readframes(min(promised, path.stat().st_size))
    except FileNotFoundError:
        raise
    except Exception as error:  # the module wave raises errors of many kinds for damaged bytes
        reason = sentence(error) if str(error) else "it ends too early"
        raise ValueError(f"{path} is not a valid WAV file ({reason}). {_AGAIN}") from None
    if kind != (RATE, 1, 16):
        rate, channels, bits = kind
        raise ValueError(
            f"{path} has {rate} Hz, {channels} channel(s), {bits} bits; wanted {RATE} Hz, 1 channel, 16 bits. "
            f"Convert it: ffmpeg -i IN.wav -ar {RATE} -ac 1 -sample_fmt s16 OUT.wav"
        )
    if len(content) != 2 * promised:
        raise ValueError(f"{path} is cut short: {len(content) // 2} of {promised} samples. {_AGAIN}")
    if promised == 0:
        raise ValueError(f"{path} holds no samples. {_AGAIN}")
    if longest is not None and promised > longest:
        raise ValueError(f"{path} has {promised} samples; wanted at most {longest}, one second. Cut it.")
    return np.frombuffer(content, dtype="<i2").astype(np.int16)


def features(clips: list[Clip]) -> Tensor:
    """Log-mel features, float32 [N, 99, 32]."""
    result = torch.empty(len(clips), STEPS, FILTERS)
    recordings = {path: read_wav(path, longest=None) for path in {clip.path for clip in clips if clip.start is not None}}
    # In chunks: the frames of all clips at once would take 4 GB per ten thousand clips.
    for begin in range(0, len(clips), 256):
        chunk = clips[begin : begin + 256]
        samples = np.zeros((len(chunk), RATE), dtype=np.float32)
        for row, clip in zip(samples, chunk, strict=True):
            if clip.start is None:
                sound = read_wav(clip.path)
                row[RATE - len(sound) :] = sound
            else:
                row[:] = recordings[clip.path][clip.start : clip.start + RATE]
        result[begin : begin + 256] = log_mel(torch.from_numpy(samples))
    return result

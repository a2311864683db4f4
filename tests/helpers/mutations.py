"""Random damage to files: flipped bits, cuts, insertions, splices, extreme numbers, and other values inside JSON."""

import copy
import json
import pickle
from pathlib import Path

# Numbers at which sizes overflow, and bytes that have a meaning in some format.
EXTREMES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1]
WORDS = [
    b"", b"\0" * 64, b"\xff" * 64, b"{" * 200, b"[" * 5000, b'"', b"\n" * 50, b"9" * 400, b"-1", b"nan", b"inf", b"1e999",
    b"../../outside", b"/tmp/outside", b"\x80\x04", b"@data\n", b"@dimensions 99999999\n", b"PK\x03\x04", b"\x1f\x8b",
    b"data\xff\xff\xff\x7f", b"(99999999999,)", b"'|O'", b"\xe2\x80\xa8",
]  # fmt: skip
VALUES = [
    None, True, 0, -1, 2**31, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x" * 5000,
    "a:b", "../x.py:Cell", "\0", "\u2028\n", [], {}, [[]], {"": None}, [0] * 1000, {"a": {"b": {"c": []}}},
]  # fmt: skip


class Marker:
    """Unpickling it creates a file: no reader may do that."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def mutated(content, others, numbers, marker):
    """The content with one to four random changes."""
    content = bytearray(content)
    for _ in range(numbers.choice([1, 1, 2, 4])):
        content = _change(content, others, numbers, marker)
    return bytes(content)


def _change(content, others, numbers, marker):
    place = numbers.randrange(len(content) + 1)
    kind = numbers.randrange(10)
    if kind <= 2 and content:  # a few flipped bits; the beginning of a file, its header, is hit more often
        for _ in range(numbers.choice([1, 1, 8])):
            bit = numbers.randrange(8 * min(len(content), numbers.choice([64, 512, len(content)])))
            content[bit // 8] ^= 1 << bit % 8
    elif kind == 3:
        del content[place:]
    elif kind == 4:
        del content[place : place + numbers.choice([1, 4, 100, 5000])]
    elif kind == 5:
        content[place:place] = numbers.choice(WORDS)
    elif kind == 6:  # a number at a header's place
        size = numbers.choice([1, 2, 4, 8])
        value = numbers.choice(EXTREMES) % 256**size
        place = numbers.randrange(min(len(content), numbers.choice([48, 400, len(content) + 1])) + 1)
        content[place : place + size] = value.to_bytes(size, numbers.choice(["little", "big"]))
    elif kind == 7:  # a piece of another file, or of the same
        other = numbers.choice(others)
        start = numbers.randrange(len(other) + 1)
        content[place : place + numbers.choice([0, 50])] = other[start : start + numbers.choice([10, 200, 4000])]
    elif kind == 8:
        word = numbers.choice(WORDS)
        content[place : place + len(word)] = word
    else:
        content[0 if numbers.random() < 0.5 else place :] = pickle.dumps(Marker(marker))
    return content


def mutated_json(value, numbers):
    """The value with one to three of its parts replaced, removed or doubled."""
    value = json.loads(json.dumps(value))
    for _ in range(numbers.choice([1, 1, 2, 3])):
        parent, key = None, None
        part = value
        while isinstance(part, dict | list) and part and (parent is None or numbers.random() < 0.75):
            parent, key = part, numbers.choice(list(part) if isinstance(part, dict) else range(len(part)))
            part = parent[key]
        if parent is None:
            return copy.deepcopy(numbers.choice(VALUES))
        kind = numbers.randrange(4)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[numbers.choice(["x" * 300, "sha256", "version", "\0"])] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(numbers.choice(VALUES))
    return value

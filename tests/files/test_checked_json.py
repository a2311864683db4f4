"""JSON objects with checksums and limits: what was written is read back, and everything else is one sentence."""

import json
import random
import threading

import pytest

from unfading.files import checked_json, read_json, write_atomically, write_json
from unfading.files.checked_json import DEEPEST, parse, sealed, unsealed
from unfading.files.run_log import read_log

KNOWN = {"version", "run", "step"}
VALUE = {"version": 1, "run": {"task": "adding", "rate": 0.1, "names": ["a", "ä", None, True]}}


def refusal(call, *arguments):
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_read_back(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, VALUE)
    assert read_json(path, KNOWN, "") == VALUE
    assert list(json.loads(path.read_text())) == ["sha256", "version", "run"]


@pytest.mark.parametrize("digits", [16, 64])
@pytest.mark.parametrize("indent", [None, 1])
def test_every_flipped_bit_of_an_object_is_found(digits, indent):
    content = sealed(VALUE, digits=digits, indent=indent)
    assert unsealed(content, "it", KNOWN, "") == VALUE
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        refusal(unsealed, bytes(changed), "it", KNOWN, "Way out.")


def test_every_flipped_bit_of_a_log_is_found(tmp_path):
    path, rows = tmp_path / "curve.jsonl", [{"step": i, "loss": 0.5} for i in range(2)]
    content = b"".join(sealed(row) + b"\n" for row in rows)
    path.write_bytes(content)
    assert read_log(path, "") == rows
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert str(path) in refusal(read_log, path, "Way out.")


def test_a_row_that_a_killed_process_began_is_left_out(tmp_path):
    path, row = tmp_path / "curve.jsonl", {"step": 1, "watched": {"a": {"b": 1}, "c": [{"d": 2}, 3]}}
    line = sealed(row)
    for length in range(len(line) + 1):
        path.write_bytes(line + b"\n" + line[:length])
        assert read_log(path, "") == [row]


def test_an_edited_file_is_told_with_the_way_out(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, VALUE)
    path.write_text(path.read_text().replace("0.1", "0.2"))
    reason = refusal(read_json, path, KNOWN, "Remove it.")
    assert reason.startswith(f"{path} was changed after it was written: its sha256 does not match. Remove it. If you")
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_text(json.dumps(content))
    assert read_json(path, KNOWN, "")["run"]["rate"] == 0.2


REFUSED = {
    "missing": (None, "does not exist"),
    "empty": (b"", "is damaged: it is not JSON"),
    "cut": (b'{"version": 1', "is damaged: it is not JSON"),
    "no text": (b"\xff\xfe", "is damaged: it is not JSON"),
    "no object": (b"[1, 2]", r"must be a JSON object; got \[1, 2\]"),
    "text": (b'"' + b"a" * 1000 + b'"', r"must be a JSON object; got 'aaa.*\.\.\."),
    "nested": (b"[" * 10**5 + b"]" * 10**5, f"is nested deeper than {DEEPEST} levels"),
    "nested objects": (b'{"run":' * 10**5 + b"1" + b"}" * 10**5, f"is nested deeper than {DEEPEST} levels"),
    "nested a little": (b'{"run":' + b"[" * 100 + b"]" * 100 + b"}", f"is nested deeper than {DEEPEST} levels"),
    "half of it": (b"[" * 10**5, "is nested deeper|is not JSON"),
    "twice": (b'{"version": 1, "version": 2}', "it has the field 'version' twice"),
    "twice inside": (b'{"version": 1, "run": {"a": 1, "a": 1}}', "it has the field 'a' twice"),
    "digits": (b'{"version": ' + b"9" * 10**5 + b"}", "is damaged: it is not JSON .Exceeds the limit"),
    "unknown first field": (b'{"sha257": "0", "version": 1}', "begins with the unknown field 'sha257'"),
    "no checksum": (b'{"sha256": 3, "version": 1}', "its sha256 does not match"),
    "checksum of no length": (b'{"sha256": "", "version": 1}', "its sha256 does not match"),
}


@pytest.mark.parametrize(("content", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_file_of_ours_is_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        read_json(path, KNOWN, "Way out.")
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_and_a_huge_file_are_not_read(tmp_path, monkeypatch):
    assert "is a folder" in refusal(read_json, tmp_path, KNOWN, "")
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "has 1099511627776 bytes; at most" in refusal(read_json, path, KNOWN, "")
    assert "has 1099511627776 bytes; at most" in refusal(read_log, path, "")


def test_objects_of_any_shape_are_read_back():
    numbers = random.Random(0)

    def value(depth):
        kind = numbers.randrange(7 if depth else 5)
        if kind == 5:
            return [value(depth - 1) for _ in range(numbers.randrange(4))]
        if kind == 6:
            return {f"k{i}": value(depth - 1) for i in range(numbers.randrange(4))}
        return [None, True, numbers.random(), numbers.randrange(-(2**70), 2**70), '\u2028"\\0' * 3][kind]

    for _ in range(200):
        whole = {"version": value(3), "run": value(4)}
        assert unsealed(sealed(whole), "it", KNOWN, "") == whole


def test_depth_up_to_the_limit_is_read():
    assert parse("[" * DEEPEST + "]" * DEEPEST, "it") is not None
    refusal(parse, "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "it")


def test_two_threads_write_one_file(tmp_path):
    path, failures = tmp_path / "file", []

    def write(content):
        for _ in range(50):
            try:
                write_atomically(path, content)
            except OSError as error:
                failures.append(error)

    threads = [threading.Thread(target=write, args=(bytes([i]) * 1000,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() in [bytes([i]) * 1000 for i in range(4)]


def test_a_value_in_an_error_is_short():
    assert len(checked_json.brief("x" * 10**6)) == 60
    assert checked_json.brief(10**5000) == "a number of more than 4300 digits"

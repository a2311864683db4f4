"""`unfading export`: a file of weights becomes a folder of C, or an ONNX file."""

from tests.helpers.command import run
from tests.helpers.paths import ROOT

ADDING = ROOT / "weights" / "incremental-fig4-adding-200-ours-k-1.safetensors"


def test_a_file_of_weights_becomes_a_folder_of_c(tmp_path):
    answer = run("export", str(ADDING), "--to", "c", "-o", str(tmp_path / "c"), "--precision", "integer", "--batches", "1")
    assert answer.returncode == 0, answer.stderr
    assert "bytes of constants" in answer.stdout
    files = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert files == ["Makefile", "README.md", "main.c", "model.c", "model.h"]
    assert "int16_t" in (tmp_path / "c" / "model.h").read_text()
    again = run("export", str(ADDING), "-o", str(tmp_path / "c"))
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == files


def test_what_is_no_file_of_weights_is_refused(tmp_path):
    answer = run("export", str(tmp_path / "none.safetensors"), "-o", str(tmp_path / "c"))
    assert answer.returncode == 2
    assert "does not exist" in answer.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_of_weights_becomes_an_onnx_file(tmp_path):
    path = tmp_path / "adding.onnx"
    answer = run("export", str(ADDING), "--to", "onnx", "-o", str(path))
    assert answer.returncode == 0, answer.stderr
    assert "inputs x, lengths, start, initial_h, outputs output, h" in " ".join(answer.stdout.split())
    assert path.stat().st_size > 1000
    for more, reason in (([], "exists"), (["--precision", "int8"], "--to onnx writes float32")):
        again = run("export", str(ADDING), "--to", "onnx", "-o", str(path), *more)
        assert again.returncode == 2
        assert reason in again.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["adding.onnx"]

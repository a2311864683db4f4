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


def test_a_report_becomes_a_page(tmp_path):
    page = tmp_path / "page.html"
    answer = run("export", str(ADDING), "--report", str(page), "--batches", "1", "--test-rows", "8")
    assert answer.returncode == 0, answer.stderr
    assert "Does it fit?" in page.read_text()


def test_flags_that_do_not_belong_together_are_refused(tmp_path):
    cases = {
        (): "needs -o",
        ("-o", str(tmp_path / "c"), "--steps", "3"): "--steps is for --to executorch",
        ("-o", str(tmp_path / "a.pte"), "--to", "executorch", "--precision", "int8"): "--to executorch writes float32",
        ("-o", str(tmp_path / "c"), "--report", str(tmp_path)): "is a folder",
    }
    for flags, reason in cases.items():
        answer = run("export", str(ADDING), *flags)
        assert answer.returncode == 2
        assert reason in " ".join(answer.stderr.split())
    assert not list(tmp_path.iterdir())

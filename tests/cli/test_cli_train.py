"""`unfading train` and `unfading compare`: what they print, keep and refuse."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.helpers.command import run
from unfading.report.summary import NEXT
from unfading.training.loop import Training
from unfading.training.run_dir import read_run
from unfading.training.stopping import Stopped

ROOT = Path(__file__).parent.parent.parent
QUICK = ["--hidden", "4", "--batch", "3", "--steps", "10", "--valid-batches", "1"]


@pytest.fixture
def unfading(monkeypatch, tmp_path):
    """The command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        answer = run(*arguments)
        return answer.returncode, answer.stdout, answer.stderr

    return command


def test_train_tells_what_it_did_and_runs_a_record_again(unfading, tmp_path):
    code, out, _ = unfading("train", "--task", "adding,T=6", "--cell", "STAR,max_lag=6", *QUICK)
    assert code == 0
    (folder,) = (tmp_path / "runs" / "adding").iterdir()
    assert f"runs/adding/{folder.name}" in out
    record = json.loads((folder / "record.json").read_text())
    assert f"test mse: {record['test']['mse']:.5g}; a guess has 0.16667" in out
    assert record["run"]["cell_options"] == {"max_lag": 6}
    assert record["about"]["command"].startswith("unfading train --task adding,T=6")
    flags = ["--runs", "again", "--json", "--quiet"]
    code, out, _ = unfading("train", "--from", str(folder / "record.json"), *flags)
    assert code == 0
    assert json.loads(out)["test"] == record["test"]
    assert read_run(tmp_path / "again" / "adding" / folder.name / "run.json").key == folder.name


def test_a_run_that_does_not_train_ends_with_what_to_try(unfading):
    code, out, _ = unfading("train", "--task", "adding,T=6", "--cell", "STAR", *QUICK, "--rate", "1e-6")
    assert code == 0
    (line,) = [line for line in out.splitlines() if "did not train" in line]
    assert line == f"  did not train: the score is not a tenth better than a guess. {NEXT['did not train']}"


def test_every_flag_reaches_the_run(unfading, tmp_path):
    flags = [
        "--layers",
        "2",
        "--optimiser",
        "sgd,momentum=0.9,nesterov=true",
        "--rates",
        "W_h=0.1",
        "--schedule",
        "cosine,floor=0.5",
    ]
    flags += ["--clip-norm", "None", "--clip-value", "0.5", "--truncate", "4", "--valid-every", "5", "--retries", "1"]
    flags += [
        "--dtype",
        "float64",
        "--backend",
        "reference",
        "--seed",
        "7",
        "--rate",
        "0.02",
        "--stop-at",
        "1e-9",
        "--name",
        "mine",
    ]
    assert unfading("train", "--task", "adding,T=6", "--cell", "STAR", *QUICK, *flags)[0] == 0
    (folder,) = (tmp_path / "runs" / "mine").iterdir()
    run = read_run(folder / "run.json").to_json()
    wanted = {"layers": 2, "optimiser": "sgd", "optimiser_options": {"momentum": 0.9, "nesterov": True}, "rates": {"W_h": 0.1}}
    wanted |= {"schedule": "cosine", "schedule_options": {"floor": 0.5}, "clip_norm": None, "clip_value": 0.5, "truncate": 4}
    wanted |= {"valid_every": 5, "retries": 1, "dtype": "float64", "backend": "reference", "seed": 7, "rate": 0.02}
    wanted |= {"stop_at": 1e-9, "hidden": 4, "batch": 3, "steps": 10, "valid_batches": 1, "device": "cpu", "split": "train"}
    assert {name: run[name] for name in wanted} == wanted
    assert set(run) - set(wanted) == {"task", "task_options", "cell", "cell_options", "epochs"}


def test_train_compresses_a_model_and_tells_its_size(unfading, tmp_path):
    flags = ["--compress", "rank=2,sparsity=0.5,bits=8"]
    code, out, _ = unfading("train", "--task", "adding,T=6", "--cell", "FastGRNN", *QUICK, *flags)
    assert code == 0
    (folder,) = (tmp_path / "runs" / "adding").iterdir()
    record = json.loads((folder / "record.json").read_text())
    assert record["run"]["compress"] == {"rank": 2, "sparsity": 0.5, "bits": 8}
    size = record["compressed"]
    assert size["entries"] == 4 * 2 + 4 * 2 + 4 * 2 + 4
    assert size["nonzeros"] <= 3 * 4 + 4
    assert f"{size['nonzeros']} of {size['entries']} entries of matrices are not zero; {size['bytes']} bytes in all" in out


def test_a_budget_that_is_not_said_fits_the_task(unfading, tmp_path):
    from unfading.cli.flags import training_flags

    assert training_flags()().run("adding", "STAR", rate=0.1, seed=0, say=print).steps == 2000
    digits = training_flags()().run("digits", "STAR", rate=0.1, seed=0, say=print)
    assert (digits.steps, digits.epochs) == (None, 10)


def test_final_trains_on_all_rows_and_tests_that(unfading):
    code, out, _ = unfading(
        "train", "--task", "digits", "--cell", "Elman", "--hidden", "4", "--batch", "64", "--epochs", "1", "--final", "--json"
    )
    record = json.loads(out)
    assert (code, record["run"]["split"], record["best"]) == (0, "full", None)
    assert 0 <= record["test"]["accuracy"] <= 1


def test_compare_ends_with_a_table_and_a_report(unfading, tmp_path):
    flags = ["--seeds", "2", "--rate", "0.001", "0.1", "--processes", "1"]
    code, out, err = unfading("compare", "--task", "adding,T=6", "--cells", "Elman", "STAR", *QUICK, *flags)
    assert code == 0
    assert "adding T=6: mse, lower is better" in out
    assert "rate chosen by validation: Elman 0." in out
    assert len(list((tmp_path / "runs" / "adding").glob("*/record.json"))) == 8
    assert "<html" in (tmp_path / "runs" / "adding" / "report.html").read_text()[:2000]
    assert err.count("valid mse") == 8
    code, out, _ = unfading("compare", "--task", "adding,T=6", "--cells", "Elman", "STAR", *QUICK, *flags, "--json", "--quiet")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["run"]["cell"] for line in lines] == ["Elman", "Elman", "STAR", "STAR"]
    assert len({(line["run"]["cell"], line["run"]["rate"]) for line in lines}) == 2


def test_tensorboard_gets_the_curve(unfading, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert unfading("train", "--task", "adding,T=6", "--cell", "Elman", *QUICK, "--tensorboard")[0] == 0
    (folder,) = (tmp_path / "runs" / "adding").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    lines = json.loads((folder / "record.json").read_text())["curve"]
    assert [event.step for event in events.Scalars("valid/mse")] == [line["step"] for line in lines if "valid" in line]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([line["loss"] for line in lines])


def test_tensorboard_holds_each_step_once_however_often_a_run_begins(unfading, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = ["train", "--task", "adding,T=6", "--cell", "Elman", *QUICK, "--valid-every", "2", "--tensorboard"]
    whole = Training.advance

    def stopping(self, running):
        whole(self, running)
        if self.state.step == 4:
            self.checkpoints.save()
        if self.state.step == 7:
            raise Stopped(signal.SIGINT, 7)

    def steps():
        (folder,) = (tmp_path / "runs" / "adding").iterdir()
        files = list(folder.glob("events*"))
        events = EventAccumulator(str(folder))
        events.Reload()
        return len(files), [event.step for event in events.Scalars("loss")]

    monkeypatch.setattr(Training, "advance", stopping)
    assert unfading(*command)[0] == 130
    assert steps() == (1, [1, 2, 3, 4, 5, 6, 7])
    monkeypatch.setattr(Training, "advance", whole)
    assert unfading(*command, "--resume")[0] == 0
    assert steps() == (2, list(range(1, 11)))
    assert unfading(*command)[0] == 0  # it is done
    assert steps() == (2, list(range(1, 11)))
    assert unfading(*command, "--again")[0] == 0
    assert steps() == (1, list(range(1, 11)))


@pytest.mark.parametrize("again", [True, False])
def test_a_stop_says_how_to_go_on(unfading, monkeypatch, again):
    def stopped(self, asked):
        raise Stopped(signal.SIGINT, 3)

    monkeypatch.setattr(Training, "go", stopped)
    code, _, err = unfading("train", "--task", "adding,T=6", "--cell", "Elman", *QUICK, *["--again"] * again)
    assert code == 130
    assert f"The same command with --resume{' in place of --again' if again else ''} continues." in err


@pytest.mark.parametrize("place", ["unfading.training.run.Run.make_task", "unfading.training.run.Run.make_model"])
@pytest.mark.parametrize("verb", [["train", "--cell"], ["compare", "--seeds", "1", "--cells"]], ids=lambda verb: verb[0])
def test_ctrl_c_before_the_first_step_is_one_sentence(unfading, monkeypatch, verb, place):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("unfading.training.stopping._noted", False)
    monkeypatch.setattr(place, interrupted)
    code, _, err = unfading(*verb, "Elman", "--task", "adding,T=6", *QUICK)
    assert (code, err) == (130, "unfading: stopped before the first step.\n")


def test_factors_are_given_to_the_cells_that_they_fit_and_must_fit_one(unfading, tmp_path):
    command = ["compare", "--task", "adding,T=6", "--cells", "Elman", "FastRNN", *QUICK, "--seeds", "1", "--processes", "1"]
    code, _, err = unfading(*command, "--rates", "W_h=0.1", "nothing=2")
    assert (code, "--rates: unknown parameter of these cells 'nothing'." in err) == (2, True)
    assert not (tmp_path / "runs").exists()
    code, out, _ = unfading(*command, "--rates", "W_h=0.5", "logits=0.1", "bias=2", "--json")
    assert code == 0
    given = {run["cell"]: run["rates"] for run in (json.loads(line)["run"] for line in out.splitlines())}
    assert given == {"Elman": {"W_h": 0.5, "bias": 2.0}, "FastRNN": {"logits": 0.1, "bias": 2.0}}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--task", "ading", "--cell", "STAR"], "unknown task 'ading'. Did you mean 'adding'?"),
        (["--task", "adding", "--cell", "LTSM"], "unknown cell 'LTSM'. Did you mean 'LSTM'?"),
        (["--task", "adding,S=3", "--cell", "STAR"], "unknown option of task adding 'S'."),
        (["--task", "adding,T=1", "--cell", "STAR"], "task adding: T must be at least 2; got 1"),
        (["--task", "adding", "--cell", "STAR,max_leg=3"], "unknown option of cell STAR 'max_leg'. Did you mean 'max_lag'?"),
        (["--task", "adding", "--cell", "STAR", "--optimiser", "adm"], "unknown optimiser 'adm'. Did you mean 'adam'?"),
        (["--task", "adding", "--cell", "STAR", "--schedule", "cosin"], "unknown schedule 'cosin'. Did you mean 'cosine'?"),
        (["--task", "adding", "--cell", "STAR", "--rates", "W_z=0.1"], "rates: unknown parameter 'W_z'"),
        (["--task", "adding", "--cell", "STAR", "--rates", "W_h"], "--rates takes NAME=FACTOR, e.g. eta=0.1; got 'W_h'"),
        (
            ["--task", "adding", "--cell", "STAR", "--compress", "8"],
            "expected option=value,...; got '8', e.g. --compress rank=8",
        ),
        (["--task", "adding", "--cell", "STAR", "--compress", "bits=8,bits=8"], "'bits=8,bits=8' gives bits twice"),
        (["--task", "adding", "--cell", "STAR", "--compress", "rank=2"], "compress: STAR has no low-rank form; got rank=2"),
        (["--task", "adding", "--cell", "STAR", "--compress", "bits=4"], "compress: bits must be 8"),
        (["--task", "adding", "--cell", "STAR", "--compress", "sparsity=0"], "compress: sparsity is the share of zeros"),
        (["--task", "adding", "--cell", "STAR", "--epochs", "2"], "task adding generates its data and has no epochs"),
        (["--task", "adding", "--cell", "STAR", "--steps", "2", "--epochs", "2"], "steps or epochs, one of the two"),
        (["--task", "adding", "--cell", "STAR", "--clip-norm", "1", "--clip-value", "2"], "clips by norm or by value"),
        (["--task", "adding", "--cell", "STAR", "--resume", "--again"], "--resume continues and --again starts anew"),
        (["--task", "adding", "--cell", "STAR", "--device", "cuda"], "torch finds no GPU here"),
        (["--task", "adding", "--cell", "STAR", "--rate", "-1"], "rate must be above 0; got -1"),
        (["--task", "adding", "--cell", "STAR", "--name", "../up"], "--name is one folder in --runs; got '../up'"),
        (["--task", "nowhere.py:Mine", "--cell", "STAR"], "names a file that does not exist"),
        (["--task", "adding"], "--task and --cell say what to train"),
        (["--from", "nothing.json"], "nothing.json does not exist"),
        (
            ["--from", "a.json", "--task", "adding"],
            "--from a.json says what to train and how; leave the other flags out: --task.",
        ),
        (
            ["--from", "a.json", "--seed=0", "--valid-every", "2", "--quiet"],
            "leave the other flags out: --seed, --valid-every.",
        ),
        (["--from", "a.json", "--threads", "1", "--save-every", "9", "--name", "b", "--final"], "a.json does not exist"),
        (["--task", "adding,,", "--cell", "STAR"], "expected NAME or NAME,option=value"),
        (["--task", "adding,T=3,T=4", "--cell", "STAR"], "gives T twice"),
    ],
)
def test_a_wrong_flag_is_one_sentence_and_nothing_is_made(unfading, tmp_path, arguments, sentence):
    if "cuda" in arguments:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    code, _, err = unfading("train", *arguments)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["forecast", "own_cell", "own_data", "swap_lstm"])
@pytest.mark.sample(2)
def test_examples_run(name, tmp_path, monkeypatch, capsys):
    import runpy

    import torch

    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    learnt = {
        "forecast": "seasonal naive",
        "own_cell": "LeakyCell  test error 0.0",
        "own_data": "test accuracy 0.9",
        "swap_lstm": "100.0% right",
    }
    assert learnt[name] in out or (name == "own_data" and "test accuracy 1.0" in out)


def test_watched_gradients_stand_in_the_record(unfading):
    code, out, _ = unfading(
        "train", "--task", "adding,T=6", "--cell", "STAR", *QUICK, "--watch", "gradients", "--json", "--quiet"
    )
    assert code == 0
    assert len(json.loads(out)["curve"][0]["watched"]["layers"]) == 1


OWN_TASK = (ROOT / "tests" / "user" / "own_tasks.py").read_text()


def test_a_finished_run_says_when_it_finished(unfading):
    flags = ["--task", "adding,T=6", "--cell", "Elman", *QUICK]
    assert "already finished" not in unfading("train", *flags)[2]
    code, _, err = unfading("train", *flags)
    assert code == 0
    assert re.search(r"Elman seed 0: already finished on \d{4}-\d\d-\d\d; --again trains it again\.", err)
    assert unfading("train", *flags, "--again", "--quiet")[2] == ""


def test_an_edit_before_a_resume_is_told_and_json_stays_json(unfading, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN_TASK)
    flags = ["--task", "mine.py:Same", "--cell", "Elman", *QUICK, "--json"]
    with monkeypatch.context() as patch:
        patch.setattr("unfading.training.loop.Training.go", stop_after_three_steps)
        assert unfading("train", *flags)[0] == 143
    (tmp_path / "mine.py").write_text(OWN_TASK + "# edited\n")
    code, _, err = unfading("train", *flags)
    assert (code, "mine.py has changed since runs/mine.py-Same/" in err, "stopped at step 3" in err) == (2, True, True)
    code, out, err = unfading("train", *flags, "--resume", "--final")
    assert code == 0
    assert err.count("continuing with the source stored there") == 1
    assert json.loads(out)["run"]["split"] == "full"
    sources = [json.loads(file.read_text())["about"]["sources"] for file in tmp_path.rglob("record.json")]
    assert len(sources) == 2
    assert sources[0] == sources[1]


def stop_after_three_steps(training, asked):
    running = training.state.running()
    for _ in range(3):
        training.advance(running)
    training.checkpoints.save()
    raise Stopped(signal.SIGTERM, 3)


@pytest.mark.parametrize(
    "command", [("train", "--runs", "again", "--from"), ("diagnose", "--batch", "2", "--run")], ids=["train", "diagnose"]
)
def test_the_code_of_a_run_file_is_executed_only_if_allowed(command, unfading, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_TASK)
    assert unfading("train", "--task", "mine.py:Same", "--cell", "Elman", *QUICK)[0] == 0
    (folder,) = (tmp_path / "runs" / "mine.py-Same").iterdir()
    (tmp_path / "mine.py").unlink()
    target = str(folder / "record.json" if command[0] == "train" else folder)
    code, _, err = unfading(*command, target)
    assert code == 2
    assert re.search(
        r"names code of a user, and .*source/task would be executed\. If you trust it, allow it with --allow-code", err
    )
    code, out, _ = unfading(*command, target, "--allow-code", "--json")
    assert code in (0, 1)  # 1: a fault of the gradients
    assert json.loads(out)

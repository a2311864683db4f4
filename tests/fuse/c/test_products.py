"""The precision of float32 products: as a run sets it, and restored afterwards."""

import pytest
import torch

from unfading import Run
from unfading.torch_state import float32_products
from unfading.training.loop import Training, train_together

RUN = Run(task="adding", task_options={"T": 4}, cell="Elman", hidden=3, batch=2, steps=1, valid_batches=1)
PLACES = {"matmul": torch.backends.cuda.matmul, "rnn": torch.backends.cudnn.rnn, "conv": torch.backends.cudnn.conv}


def now():
    return {name: place.fp32_precision for name, place in PLACES.items()}


def test_a_block_sets_them_and_sets_them_back():
    before = now()
    with float32_products("tf32"):
        assert set(now().values()) == {"tf32"}
        with float32_products("ieee"):
            assert set(now().values()) == {"ieee"}
        assert set(now().values()) == {"tf32"}
    assert now() == before
    with pytest.raises(ZeroDivisionError), float32_products("tf32"):
        raise ZeroDivisionError
    assert now() == before


@pytest.mark.parametrize(("dtype", "wanted"), [("float32", "ieee"), ("float64", "ieee"), ("tf32", "tf32")])
def test_a_run_is_trained_with_its_own(dtype, wanted, monkeypatch):
    fields = {"dtype": dtype, **({"device": "cuda"} if dtype == "tf32" else {})}
    run, precisions = Run(**{**RUN.to_json(), **fields}), []

    class Stop(Exception):
        pass

    def see(self, *arguments, **keywords):
        precisions.append(now())
        raise Stop

    monkeypatch.setattr(Training, "__init__", see)
    before = now()
    with pytest.raises(Stop):
        train_together([run])
    assert [set(each.values()) for each in precisions] == [{wanted}]
    assert now() == before


def test_a_cpu_has_no_tf32():
    with pytest.raises(ValueError, match='dtype="tf32" needs device="cuda"'):
        Run(**{**RUN.to_json(), "dtype": "tf32"})

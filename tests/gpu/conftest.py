"""What the tests on a GPU share."""

import pytest
import torch

from tests.helpers.contractive import LIMITS


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture(params=LIMITS)
def precision(request):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = before

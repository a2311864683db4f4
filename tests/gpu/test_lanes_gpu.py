"""The laws of lanes on a GPU."""

import os

import pytest
import torch

from tests.helpers.lane_laws import *  # noqa: F403

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "1", reason="Triton interprets; `make gpu-test` has it compile"),
]

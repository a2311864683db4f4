"""The report of a loop whose multiprocessors have waited for each other in vain.

A loop with divided units sets a flag, in memory that the GPU and the host share, when a program has not come to a barrier. Its
results are wrong. The flag is looked at when a divided loop is launched, and by the training loop after every step and every
evaluation. This costs no synchronisation, so it notices what the GPU has finished.
"""

import torch
from torch import Tensor

_flags: dict[torch.device, Tensor] = {}


def flag_on(device: torch.device) -> Tensor:
    """The flag of a device. Raises where a loop has set it."""
    flag = _flags.get(device)
    if flag is None:
        flag = _flags[device] = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    check_waiting()
    return flag


def check_waiting() -> None:
    """Raise if a loop that has ended, on any device, waited in vain."""
    for device, flag in _flags.items():
        if flag.item():
            flag.zero_()
            raise RuntimeError(
                f"an earlier call on {device} gave wrong results: its multiprocessors waited for each other in vain. Run the "
                "cell with backend='graph' or 'reference'."
            )

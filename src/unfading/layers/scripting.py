"""torch.jit.script and the layers of this library: refused with one sentence."""

from typing import NoReturn


class NotScriptable:
    """A base of modules whose loop over time TorchScript cannot compile."""

    def __prepare_scriptable__(self) -> NoReturn:
        # torch.jit.script calls it for every module inside the one that it is given.
        raise RuntimeError(
            f"torch.jit.script cannot compile {type(self).__name__}, whose loop over time is compiled by this library. Use "
            "torch.export or torch.compile, or script a layer of torch.nn, which unfading.to_torch makes of an Elman, LSTM or "
            "GRU layer."
        )

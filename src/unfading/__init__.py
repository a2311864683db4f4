"""unfading: recurrent cells written once, as their equation; layers that replace torch.nn's by one word.

A public name is imported from its module when it is first used (PEP 562), so that `import unfading` loads neither torch nor
anything else. Editors and type checkers read `__init__.pyi`, which `tools/make_stub.py` generates.
"""

import sys as _sys
from importlib import import_module as _import_module

__version__ = "0.1.0"

# Every public name, under the module that defines it.
_PUBLIC_NAMES = {
    "backends.choose": ["use_backend"],
    "cells.antisymmetric": ["AntisymmetricRNNCell", "GatedAntisymmetricRNNCell"],
    "cells.base": ["Cell"],
    "cells.bistable": ["BRCell", "NBRCell"],
    "cells.continuous": ["ContinuousRNNCell"],
    "cells.conv_gru": ["ConvGRUCell"],
    "cells.conv_lstm": ["ConvForgetLSTMCell", "ConvLSTMCell"],
    "cells.conv_star": ["ConvSTARCell"],
    "cells.convolution": ["Convolution", "ConvolutionalCell", "convolve"],
    "cells.deep": ["DeepTransitionCell"],
    "cells.elman": ["ElmanCell", "IdentityRNNCell", "LinearRNNCell", "OrthogonalRNNCell"],
    "cells.equilibrium": ["EquilibriumRNNCell"],
    "cells.exponential": ["ExpRNNCell"],
    "cells.fast": ["FastGRNNCell", "FastRNNCell"],
    "cells.gru": ["GRUCell"],
    "cells.highway": ["RecurrentHighwayCell"],
    "cells.incremental": ["IncrementalRNNCell", "SiRNNCell"],
    "cells.independent": ["IndRNNCell"],
    "cells.input_candidate": ["CFNCell", "MinimalRNNCell", "RANCell"],
    "cells.janet": ["ForgetLSTMCell", "JANETCell"],
    "cells.legendre": ["LMUCell"],
    "cells.lem": ["LEMCell"],
    "cells.light_gru": ["LiGRUCell", "MGUCell"],
    "cells.linear_unit": ["GatedLRUCell", "LRUCell"],
    "cells.lipschitz": ["LipschitzRNNCell"],
    "cells.lstm": ["LSTMCell", "PeepholeLSTMCell"],
    "cells.matrix": ["BlockDiagonal", "linear", "LowRank"],
    "cells.minimal": ["MinGRUCell", "MinLSTMCell"],
    "cells.multiplicative": ["MultiplicativeLSTMCell"],
    "cells.nas": ["NASCell"],
    "cells.nru": ["NRUCell"],
    "cells.oscillator": ["CoRNNCell", "UnICORNNCell"],
    "cells.rotation": ["EURNNCell", "GORUCell"],
    "cells.slow_context": ["SCRNCell"],
    "cells.slstm": ["SLSTMCell"],
    "cells.spectral": ["SoftOrthogonalRNNCell", "SpectralRNNCell"],
    "cells.stable": ["StableIncrementalRNNCell"],
    "cells.star": ["STARCell"],
    "cells.statistical": ["StatisticalRNNCell"],
    "cells.twin_gate": ["ATRCell", "SGRNCell"],
    "cells.ugrnn": ["UGRNNCell"],
    "cells.unitary": ["FullUnitaryRNNCell", "UnitaryRNNCell"],
    "cells.wrap": ["RecurrentDropoutCell", "ZoneoutCell"],
    "diagnostics.diagnosis": ["diagnose", "Diagnosis"],
    "diagnostics.flat_start.flat_start": ["flat_start"],
    "layers.convert": ["from_torch", "to_torch"],
    "layers.factory": ["layer"],
    "layers.library": [
        "AntisymmetricRNN",
        "ATR",
        "BR",
        "CFN",
        "ContinuousRNN",
        "ConvForgetLSTM",
        "ConvGRU",
        "ConvLSTM",
        "ConvSTAR",
        "CoRNN",
        "DeepTransition",
        "Elman",
        "EquilibriumRNN",
        "EURNN",
        "ExpRNN",
        "FastGRNN",
        "FastRNN",
        "ForgetLSTM",
        "FullUnitaryRNN",
        "GatedAntisymmetricRNN",
        "GatedLRU",
        "GORU",
        "GRU",
        "IdentityRNN",
        "IncrementalRNN",
        "IndRNN",
        "JANET",
        "LEM",
        "LiGRU",
        "LinearRNN",
        "LipschitzRNN",
        "LMU",
        "LRU",
        "LSTM",
        "MGU",
        "MinGRU",
        "MinimalRNN",
        "MinLSTM",
        "MultiplicativeLSTM",
        "NAS",
        "NBR",
        "NRU",
        "OrthogonalRNN",
        "PeepholeLSTM",
        "RAN",
        "RecurrentHighway",
        "SCRN",
        "SGRN",
        "SiRNN",
        "SLSTM",
        "SoftOrthogonalRNN",
        "SpectralRNN",
        "StableIncrementalRNN",
        "STAR",
        "StatisticalRNN",
        "UGRNN",
        "UnICORNN",
        "UnitaryRNN",
    ],
    "layers.model": ["Model"],
    "layers.recurrent": ["detach", "Recurrent"],
    "layers.scan_function": ["scan"],
    "layers.truncated": ["truncated"],
    "layers.tune": ["tune"],
    "tasks.base": ["Batch", "EveryStep", "LastStep", "MeanOverTime", "PooledOverTime", "Task"],
    "tasks.frame_heads": ["EveryFrame", "GestureHead", "LastFrame", "MeanFrame"],
    "training.callbacks": ["TrainingEvent"],
    "training.compare": ["compare"],
    "training.fit": ["fit"],
    "training.run": ["Run"],
    "training.train": ["train"],
    "training.trained_model": ["TrainedModel"],
    "training.weights": ["load"],
}
_MODULES = {name: module for module, names in _PUBLIC_NAMES.items() for name in names}

__all__ = sorted(_MODULES, key=str.lower)


def __getattr__(name: str) -> object:
    """Import a public name, or a submodule such as `unfading.tasks`, when it is first used."""
    if name in _MODULES:
        value = getattr(_import_module(f"unfading.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    try:
        return _import_module(f"unfading.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"unfading.{name}":
            raise
        # Python adds the nearest name of `dir(unfading)` to the message.
        raise AttributeError(
            f"module 'unfading' has no attribute {name!r}", name=name, obj=_import_module("unfading")
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _OperatorsForFiles:
    """An import hook: registers the operators of the library with torch before torch reads a file of `torch.export`.

    `torch.export.load` fails on an operator that is not registered, and the lazy import above would not register it.
    """

    READER = "torch.export.pt2_archive"  # which torch imports at the first `torch.export.load`

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name == cls.READER:
            _import_module("unfading.fuse.operator")


if _OperatorsForFiles.READER in _sys.modules:
    _import_module("unfading.fuse.operator")
else:
    _sys.meta_path.insert(0, _OperatorsForFiles)

"""unfading: recurrent cells written once, as their equation; layers that replace torch.nn's by one word."""

from unfading.backends.choose import use_backend
from unfading.cells.antisymmetric import AntisymmetricRNNCell, GatedAntisymmetricRNNCell
from unfading.cells.base import Cell, LowRank, linear
from unfading.cells.continuous import ContinuousRNNCell
from unfading.cells.deep import DeepTransitionCell
from unfading.cells.elman import ElmanCell, IdentityRNNCell, LinearRNNCell, OrthogonalRNNCell
from unfading.cells.equilibrium import EquilibriumRNNCell
from unfading.cells.fast import FastGRNNCell, FastRNNCell
from unfading.cells.gru import GRUCell
from unfading.cells.highway import RecurrentHighwayCell
from unfading.cells.incremental import IncrementalRNNCell, SiRNNCell
from unfading.cells.janet import ForgetLSTMCell, JANETCell
from unfading.cells.lstm import LSTMCell, PeepholeLSTMCell
from unfading.cells.nru import NRUCell
from unfading.cells.rotation import EURNNCell, GORUCell
from unfading.cells.spectral import SoftOrthogonalRNNCell, SpectralRNNCell
from unfading.cells.stable import StableIncrementalRNNCell
from unfading.cells.star import STARCell
from unfading.cells.statistical import StatisticalRNNCell
from unfading.cells.ugrnn import UGRNNCell
from unfading.cells.unitary import FullUnitaryRNNCell, UnitaryRNNCell
from unfading.cells.wrap import RecurrentDropoutCell, ZoneoutCell
from unfading.diagnostics.diagnosis import Diagnosis, diagnose
from unfading.diagnostics.flat_start.flat_start import flat_start
from unfading.layers.convert import from_torch, to_torch
from unfading.layers.factory import layer
from unfading.layers.model import Model
from unfading.layers.recurrent import Recurrent, detach
from unfading.layers.truncated import truncated
from unfading.layers.tune import tune
from unfading.reference import scan
from unfading.tasks.base import Batch, EveryStep, LastStep, MeanOverTime, Task
from unfading.training.compare import compare
from unfading.training.run import Run
from unfading.training.train import train
from unfading.training.weights import load

__version__ = "0.1.0"

# One line per cell; a test names the missing one.
AntisymmetricRNN = layer(AntisymmetricRNNCell)
ContinuousRNN = layer(ContinuousRNNCell)
DeepTransition = layer(DeepTransitionCell)
Elman = layer(ElmanCell)
EquilibriumRNN = layer(EquilibriumRNNCell)
EURNN = layer(EURNNCell)
FastGRNN = layer(FastGRNNCell)
FastRNN = layer(FastRNNCell)
ForgetLSTM = layer(ForgetLSTMCell)
FullUnitaryRNN = layer(FullUnitaryRNNCell)
GatedAntisymmetricRNN = layer(GatedAntisymmetricRNNCell)
GORU = layer(GORUCell)
GRU = layer(GRUCell)
IdentityRNN = layer(IdentityRNNCell)
IncrementalRNN = layer(IncrementalRNNCell)
JANET = layer(JANETCell)
LinearRNN = layer(LinearRNNCell)
LSTM = layer(LSTMCell)
NRU = layer(NRUCell)
OrthogonalRNN = layer(OrthogonalRNNCell)
PeepholeLSTM = layer(PeepholeLSTMCell)
RecurrentHighway = layer(RecurrentHighwayCell)
SiRNN = layer(SiRNNCell)
SoftOrthogonalRNN = layer(SoftOrthogonalRNNCell)
SpectralRNN = layer(SpectralRNNCell)
StableIncrementalRNN = layer(StableIncrementalRNNCell)
STAR = layer(STARCell)
StatisticalRNN = layer(StatisticalRNNCell)
UGRNN = layer(UGRNNCell)
UnitaryRNN = layer(UnitaryRNNCell)

__all__ = [
    "AntisymmetricRNN",
    "AntisymmetricRNNCell",
    "Batch",
    "Cell",
    "compare",
    "ContinuousRNN",
    "ContinuousRNNCell",
    "DeepTransition",
    "DeepTransitionCell",
    "detach",
    "diagnose",
    "Diagnosis",
    "Elman",
    "ElmanCell",
    "EquilibriumRNN",
    "EquilibriumRNNCell",
    "EURNN",
    "EURNNCell",
    "EveryStep",
    "FastGRNN",
    "FastGRNNCell",
    "FastRNN",
    "FastRNNCell",
    "ForgetLSTM",
    "ForgetLSTMCell",
    "flat_start",
    "from_torch",
    "FullUnitaryRNN",
    "FullUnitaryRNNCell",
    "GatedAntisymmetricRNN",
    "GatedAntisymmetricRNNCell",
    "GORU",
    "GORUCell",
    "GRU",
    "GRUCell",
    "IdentityRNN",
    "IdentityRNNCell",
    "IncrementalRNN",
    "IncrementalRNNCell",
    "JANET",
    "JANETCell",
    "LastStep",
    "layer",
    "linear",
    "load",
    "LinearRNN",
    "LinearRNNCell",
    "LowRank",
    "LSTM",
    "LSTMCell",
    "MeanOverTime",
    "Model",
    "NRU",
    "NRUCell",
    "OrthogonalRNN",
    "OrthogonalRNNCell",
    "PeepholeLSTM",
    "PeepholeLSTMCell",
    "Recurrent",
    "RecurrentDropoutCell",
    "RecurrentHighway",
    "RecurrentHighwayCell",
    "Run",
    "scan",
    "SiRNN",
    "SiRNNCell",
    "SoftOrthogonalRNN",
    "SoftOrthogonalRNNCell",
    "SpectralRNN",
    "SpectralRNNCell",
    "StableIncrementalRNN",
    "StableIncrementalRNNCell",
    "STAR",
    "STARCell",
    "StatisticalRNN",
    "StatisticalRNNCell",
    "Task",
    "to_torch",
    "train",
    "truncated",
    "tune",
    "UGRNN",
    "UGRNNCell",
    "UnitaryRNN",
    "UnitaryRNNCell",
    "use_backend",
    "ZoneoutCell",
]

"""unfading: recurrent cells written once, as their equation; layers that replace torch.nn's by one word."""

from unfading.backend import use_backend
from unfading.cells.base import Cell, LowRank, linear
from unfading.cells.elman import ElmanCell
from unfading.cells.fast import FastGRNNCell, FastRNNCell
from unfading.cells.gru import GRUCell
from unfading.cells.incremental import IncrementalRNNCell, SiRNNCell
from unfading.cells.janet import ForgetLSTMCell, JANETCell
from unfading.cells.lstm import LSTMCell, PeepholeLSTMCell
from unfading.cells.nru import NRUCell
from unfading.cells.star import STARCell
from unfading.cells.ugrnn import UGRNNCell
from unfading.convert import from_torch, to_torch
from unfading.layer import Recurrent, detach, layer
from unfading.model import Model
from unfading.scan import scan
from unfading.tasks.base import EveryStep, LastStep, MeanOverTime

__version__ = "0.1.0"

# One line per cell; a test names the missing one.
Elman = layer(ElmanCell)
FastGRNN = layer(FastGRNNCell)
FastRNN = layer(FastRNNCell)
ForgetLSTM = layer(ForgetLSTMCell)
GRU = layer(GRUCell)
IncrementalRNN = layer(IncrementalRNNCell)
JANET = layer(JANETCell)
LSTM = layer(LSTMCell)
NRU = layer(NRUCell)
PeepholeLSTM = layer(PeepholeLSTMCell)
SiRNN = layer(SiRNNCell)
STAR = layer(STARCell)
UGRNN = layer(UGRNNCell)

__all__ = [
    "Cell",
    "Elman",
    "ElmanCell",
    "EveryStep",
    "FastGRNN",
    "FastGRNNCell",
    "FastRNN",
    "FastRNNCell",
    "ForgetLSTM",
    "ForgetLSTMCell",
    "GRU",
    "GRUCell",
    "IncrementalRNN",
    "IncrementalRNNCell",
    "JANET",
    "JANETCell",
    "LSTM",
    "LSTMCell",
    "LastStep",
    "LowRank",
    "MeanOverTime",
    "Model",
    "NRU",
    "NRUCell",
    "PeepholeLSTM",
    "PeepholeLSTMCell",
    "Recurrent",
    "STAR",
    "STARCell",
    "SiRNN",
    "SiRNNCell",
    "UGRNN",
    "UGRNNCell",
    "detach",
    "from_torch",
    "layer",
    "linear",
    "scan",
    "to_torch",
    "use_backend",
]

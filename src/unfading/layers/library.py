"""The layer class of every cell of the library, one line each."""

from unfading.cells.antisymmetric import AntisymmetricRNNCell, GatedAntisymmetricRNNCell
from unfading.cells.continuous import ContinuousRNNCell
from unfading.cells.conv_gru import ConvGRUCell
from unfading.cells.conv_lstm import ConvForgetLSTMCell, ConvLSTMCell
from unfading.cells.conv_star import ConvSTARCell
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
from unfading.layers.factory import layer

AntisymmetricRNN = layer(AntisymmetricRNNCell)
ContinuousRNN = layer(ContinuousRNNCell)
ConvForgetLSTM = layer(ConvForgetLSTMCell)
ConvGRU = layer(ConvGRUCell)
ConvLSTM = layer(ConvLSTMCell)
ConvSTAR = layer(ConvSTARCell)
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

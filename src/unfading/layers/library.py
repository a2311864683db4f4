"""The layer class of every cell of the library, one line each."""

from unfading.cells.antisymmetric import AntisymmetricRNNCell, GatedAntisymmetricRNNCell
from unfading.cells.bistable import BRCell, NBRCell
from unfading.cells.continuous import ContinuousRNNCell
from unfading.cells.conv_gru import ConvGRUCell
from unfading.cells.conv_lstm import ConvForgetLSTMCell, ConvLSTMCell
from unfading.cells.conv_star import ConvSTARCell
from unfading.cells.deep import DeepTransitionCell
from unfading.cells.elman import ElmanCell, IdentityRNNCell, LinearRNNCell, OrthogonalRNNCell
from unfading.cells.equilibrium import EquilibriumRNNCell
from unfading.cells.exponential import ExpRNNCell
from unfading.cells.fast import FastGRNNCell, FastRNNCell
from unfading.cells.gru import GRUCell
from unfading.cells.highway import RecurrentHighwayCell
from unfading.cells.incremental import IncrementalRNNCell, SiRNNCell
from unfading.cells.independent import IndRNNCell
from unfading.cells.input_candidate import CFNCell, MinimalRNNCell, RANCell
from unfading.cells.janet import ForgetLSTMCell, JANETCell
from unfading.cells.legendre import LMUCell
from unfading.cells.lem import LEMCell
from unfading.cells.light_gru import LiGRUCell, MGUCell
from unfading.cells.linear_unit import GatedLRUCell, LRUCell
from unfading.cells.lipschitz import LipschitzRNNCell
from unfading.cells.lstm import LSTMCell, PeepholeLSTMCell
from unfading.cells.minimal import MinGRUCell, MinLSTMCell
from unfading.cells.multiplicative import MultiplicativeLSTMCell
from unfading.cells.nas import NASCell
from unfading.cells.nru import NRUCell
from unfading.cells.oscillator import CoRNNCell, UnICORNNCell
from unfading.cells.rotation import EURNNCell, GORUCell
from unfading.cells.slow_context import SCRNCell
from unfading.cells.slstm import SLSTMCell
from unfading.cells.spectral import SoftOrthogonalRNNCell, SpectralRNNCell
from unfading.cells.stable import StableIncrementalRNNCell
from unfading.cells.star import STARCell
from unfading.cells.statistical import StatisticalRNNCell
from unfading.cells.twin_gate import ATRCell, SGRNCell
from unfading.cells.ugrnn import UGRNNCell
from unfading.cells.unitary import FullUnitaryRNNCell, UnitaryRNNCell
from unfading.layers.factory import layer

AntisymmetricRNN = layer(AntisymmetricRNNCell)
ATR = layer(ATRCell)
BR = layer(BRCell)
CFN = layer(CFNCell)
ContinuousRNN = layer(ContinuousRNNCell)
ConvForgetLSTM = layer(ConvForgetLSTMCell)
ConvGRU = layer(ConvGRUCell)
ConvLSTM = layer(ConvLSTMCell)
ConvSTAR = layer(ConvSTARCell)
CoRNN = layer(CoRNNCell)
DeepTransition = layer(DeepTransitionCell)
Elman = layer(ElmanCell)
EquilibriumRNN = layer(EquilibriumRNNCell)
EURNN = layer(EURNNCell)
ExpRNN = layer(ExpRNNCell)
FastGRNN = layer(FastGRNNCell)
FastRNN = layer(FastRNNCell)
ForgetLSTM = layer(ForgetLSTMCell)
FullUnitaryRNN = layer(FullUnitaryRNNCell)
GatedAntisymmetricRNN = layer(GatedAntisymmetricRNNCell)
GatedLRU = layer(GatedLRUCell)
GORU = layer(GORUCell)
GRU = layer(GRUCell)
IdentityRNN = layer(IdentityRNNCell)
IncrementalRNN = layer(IncrementalRNNCell)
IndRNN = layer(IndRNNCell)
JANET = layer(JANETCell)
LEM = layer(LEMCell)
LiGRU = layer(LiGRUCell)
LinearRNN = layer(LinearRNNCell)
LipschitzRNN = layer(LipschitzRNNCell)
LMU = layer(LMUCell)
LRU = layer(LRUCell)
LSTM = layer(LSTMCell)
MGU = layer(MGUCell)
MinGRU = layer(MinGRUCell)
MinimalRNN = layer(MinimalRNNCell)
MinLSTM = layer(MinLSTMCell)
MultiplicativeLSTM = layer(MultiplicativeLSTMCell)
NAS = layer(NASCell)
NBR = layer(NBRCell)
NRU = layer(NRUCell)
OrthogonalRNN = layer(OrthogonalRNNCell)
PeepholeLSTM = layer(PeepholeLSTMCell)
RAN = layer(RANCell)
RecurrentHighway = layer(RecurrentHighwayCell)
SCRN = layer(SCRNCell)
SGRN = layer(SGRNCell)
SiRNN = layer(SiRNNCell)
SLSTM = layer(SLSTMCell)
SoftOrthogonalRNN = layer(SoftOrthogonalRNNCell)
SpectralRNN = layer(SpectralRNNCell)
StableIncrementalRNN = layer(StableIncrementalRNNCell)
STAR = layer(STARCell)
StatisticalRNN = layer(StatisticalRNNCell)
UGRNN = layer(UGRNNCell)
UnICORNN = layer(UnICORNNCell)
UnitaryRNN = layer(UnitaryRNNCell)

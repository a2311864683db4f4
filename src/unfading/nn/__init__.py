"""`LSTM`, `GRU` and `RNN` of torch.nn on the kernels of this library: same arguments, attributes, states and state_dict."""

from unfading.nn.drop_in import GRU, LSTM, RNN

__all__ = ["GRU", "LSTM", "RNN"]

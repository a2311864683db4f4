"""Replace nn.LSTM by STAR in an existing script, where two lines change: `python examples/swap_lstm.py`

The script classifies sequences by the frequency with which they begin; the rest of each sequence is noise.
"""

import torch
from torch import Tensor, nn

import unfading


class Classifier(nn.Module):
    """Two recurrent layers, and a linear classifier on the last state."""

    def __init__(self) -> None:
        super().__init__()
        # was: self.rnn = nn.LSTM(1, 32, num_layers=2, batch_first=True)
        self.rnn = unfading.STAR(1, 32, num_layers=2, batch_first=True, max_lag=50)
        self.answer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        # was: _, (h_n, c_n) = self.rnn(x); last = h_n[-1]
        _, state = self.rnn(x)
        return self.answer(state.h[-1])


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Sequences [B, 50, 1] and their classes."""
    kind = torch.randint(2, (size,))
    phase = torch.linspace(0, 1, 20) * (3.0 + 3.0 * kind.unsqueeze(1)) * 6.283
    x = 0.3 * torch.randn(size, 50)
    x[:, :20] += torch.sin(phase)
    return x.unsqueeze(2), kind


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Classifier()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(151):
        x, kind = batch(64)
        loss = nn.functional.cross_entropy(model(x), kind)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0:
            with torch.no_grad():
                x, kind = batch(500)
                right = (model(x).argmax(dim=1) == kind).float().mean().item()
            print(f"step {step:3}: loss {loss.item():.3f}, {right:.1%} right on fresh sequences")


if __name__ == "__main__":
    main()

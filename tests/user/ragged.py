"""Tasks of a user whose rows differ in length and in the number of targets that count."""

import torch

import unfading
from unfading.tasks.base import accuracy, cross_entropy


class Ragged(unfading.Task):
    """The running sum of bits, modulo three, at random steps of rows of random lengths. Some rows have no such step."""

    paper = "none"
    metric = "accuracy"
    higher_is_better = True
    input_size = 1
    guess = 1 / 3

    def batch(self, index, size, *, split, seed, device):
        number = index + 1000 * ["train", "valid", "full", "test"].index(split)
        generator = torch.Generator().manual_seed(number * 7919 + seed)
        x = torch.randint(2, (6, size, 1), generator=generator)
        lengths = torch.randint(1, 7, (size,), generator=generator)
        steps = torch.arange(6).unsqueeze(1)
        mask = (steps < lengths) & (torch.rand(6, size, generator=generator) < 0.4)
        mask[0, index % size] = True
        target = (x.squeeze(2).cumsum(dim=0) % 3) * mask
        return unfading.Batch(x.float().to(device), target.to(device), lengths.to(device), mask.to(device))

    def length(self, split, size):
        return None if split == "train" else 3

    def weight(self, batch):
        return int(batch.mask.sum())

    def loss(self, prediction, batch):
        return cross_entropy(prediction, batch.target, batch.mask)

    def metrics(self, prediction, batch):
        return {"accuracy": accuracy(prediction, batch.target, batch.mask)}

    def head(self, size):
        return unfading.EveryStep(size, 3)


class Unweighted(Ragged):
    """The same, with the weights of a task that counts rows."""

    def weight(self, batch):
        return batch.x.shape[1]

"""Every task of the catalogue, at a size for tests, and a stack that can read it."""

import unfading
from unfading import catalogue

TASKS = catalogue.tasks()
# Options that make a task small; a task that is not named is small enough.
SMALL = {
    "adding": {"T": 10},
    "copying": {"T": 7},
    "denoising": {"T": 12},
    "jester": {"T": 4, "size": 6},
    "moving_mnist": {"T": 5, "size": 9, "digit_size": 7},
    "moving_mnist_direction": {"T": 5, "size": 9, "digit_size": 7},
    "noisy_cifar": {"T": 40},
    "noisy_mnist": {"T": 35},
    "ptb_characters": {"steps": 11, "embedding": 5},
    "ptb_words": {"steps": 7, "embedding": 5},
    "random_labels": {"T": 7},
    "variable_copying": {"T": 7},
    "yelp5": {"reviews": 60, "words": 8, "steps": 9, "embedding": 5},
}


def small(name, /, **options):
    return TASKS[name](**{**SMALL.get(name, {}), **options})


def frame_of(task, batch):
    """Height and width of the frames that the recurrent stack reads; empty where it reads vectors."""
    return tuple(task.encoder()(batch.x.cpu()).shape[3:])


def small_stack(task, batch, hidden, **options):
    """A new stack that reads this task: over vectors, or over frames."""
    return (unfading.ConvSTAR if frame_of(task, batch) else unfading.STAR)(task.input_size, hidden, **options)

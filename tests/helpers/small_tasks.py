"""Every task of the catalogue, at a size for tests."""

from unfading import catalogue

TASKS = catalogue.tasks()
# Options that make a task small; a task that is not named is small enough.
SMALL = {
    "adding": {"T": 10},
    "copying": {"T": 7},
    "denoising": {"T": 12},
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

"""Turkoglu et al. 2019 (STAR): figures 4 and 5, accuracy over depth."""

from unfading.papers.row import Curves
from unfading.papers.star.tables import table3, table4, table5
from unfading.report.figures.curve_figures import over_layers


def fig4() -> Curves:
    """Accuracy over depth on pixel and permuted MNIST: the numbers of Table 3."""
    return Curves(
        "STAR Fig. 4: accuracy over depth, pixel and permuted MNIST",
        "Test accuracy of networks of 1 to 16 layers, a dot a seed, a line through the means over all seeds, dashed a "
        "guess. The paper averages over those that trained; here none is left out.",
        table3(),
        over_layers,
    )


def fig5() -> Curves:
    """Accuracy over depth on TUM crops and on gestures: the numbers of Tables 4 and 5."""
    return Curves(
        "STAR Fig. 5: accuracy over depth, crops and gestures",
        "Test accuracy of networks of 1 to 16 layers, a dot a seed, a line through the means over all seeds, dashed a guess.",
        [*table4(), *table5()],
        over_layers,
    )

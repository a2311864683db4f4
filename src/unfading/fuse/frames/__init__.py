"""Compiled loops of convolutional cells: a step is cut at its convolutions into parts that work pixel by pixel."""

"""Initial weights for which gradients are even over layers and time."""

"""Measurements of gradients, states and activations."""

"""The gradient microscope: what happens to states and gradients inside a model, measured."""

"""Layers: stacks of cells with the shapes and behaviour of torch.nn's recurrent layers."""

"""Whether values can be looked at: code that branches on them must not, while a compiler or a transform runs it."""

import torch


def traced() -> bool:
    """Whether the tensors at hand are traced by torch.compile, or wrapped by a transform of torch.func."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None

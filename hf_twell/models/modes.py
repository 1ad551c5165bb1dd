"""Evaluation mode for a while."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module has the training flag that it had."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        model.train(flags[0][1])  # for those that do something then
        for module, training in flags:
            module.training = training

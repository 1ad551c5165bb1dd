"""The mark of functions whose result is a constant in a compiled graph."""

from collections.abc import Callable
from typing import TypeVar

Marked = TypeVar("Marked", bound=Callable)


def assume_constant_result(function: Marked) -> Marked:
    """As `torch.compiler.assume_constant_result`, which imports all of the compiler for it, most of a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function

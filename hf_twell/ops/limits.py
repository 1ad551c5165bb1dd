"""Numbers that the kernels and Python share, read from the kernels' own header."""

import functools
import re

import torch

from hf_twell.ops import toolchain


@torch.compiler.assume_constant_result
def limit(name: str) -> int | float:
    """A constant of kernels/shared/twell_limits.h, such as "kMaxHidden".

    Raises:
        BuildError: there are no kernel sources, hence no kernels that the limit could be of.
    """
    return _limits()[name]


@functools.cache
def _limits() -> dict[str, int | float]:
    """The header's lines `constexpr TYPE NAME = NUMBER;`. Read when first asked for: "reference" needs no kernels."""
    header = (toolchain.kernels_dir() / "shared" / "twell_limits.h").read_text(encoding="utf-8")
    constants = re.findall(r"^constexpr \w+ (\w+) = ([\d.]+);", header, re.MULTILINE)
    return {name: float(number) if "." in number else int(number) for name, number in constants}

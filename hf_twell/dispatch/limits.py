"""The numbers by which calls are decided, read from kernels/shared/twell_limits.h: C++ includes the same lines."""

import functools
import math
import re
from typing import Any

from hf_twell.dispatch.constant import assume_constant_result
from hf_twell.files.carried import carried_folder


@assume_constant_result
def limit(name: str) -> Any:
    """A constant of the header, such as `limit("kMaxHidden")`; of a table its rows, the first number being tokens."""
    return read()[name]


@functools.cache
def read() -> dict[str, int | float | tuple[tuple[float, ...], ...]]:
    """All constants and tables by their names in the header."""
    folder = carried_folder("kernels", holds="build.toml")
    header = (folder / "shared" / "twell_limits.h").read_text(encoding="utf-8")
    constants = re.findall(r"^constexpr \w+ (\w+) = (\d[\d. <]*);", header, re.MULTILINE)
    tables = re.findall(r"^constexpr \w+ (\w+)\[\] = \{\n(.*?)^\};", header, re.MULTILINE | re.DOTALL)
    return {name: _number(text) for name, text in constants} | {
        name: tuple(tuple(map(_number, row.split(","))) for row in re.findall(r"\{(.*)\}", rows))
        for name, rows in tables
    }


def _number(text: str) -> int | float:
    if text.strip() == "kMany":
        return math.inf
    value, _, shift = text.partition("<<")
    return float(value) if "." in value else int(value) << int(shift or 0)

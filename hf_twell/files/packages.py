"""How to install the packages that only some features need."""

import contextlib
import shlex
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def how_to_install(package: str) -> str:
    """`pip install` of a package and of what its feature needs besides: the first of our extras that lists it.

    The line names the packages. No package index has ours, and whoever takes its name there would be installed.
    """
    extras: dict[str, dict[str, str]] = {}
    with contextlib.suppress(metadata.PackageNotFoundError):  # a checkout that is not installed
        for needed in map(Requirement, metadata.requires("hf_twell") or []):
            extra = extras.setdefault(str(needed.marker), {})
            extra[canonicalize_name(needed.name)] = f"{needed.name}{needed.specifier}"
    of_features = (extra for marker, extra in extras.items() if marker not in ("None", 'extra == "dev"'))
    listed = (extra for extra in of_features if canonicalize_name(package) in extra)
    return f"pip install {shlex.join(next(listed, {package: package}).values())}"

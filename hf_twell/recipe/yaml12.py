"""YAML as recipes have it: 1.2's scalars, not PyYAML's 1.1, and errors in one line."""

import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_SCALARS = {  # in this order, as 1 is a float too
    "bool": r"(true|True|TRUE|false|False|FALSE)$",
    "int": r"([-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$",
    "float": r"([-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: 2e-4 is a number though it lacks a dot, 010 is ten; `no`, 1:30 and 2026-11-23 are strings.

    Digits may be grouped by underscores, as in 1_000, which 1.2 itself does not have.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag in (f"{_TAG}null", f"{_TAG}merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:  # before merge keys (<<) are resolved, whose keys may come again
            name = key.tag, str(key.value)
            if name in seen and key.tag != f"{_TAG}merge":
                raise yaml.composer.ComposerError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
            seen.add(name)
        return node

    def construct_int(self, node) -> int:
        text = self.construct_scalar(node).replace("_", "")
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)


for _name, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(_pattern), None)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_int)


def read_yaml(text: str | bytes, where: str) -> Any:
    """What the text says; a ValueError that names `where` if it is no YAML, or has a key twice."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{where} is not readable as YAML: {' '.join(str(error).split())}") from error

"""YAML as recipes have it: 1.2's scalars, not PyYAML's 1.1, and errors in one line."""

import re

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: 2e-4 is a number though it lacks a dot, 010 is ten; `no`, 1:30 and 2026-11-23 are strings.

    Digits may be grouped by underscores, as in 1_000, which 1.2 itself does not have.
    """

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:  # before merge keys (<<) are resolved, whose keys may come again
            name = key.tag, str(key.value)
            if name in seen and key.tag != _MERGE:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
            seen.add(name)
        return node

    def construct_int(self, node) -> int:
        text = self.construct_scalar(node).replace("_", "")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


_TAG = "tag:yaml.org,2002:"
_MERGE, _INT = f"{_TAG}merge", f"{_TAG}int"
_SCALARS = {  # in this order, as 1 is a float too
    "bool": (r"(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"([-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    "float": (
        r"([-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
        "-+.0123456789",
    ),
}
_REPLACED = {f"{_TAG}{name}" for name in (*_SCALARS, "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(_pattern), list(_first))
_Loader.add_constructor(_INT, _Loader.construct_int)


def read_yaml(text: str | bytes, where: str):
    """What the text says.

    Raises:
        ValueError: it is no YAML, or has a key twice; `where` names it.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{where} is not readable as YAML: {' '.join(str(error).split())}") from error

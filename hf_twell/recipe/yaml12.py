"""YAML as recipes have it: 1.2's scalars, not PyYAML's 1.1, and errors in one line."""

import re

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: 2e-4 is a number though it lacks a dot, and `no` and 2026-11-23 are strings."""


_BOOL, _DATE = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _DATE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml(text: str | bytes, where: str):
    """What the text says.

    Raises:
        ValueError: it is no YAML; `where` names it.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not readable as YAML: {' '.join(str(error).split())}") from error

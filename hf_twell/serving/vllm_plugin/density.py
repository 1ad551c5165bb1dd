"""What is known of a sparse model before it runs: vLLM's settings for us, and densities by these or its own config."""

import numbers

from hf_twell.dispatch.activity import Activity, stored_activity


def known_settings(additional_config: object) -> dict:
    """What vLLM's `additional_config` holds for us: `{"hf_twell": {"density": 0.01, "kernels": True}}`, both optional;
    a null counts as not given. A ValueError of other settings; a density is looked at by `known_densities`."""
    settings = additional_config.get("hf_twell") if isinstance(additional_config, dict) else None
    settings = {} if settings is None else settings
    if not isinstance(settings, dict) or set(settings) - {"density", "kernels"}:
        raise ValueError(
            f"additional_config['hf_twell'] is {settings!r}; it takes {{'density': 0.01}}, or a list of one a layer, "
            "and {'kernels': False}"
        )
    settings = {key: value for key, value in settings.items() if value is not None}
    if not isinstance(settings.get("kernels", True), bool):
        raise ValueError(f"additional_config['hf_twell']['kernels'] is {settings['kernels']!r}; give true or false")
    return settings


def known_densities(additional_config: object, entry: dict, layers: int) -> tuple[list[float] | None, str]:
    """Each layer's share of active neurons, and where it is from; or None, and why it is not known. What vLLM's
    `additional_config` gives, `{"hf_twell": {"density": 0.01}}` or a list of a number a layer, comes before the density
    of the checkpoint's `twell` entry, which says nothing where it has another length: layers were added or cut off
    since. A ValueError of other settings, and of what cannot be densities."""
    given, source = known_settings(additional_config).get("density"), "additional_config['hf_twell']['density']"
    if given is None:
        given, source = entry.get("density"), "the checkpoint's twell entry"
        if given is None:
            return None, "the density is not known"
        if isinstance(given, list) and len(given) != layers and all(map(_is_share, given)):
            return None, f"the density in {source} has {len(given)} values for {layers} layers"
    values = [given] * layers if isinstance(given, numbers.Real) else given
    if not isinstance(values, list | tuple) or len(values) != layers or not all(map(_is_share, values)):
        raise ValueError(f"{source} gives the density as {given!r}; give a number from 0 to 1, or a list of {layers}")
    return list(values), source


def known_activity(additional_config: object, entry: dict, layers: int) -> tuple[list[Activity] | None, str]:
    """`known_densities`, and where they are the checkpoint's the unions that it has beside them: those belong to its
    density, and would decide in place of one that is given."""
    densities, source = known_densities(additional_config, entry, layers)
    if densities is None:
        return None, source
    given = known_settings(additional_config).get("density") is not None
    return stored_activity(densities, None if given else entry.get("unions")), source


def _is_share(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= value <= 1  # type: ignore[operator]

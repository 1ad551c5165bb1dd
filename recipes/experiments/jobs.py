"""What is tried: named jobs, each a dict of settings (training.DEFAULTS has the rest)."""

import json

MILLION = 1_000_000
_STEP = {"batch": 16_384, "micro_batch": 16}
_AT_TEN = {"target": 0.1, "tokens": 8 * MILLION, "ce": 0.5, "kl": 0.5, **_STEP}
_TAUGHT = {"ce": 0.0, "kl": 1.0, "start_from": "control", "teacher": "control", "micro_batch": 8}

PRESETS = {
    "parent": {"activation": "silu", "tokens": 0, "kl": 0.0, "save": False},
    "control": {"activation": "silu", "tokens": 20 * MILLION, "ce": 1.0, "kl": 0.0},
    "swap8": {"tokens": 8 * MILLION, "ce": 0.5, "kl": 0.5, **_STEP},
    "base": _AT_TEN,
    "ce": {**_AT_TEN, "ce": 1.0, "kl": 0.0},
    "kd": {**_AT_TEN, "ce": 0.0, "kl": 1.0},
    "b64": {**_AT_TEN, "batch": 65_536, "micro_batch": 32},
    "b32": {**_AT_TEN, "batch": 32_768},
    "b8": {**_AT_TEN, "batch": 8192, "micro_batch": 8},
    "muon1e3": {**_AT_TEN, "muon": True, "lr": 1e-3},
    "fixed": {**_AT_TEN, "controller": {"max_change": 0.03}},
    "l1": {**_AT_TEN, "penalty": "l1"},
    "sigc": {**_AT_TEN, "penalty": "sigmoid_count"},
    "hinge": {**_AT_TEN, "penalty": "hinge"},
    "hid": {**_AT_TEN, "hidden": 1.0},
    "local": {**_AT_TEN, "local_tokens": 2 * MILLION, "tokens": 6 * MILLION},
    "muon": {**_AT_TEN, "muon": True},
    "lr1e3": {**_AT_TEN, "lr": 1e-3},
    "bias": {**_AT_TEN, "bias": "fit"},
    "on64": {**_AT_TEN, "always_on": {"neurons": 64}},
    "on128": {**_AT_TEN, "always_on": {"neurons": 128}},
    "onswap": {"tokens": 8 * MILLION, "ce": 0.5, "kl": 0.5, **_STEP, "always_on": {"neurons": 128}},
    "on0": {"tokens": 0, "always_on": {"neurons": 128}},  # what the closed form alone gives
    "fade": {**_AT_TEN, "fade": {"kind": "mix", "end": 0.4}},
    "sharpen": {**_AT_TEN, "fade": {"kind": "sharpen", "end": 0.4}},
    "hold": {**_AT_TEN, "path": [0.0, 0.4]},
    "perlayer": {**_AT_TEN, "per_layer": "natural"},
    "sample8": {"kind": "sample", "tokens": 8 * MILLION, "batch": 1024},
    "self": {**_AT_TEN, "self_text": {"from": "sample8", "ratio": 0.5}},
    "wsd": {**_AT_TEN, "schedule": "wsd", "path": [0.0, 0.6]},
    "ema": {**_AT_TEN, "ema": 0.95},
    "count": {**_AT_TEN, **_TAUGHT, "penalty": "active_count", "lr": 2e-3},
    "fromcontrol": {**_AT_TEN, **_TAUGHT},
}


def find_job(text: str) -> dict:
    """A preset's name, or JSON of settings with "name" and, to start from one, "preset"."""
    job = json.loads(text) if text.startswith("{") else {"name": text, "preset": text}
    preset = job.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise SystemExit(f"no preset {preset!r}: {', '.join(PRESETS)}")
    if not job.get("name"):
        raise SystemExit(f"a job needs a name: {text}")
    return {**PRESETS.get(preset, {}), **job}

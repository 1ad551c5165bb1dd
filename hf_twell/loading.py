"""A causal language model from a folder or the Hub, whoever wrote it: checked first, and never by its own code."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hf_twell.custom_models import reference_class
from hf_twell.weight_files import check_finite, check_sizes, tensor_shapes, weight_files


def load_causal_lm(path: str | Path, *, dtype=None, device: str | torch.device = "cpu", **hub):
    """Load in the checkpoint's dtype, or in `dtype`; checkpoints of the paper's authors come as stock sparse models.

    Args:
        hub: `revision`, `token`, `cache_dir` and the like, for a Hub name.

    Raises:
        ValueError, OSError: no model, pickled, missing, mis-shaped or non-finite weights, or code of its own needed.
    """
    path = str(path)
    if Path(path).is_dir() and not Path(path, "config.json").is_file():
        raise ValueError("the folder has no config.json")
    raw, _ = PreTrainedConfig.get_config_dict(path, **hub)
    cls = reference_class(raw.get("model_type"))
    if cls is not None:
        return cls.from_pretrained(path, dtype=dtype or "auto", **hub).to(device)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False, **hub)
    check_sizes(path, config, tensor_shapes(weight_files(path, **hub)))
    options = {"dtype": dtype or "auto", "use_safetensors": True, "trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(path, **options, **hub)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        # Transformers has logged a table of the tensors; its message only points there.
        raise ValueError("tensors do not have the shapes that config.json gives them (see the table above)") from error
    check_finite(path, model)
    return model.to(device)

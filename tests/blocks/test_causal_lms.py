"""Every causal language model of Transformers with a name that we name: it converts exactly, or is refused by name.

docs/architectures.md says which; the page is compared with what happens here.
"""

import re

import pytest
import torch
import transformers as tf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_twell.blocks.architectures import find_ffns, has_own_type
from hf_twell.convert.sparsify import sparsify
from tests.blocks.test_architectures import (
    CONVERTIBLE,
    QWEN_VISION,
    REFUSED,
    VISION,
    assert_converts_exactly,
    build,
    config_of,
)
from tests.paths import ROOT

NAMED = (
    *("llama", "qwen", "mistral", "ministral", "gemma", "phi", "glm", "olmo", "granite", "smollm", "falcon", "exaone"),
    *("cohere", "ernie", "hunyuan", "deepseek", "mixtral", "afmoe", "dots1", "flex_olmo", "minimax_m2"),
)
UNTRIED = {
    "gemma4_assistant": "it drafts tokens from another model's states, and is no model by itself",
    "gemma4_unified_assistant": "as gemma4_assistant",
}
TYPES = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name.startswith(NAMED) and name not in UNTRIED]

LATENT = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GEMMA3N = {"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]}
OF_TYPE = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), LATENT),
    "dots1": {"n_shared_experts": 1},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
    "gemma3": {"vision_config": VISION, "mm_tokens_per_image": 4},
    # As in released ones, whose first ten layers are sparse by themselves.
    "gemma3n": {"text_config": config_of(tf.Gemma3nTextConfig, **GEMMA3N)},
    "gemma3n_text": GEMMA3N,
    "granitemoehybrid": {"mamba_n_heads": 8},
    "qwen3_5": {"vision_config": QWEN_VISION},
}
# What the page says of a row of refused ones, and the error.
REASONS = {
    "mixtures of experts of another form": "is a mixture of experts of another form",
    "more in the block": r"more (of an expert )?than down\(relu\(gate\) \* up\)",
    "blocks of another form": "0 feed-forward blocks of a known form",
    "the activation under a name of its own": "names no activation",
    "the same activation setting also means layers outside": "lies outside the feed-forward blocks",
    "blocks of the same form in parts that see or hear": "feed-forward blocks of a known form",
}


def model_of(model_type: str) -> tuple[type, object]:
    model_class = getattr(tf, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    cls = tf.CONFIG_MAPPING[model_type]
    text_alone = cls.sub_configs.get("text_config") is model_class.config_class
    return model_class, config_of(model_class.config_class if text_alone else cls, **OF_TYPE.get(model_type, {}))


def page() -> dict[str, tuple[str, str]]:
    """(heading, first cell of its row) by `model_type`."""
    parts = re.split(r"^## ", (ROOT / "docs" / "architectures.md").read_text(), flags=re.MULTILINE)[1:]
    return {
        name: (part.partition("\n")[0], first)
        for part in parts
        for first, names in re.findall(r"^\| (.*) \| (.*) \|$", part, re.MULTILINE)[1:]  # after the table's head
        for name in re.findall(r"`(\w+)`", names)
    }


def convert(model_class: type, config) -> None:
    with torch.device("meta"):
        find_ffns(model_class(config))  # which refuses most of those that are refused, before they have weights
    sparsify(build(model_class, config))


@pytest.mark.parametrize("model_type", TYPES)
def test_converts_exactly_or_is_refused_as_the_page_says(model_type):
    if model_type == "gemma3n":
        pytest.importorskip("timm")  # which its eyes are of
    heading, row = page()[model_type]
    model_class, config = model_of(model_type)
    if heading.startswith("Refused"):
        reason = next(words for start, words in REASONS.items() if row.startswith(start))
        with pytest.raises(ValueError, match=reason):
            convert(model_class, config)
        return

    model = assert_converts_exactly(model_class, config)
    assert heading == ("Converted as a model of our own type" if has_own_type(model.config) else "Converted")


def test_the_page_lists_what_was_tried():
    listed = page()
    others = {config().model_type for _, config in CONVERTIBLE.values()}
    refused = {config().model_type for _, config, _ in REFUSED.values()} - others
    assert listed.keys() == others | refused | set(TYPES)
    for name in listed.keys() - set(TYPES):  # which are compared above
        assert listed[name][0].startswith("Converted") == (name in others), name

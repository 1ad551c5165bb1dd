"""Tiny mixtures of experts of Transformers' own classes, random and dense, and the same with ReLU put in by hand."""

import copy

import torch
import transformers as tf
from torch import nn

from hf_twell.blocks.architectures import find_ffns
from tests.conftest import TINY

TEXT = {**TINY, "intermediate_size": 40, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {**ROUTED, "shared_expert_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
NEXT = {**LINEAR, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4}
LLAMA4 = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
LLAMA4 |= {"num_hidden_layers": 4, "head_dim": 8}
DOTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
DOTS |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}

MIXTURES = {
    "mixtral": (tf.MixtralForCausalLM, lambda: tf.MixtralConfig(**TEXT, num_local_experts=6)),
    "olmoe": (tf.OlmoeForCausalLM, lambda: tf.OlmoeConfig(**TEXT, num_experts=6, num_experts_per_tok=2)),
    # Its first layer is dense, and of another width.
    "qwen3_moe": (tf.Qwen3MoeForCausalLM, lambda: tf.Qwen3MoeConfig(**TEXT, **ROUTED, head_dim=8, mlp_only_layers=[0])),
    # With a shared expert.
    "qwen2_moe": (tf.Qwen2MoeForCausalLM, lambda: tf.Qwen2MoeConfig(**TEXT, **SHARED)),
    # Its experts lie transposed, and get all tokens; its first layer is dense, and of another width.
    "llama4_text": (tf.Llama4ForCausalLM, lambda: tf.Llama4TextConfig(**{**TEXT, **LLAMA4})),
    # A type of our own.
    "qwen3_next": (tf.Qwen3NextForCausalLM, lambda: tf.Qwen3NextConfig(**{**TEXT, **NEXT}, **SHARED)),
}

# Of the same form, under other types; AFMoE's and dots1's first layers are dense, and others have a shared expert.
ALIKE = {
    "afmoe": (
        tf.AfmoeForCausalLM,
        lambda: tf.AfmoeConfig(**TEXT, **ROUTED, head_dim=8, num_dense_layers=1, num_shared_experts=1),
    ),
    "dots1": (tf.Dots1ForCausalLM, lambda: tf.Dots1Config(**TEXT, **DOTS)),
    "flex_olmo": (tf.FlexOlmoForCausalLM, lambda: tf.FlexOlmoConfig(**TEXT, num_experts=6, num_experts_per_tok=2)),
    "minimax_m2": (
        tf.MiniMaxM2ForCausalLM,
        lambda: tf.MiniMaxM2Config(**TEXT, num_local_experts=6, num_experts_per_tok=2, head_dim=8),
    ),
    # Its config has no `intermediate_size`.
    "qwen3_5_moe_text": (
        tf.Qwen3_5MoeForCausalLM,
        lambda: tf.Qwen3_5MoeTextConfig(
            **{key: value for key, value in (TEXT | NEXT | SHARED).items() if key != "intermediate_size"}
        ),
    ),
}
# One that sees, of which no causal language model holds the text part alone.
VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
SEEING = {
    "qwen3_vl_moe": (
        tf.Qwen3VLMoeForConditionalGeneration,
        lambda: tf.Qwen3VLMoeConfig(text_config={**TEXT, **ROUTED, "head_dim": 8}, vision_config=VISION),
    )
}


def mixture(name: str = "olmoe") -> nn.Module:
    torch.manual_seed(0)
    cls, config = (MIXTURES | ALIKE | SEEING)[name]
    return cls(config()).eval()


def by_hand(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for site in find_ffns(twin):
        setattr(site.module, site.form.activation, nn.ReLU())
    return twin

"""GGUF files of small models, as llama.cpp's convert_hf_to_gguf.py writes them."""

import json
from pathlib import Path

import gguf
import torch


def write_gguf(path, model, tokenizer=None, *, kind="F32", tensors=None, change=None) -> Path:
    """Write a model, and its tokenizer of byte-level BPE.

    Args:
        kind: the type of matrices; vectors are in F32.
        tensors: further ones, or others in place of the model's (None: left out).
        change: called with the writer, to add metadata or replace it.
    """
    config, kind = model.config, gguf.GGMLQuantizationType[kind]
    architecture = config.model_type.removesuffix("_text").replace("3_5", "35").replace("_moe", "moe")
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    if architecture == "qwen35moe":  # has no dense block
        writer.add_token_list([str(token) for token in range(config.vocab_size)])
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(next(value for key, value in vars(config).items() if "norm_eps" in key))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if architecture in ("llama", "nemotron", "phi3", "stablelm"):
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    elif architecture == "gemma4":
        writer.add_key_length(config.per_layer_config[-1].head_dim)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    elif "head_dim" in vars(config):
        writer.add_key_length(head_dim)
    if architecture in ("gemma2", "gemma3", "gemma4", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture.startswith("qwen35"):
        add_linear_attention(writer, config)
    if architecture.endswith("moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    weights = {}
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if architecture == "llama" and heads:  # the halves of a head, which Llama rotates, become pairs
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
        adds_1 = architecture in ("gemma2", "gemma3", "nemotron")
        adds_1 |= architecture.startswith("qwen35") and "linear_attn" not in name
        if adds_1 and name.endswith("norm.weight"):  # which the model adds 1 to
            weight = weight + 1
        if ".linear_attn." in name:
            name, weight = as_tiles(name, weight, config)
        if name.endswith("experts.gate_up_proj"):
            weights |= {
                f"{names.get_name(name.replace('gate_up', part))}.weight": half
                for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True)
            }
        elif name.endswith(("experts.down_proj", "layer_scalar")):
            weights[f"{names.get_name(name)}.weight"] = weight
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            weight = weight[0] if name.endswith("shared_expert_gate.weight") else weight
            weights[names.get_name(name, (".weight", ".bias"))] = weight
    for name, weight in {**weights, **(tensors or {})}.items():
        if weight is not None:
            its = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(weight.float().numpy(), its), raw_dtype=its)
    if change:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_linear_attention(writer, config) -> None:
    """The sizes of Qwen3.5's linear attention, of which each layer but every n-th is, and of its rotary embedding."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    writer.add_rope_dimension_count(int(config.rope_parameters["partial_rotary_factor"] * config.head_dim))
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])


def as_tiles(name, weight, config):
    """A tensor of linear attention: of the values' heads the first of each group come first, then the second ones."""
    groups = config.linear_num_key_heads
    keys = 2 * groups * config.linear_key_head_dim

    def tiled(rows):
        grouped = rows.unflatten(0, (groups, config.linear_num_value_heads // groups, -1))
        return grouped.transpose(0, 1).flatten(0, 2)

    kind = name.split(".linear_attn.")[1].removesuffix(".weight")
    if kind == "A_log":
        return name, -tiled(weight).exp()
    if kind == "dt_bias":
        return name.replace("dt_bias", "dt_proj.bias"), tiled(weight)
    if kind in ("in_proj_qkv", "conv1d"):
        weight = weight.squeeze(1)
        return name, torch.cat([weight[:keys], tiled(weight[keys:])])
    if kind == "out_proj":
        return name, tiled(weight.t()).t()
    return name, weight if kind == "norm" else tiled(weight)


def add_tokenizer(writer, tokenizer) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(True)

"""The model classes of the paper's authors, restated as far as their checkpoints and logits go.

What theirs do (SakanaAI/sparser-faster-llms, custom_models/sparse_models.py): a config class with `sparsity_*` keys and
`model_type` "llama_sparse_relu" or "qwen2_sparse_relu"; blocks put in place of the stock ones, of
`sparsity_new_intermediate_size` neurons where that is given, always ReLU whatever `hidden_act` says, with biases if
`mlp_bias`; under `sparsity_use_hybrid_kernel` gated blocks keep `down_proj.weight` as (F, D). Both classes are
registered for "auto" loading, so that saving adds `auto_map` and copies this file beside the weights.
"""

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

# Their config's own keys, at their defaults.
KEYS = {
    "sparsity_train_batch_size": 1,
    "sparsity_per_device_train_batch_size": 1,
    "sparsity_max_seq_len": 2048,
    "sparsity_tokens_until_dead": None,
    "sparsity_l1_coeff": 3e-4,
    "sparsity_start_warmup_step": None,
    "sparsity_end_warmup_step": None,
    "sparsity_new_intermediate_size": None,
    "sparsity_gated_mlp": True,
    "mlp_bias": False,
    "sparsity_reinitialize": False,
    "sparsity_do_track": True,
    "sparsity_mlp_execution_logic": "training",
    "sparsity_baseline_run": False,
    "sparsity_use_hybrid_kernel": False,
    "sparsity_l0_cutoff": -1,
    "sparsity_l0_cutoff_period": 20,
}


class SparseLlamaConfig(LlamaConfig):
    model_type = "llama_sparse_relu"

    def __init__(self, **kwargs):
        super().__init__(**{**KEYS, **kwargs})


class SparseQwen2Config(Qwen2Config):
    model_type = "qwen2_sparse_relu"

    def __init__(self, **kwargs):
        super().__init__(**{**KEYS, **kwargs})


class SparseMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gated = config.sparsity_gated_mlp
        self.by_rows = config.sparsity_use_hybrid_kernel and self.gated
        hidden = config.hidden_size
        intermediate = config.sparsity_new_intermediate_size or config.intermediate_size
        if self.gated:
            self.gate_proj = nn.Linear(hidden, intermediate, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=config.mlp_bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=config.mlp_bias)
        self.act_fn = nn.ReLU()
        if self.by_rows:
            self.down_proj.weight.data = self.down_proj.weight.data.t().contiguous()

    def forward(self, x):
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x) if self.gated else self.act_fn(self.up_proj(x))
        if not self.by_rows:
            return self.down_proj(h)
        y = h @ self.down_proj.weight
        return y if self.down_proj.bias is None else y + self.down_proj.bias


class _Sparse:
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = SparseMLP(config)


class SparseLlamaForCausalLM(_Sparse, LlamaForCausalLM):
    config_class = SparseLlamaConfig


class SparseQwen2ForCausalLM(_Sparse, Qwen2ForCausalLM):
    config_class = SparseQwen2Config


CLASSES = {"llama": (SparseLlamaForCausalLM, SparseLlamaConfig), "qwen2": (SparseQwen2ForCausalLM, SparseQwen2Config)}
for _model, _config in CLASSES.values():
    _config.register_for_auto_class()
    _model.register_for_auto_class("AutoModelForCausalLM")

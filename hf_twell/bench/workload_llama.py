"""A random Llama whose every feed-forward block sees the statistics of `workload.make_ffn`, so nothing is downloaded.

Its vocabulary is the workload: token i is embedded as the workload's token i, a text is a run of consecutive ids, and
the language-model head recites (after i comes i + 1), so generated text is workload text too. Attention and blocks add
little to the residual stream, so that every layer's normed input keeps the words, topics and heavy tokens of the first.
"""

import statistics
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_twell.bench import workload
from hf_twell.bench.progress import Report, silent
from hf_twell.bench.sharing import unions_of
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.convert.entry import record_density
from hf_twell.convert.sparsify import sparsify

ATTENTION_SHARE, FFN_SHARE = 0.04, 0.16  # of the residual stream's variance, all layers together
PROMPT_TOKENS = 16  # of a text that is decoded
CANDIDATES = 32  # texts among which those with typical L0 are decoded
TOLERANCE = 0.10  # of L0 and of distinct neurons, beyond which a speed would mean nothing


@torch.no_grad()
def make_llama(
    l0: float = 30.0,
    *,
    hidden: int = 2048,
    intermediate: int = 5632,
    layers: int = 8,
    vocabulary: int = 32768,
    heads: int | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
    report: Report = silent,
) -> tuple[PreTrainedModel, float]:
    """A sparsified Llama with `l0` active neurons a token in every block, and the workload's sharing among neighbours.

    Args:
        heads: attention heads (default: of 64 columns each). kv_heads: default: as many.
        report: told of what is being done.

    Returns:
        The model, in evaluation mode, and the workload's distinct neurons in 64 neighbouring tokens.
    """
    report("making the model")
    torch.manual_seed(seed)
    heads = heads or max(1, hidden // 64)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        # Every id is a word of the text; none ends or pads it.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).eval()
    model = sparsify(model)
    x, w_gate, _, _ = workload.make_ffn(vocabulary, hidden, intermediate, l0, dtype=dtype, device=device, seed=seed)
    model.model.embed_tokens.weight.copy_(x)
    model.lm_head.weight.copy_(x.roll(1, 0) / hidden**0.5)
    sequences = 16 if torch.device(device).type == "cuda" else 4
    text = make_text(vocabulary, sequences, 1024, seed=seed, device=device)
    distinct = workload.distinct_neurons(workload.active_neurons(x[:16384], w_gate))
    active = workload.active_neurons(x[text.flatten()], w_gate)
    same, unions = workload.distinct_neurons(active), unions_of(active, text.shape[1])
    report("calibrating the model")
    _calibrate(model, text, l0, same)
    known = {run: [share] * layers for run, share in unions.items()}
    record_density(config, sparse_ffns(model), [l0 / intermediate] * layers, known)  # by which compiled blocks go
    return model, distinct


def make_text(
    vocabulary: int,
    batch: int,
    length: int,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    starts_of_sequences: bool = True,
) -> torch.Tensor:
    """Token ids (batch, length): runs of the workload, from its sequences' dense first tokens or from anywhere."""
    g = torch.Generator().manual_seed(seed)
    step = workload.SEQUENCE if starts_of_sequences and vocabulary >= 2 * workload.SEQUENCE else 1
    starts = torch.randint(vocabulary // step, (batch, 1), generator=g) * step
    return ((starts + torch.arange(length)) % vocabulary).to(device)


def _calibrate(model, text, l0, distinct) -> None:
    """One forward pass; every block sets its weights when its first input arrives, so later ones see the final ones."""
    layers = model.model.layers
    residual = model.model.embed_tokens.weight.float().square().mean().sqrt().item()
    hooks = []
    for layer in layers:
        layer.mlp.twell.backend = "reference"
        for module, linear, share in (
            (layer.self_attn, layer.self_attn.o_proj, ATTENTION_SHARE),
            (layer.mlp, layer.mlp.down_proj, FFN_SHARE),
        ):
            # Nothing writes to the two coordinates that carry the thresholds' constant and the tokens' density.
            linear.weight[:2] = 0
            hooks.append(module.register_forward_hook(_scaler(linear, residual * (share / len(layers)) ** 0.5)))
        hooks.append(layer.mlp.register_forward_pre_hook(lambda block, args: _set_gates(block, args[0], l0, distinct)))
    model.model(text, use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        layer.mlp.twell.backend = "auto"


def _scaler(linear, rms):
    """A hook that gives a module's output this root mean square, by scaling its last linear."""

    def scale(module, args, output):
        value = output[0] if isinstance(output, tuple) else output
        factor = rms / value.float().square().mean().sqrt().clamp_min(1e-20)
        linear.weight.mul_(factor)
        value = (value * factor).to(value.dtype)
        return (value, *output[1:]) if isinstance(output, tuple) else value

    return scale


def _set_gates(block, x, l0, distinct) -> None:
    """Thresholds for `l0` active neurons a token, spread so that 64 neighbours use `distinct` different ones."""
    x_TD, weight = x.flatten(0, 1).float(), block.gate_proj.weight
    constant = x_TD[:, 0].mean()
    weight.copy_(torch.randn(weight.shape, device=weight.device) / weight.shape[1] ** 0.5)
    weight[:, 0], weight[:, 1] = 0, 1
    # The norm has divided each token by its own size, the constant too; compare with thresholds as if it had not.
    gate_TF = (x_TD @ weight.float().t()) * (constant / x_TD[:, :1])
    direction = torch.randn(len(weight), device=weight.device) * constant / 8
    low, spread, high = 0.0, workload.THRESHOLD_SPREAD, 4 * workload.THRESHOLD_SPREAD
    for _ in range(8):
        shifted = gate_TF - spread * direction
        threshold = workload.threshold_for(shifted, l0)
        seen = workload.distinct_neurons(shifted > threshold)
        if abs(seen - distinct) <= 0.015 * distinct:
            break
        # The more the neurons' rates differ, the more often tokens use the same ones.
        low, high = (spread, high) if seen > distinct else (low, spread)
        spread = (low + high) / 2
    weight[:, 0] = (-(spread * direction + threshold) / constant).to(weight.dtype)


@torch.no_grad()
def layer_statistics(model: PreTrainedModel, text: torch.Tensor, counted: slice = slice(None)) -> list[dict]:
    """What each block sees on a text (batch, length), at the `counted` positions.

    L0; distinct neurons in 64 neighbours, and in one position of all texts; and each text's L0.
    """
    seen = []

    def count(block, args):
        x_TD = args[0][:, counted].flatten(0, 1)
        active = workload.active_neurons(x_TD, block.gate_proj.weight)
        each = active.view(len(text), -1, active.shape[1])
        seen.append(
            {
                "l0": active.sum(1).double().mean().item(),
                "distinct_64": workload.distinct_neurons(active),
                "distinct_step": each.any(0).sum(1).double().mean().item(),
                "sequence_l0": each.sum(2).double().mean(1),
            }
        )

    hooks = [layer.mlp.register_forward_pre_hook(count) for layer in model.model.layers]
    try:
        model.model(text, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def check_layers(layers: Sequence[dict], l0: float, distinct: float) -> None:
    """Refuse, by a ValueError that names the layer, blocks whose L0 or distinct neurons in 64 tokens are over 10 % from
    the workload's."""
    for index, layer in enumerate(layers):
        for name, key, wanted in (("active neurons a token", "l0", l0), ("distinct in 64", "distinct_64", distinct)):
            if not abs(layer[key] - wanted) <= TOLERANCE * wanted:
                raise ValueError(
                    f"layer {index} has {layer[key]:.4g} {name} where the workload has {wanted:.4g}; with over "
                    f"{TOLERANCE:.0%} more or less its speed would mean nothing, so none is measured. Take a larger "
                    "vocabulary or model, or another seed."
                )


def typical_texts(model: PreTrainedModel, batch: int, length: int, l0: float) -> tuple[torch.Tensor, dict]:
    """Texts from anywhere in the workload whose mean L0 after the prompt is as near to `l0` as chance allows; a
    ValueError where that is over 10 % away."""
    sizes = model.config.vocab_size, max(CANDIDATES, batch), length
    texts = make_text(*sizes, seed=3, device=model.device, starts_of_sequences=False)
    each = torch.stack([s["sequence_l0"] for s in layer_statistics(model, texts, slice(PROMPT_TOKENS, None))]).mean(0)
    order = each.argsort()
    means = each[order].unfold(0, batch, 1).mean(1)
    start = (means - l0).abs().argmin().item()
    text = texts[order[start : start + batch]]
    layers = layer_statistics(model, text, slice(PROMPT_TOKENS, None))
    mean = {key: statistics.mean(layer[key] for layer in layers) for key in ("l0", "distinct_step")}
    if not abs(mean["l0"] - l0) <= TOLERANCE * l0:
        raise ValueError(
            f"the decoded tokens have {mean['l0']:.4g} active neurons where {l0:g} were asked for; decode more tokens "
            "(--new-tokens) or a larger batch."
        )
    return text, {"decoded_l0": round(mean["l0"], 2), "decoded_distinct_in_batch": round(mean["distinct_step"], 1)}

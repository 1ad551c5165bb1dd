"""Benchmark inputs with the statistics of really sparse models.

Random weights with random tokens are half active, and thinned out evenly they make neighbouring tokens share nothing.
In sparse models, neurons fire at very unequal rates, neighbouring tokens share neurons, and some tokens, the first ones
of a sequence above all, are many times denser than the median. `make_ffn` builds that in at any mean L0, and at a
wanted share of neurons in the union of neighbouring tokens (`hf_twell.bench.sharing`).
"""

import functools
from collections.abc import Mapping

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_twell.bench.sharing import SHORTEST_SPAN, TOKENWISE, Sharing, fit
from hf_twell.blocks.architectures import FORMS
from hf_twell.blocks.modeling import FfnSettings, FfnState, sparse_class

SEQUENCE = 1024  # tokens; the first ones of each are dense
VOCABULARY = 4096
FIT_TOKENS = 4096  # whose unions are fitted, at most
THRESHOLD_SPREAD, DENSITY_SPREAD = 0.45, 0.28


@torch.no_grad()
def make_ffn(
    tokens: int,
    hidden: int = 2048,
    intermediate: int = 5632,
    l0: float = 30.0,
    *,
    unions: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> tuple[torch.Tensor, ...]:
    """x (T, D), w_gate (F, D), w_up (F, D), w_down (D, F) with `l0` active neurons a token on average.

    The first coordinate of x is constant, so that a gate weight on it is a threshold; the second raises all neurons of
    a token at once.

    Args:
        unions: share of the F neurons that are active in at least one of "16", "64" and "128" neighbouring tokens, or
            of "64" alone; by default, neighbours share what they do in models that were made sparse token by token.

    Raises:
        ValueError: unions that no inputs of this L0 have.
    """
    g = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, device=device)

    frequency = 1.0 / torch.arange(1, VOCABULARY + 1, device=device, dtype=torch.float32)
    words = torch.multinomial(frequency, tokens, replacement=True, generator=g)
    table_VD = randn(VOCABULARY, hidden)
    topics_KD = randn(tokens // SHORTEST_SPAN + 2 if unions else -(-tokens // TOKENWISE.span), hidden)
    own_TD = randn(tokens, hidden)
    place = torch.arange(tokens, device=device) % SEQUENCE
    raised_T = DENSITY_SPREAD * randn(tokens) + 1.1 * torch.exp(-place / 6.0)

    w_gate, w_up = randn(intermediate, hidden) / hidden**0.5, randn(intermediate, hidden) / hidden**0.5
    w_down = randn(hidden, intermediate) / intermediate**0.5
    w_gate[:, :2] = 0.0
    spread = THRESHOLD_SPREAD * randn(intermediate)
    sharing = TOKENWISE
    if unions:
        words_TF, own_TF = (table_VD @ w_gate.T)[words[:FIT_TOKENS]], own_TD[:FIT_TOKENS] @ w_gate.T
        topics_KF = topics_KD @ w_gate.T

        def gates(sharing: Sharing) -> torch.Tensor:
            mixed = sharing.mix(words_TF, topics_KF, own_TF).add_(raised_T[:FIT_TOKENS, None])
            return mixed.sub_(spread, alpha=sharing.uneven)

        sharing = fit(unions, gates, l0 / intermediate)
        del words_TF, own_TF, topics_KF
        spread *= sharing.uneven
    x = sharing.mix(table_VD[words], topics_KD, own_TD)
    x[:, 0], x[:, 1] = 8.0, raised_T
    w_gate[:, 1] = 1.0
    w_gate[:, 0] = -(spread + threshold_for(x[:8192] @ w_gate.T - spread, l0)) / 8.0
    return tuple(t.to(dtype).contiguous() for t in (x, w_gate, w_up, w_down))


def threshold_for(gate_TF: torch.Tensor, l0: float) -> float:
    """The value that `l0` neurons of a token exceed on average."""
    low, high = gate_TF.min().item() - 1, gate_TF.max().item() + 1
    for _ in range(24):
        middle = (low + high) / 2
        # Per token in 32 bits, which is several times as fast on a CPU.
        if (gate_TF > middle).sum(1, dtype=torch.int32).sum() > l0 * len(gate_TF):
            low = middle
        else:
            high = middle
    return (low + high) / 2


@torch.no_grad()
def active_neurons(x_TD: torch.Tensor, w_gate: torch.Tensor, chunk: int = 4096) -> torch.Tensor:
    """Which gates are positive, computed in fp32: (T, F) bool."""
    gate = w_gate.float().t()
    return torch.cat([part.float() @ gate > 0 for part in x_TD.split(chunk)])


def distinct_neurons(active_TF: torch.Tensor, run: int = 64) -> float:
    """Neurons active in at least one of `run` consecutive tokens (or all, if fewer), averaged over runs."""
    run = min(run, len(active_TF))
    runs = len(active_TF) // run
    return active_TF[: runs * run].view(runs, run, -1).any(1).sum(1).double().mean().item()


def patched_block(w_gate: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> torch.nn.Module:
    """A patched Llama feed-forward block in evaluation mode that holds these very weights."""
    intermediate, hidden = w_gate.shape
    with torch.device("meta"):
        block = LlamaMLP(_block_config(hidden, intermediate)).eval()
    for name, weight in (("gate_proj", w_gate), ("up_proj", w_up), ("down_proj", w_down)):
        getattr(block, name).weight = torch.nn.Parameter(weight, requires_grad=False)
    block.__class__ = sparse_class(LlamaMLP)
    block.twell, block.twell_state = FfnSettings("block", layer=0, form=FORMS[0], backend="auto"), FfnState()
    return block


@functools.cache  # a small block's thousands of cold copies would take longer to configure than to measure
def _block_config(hidden: int, intermediate: int) -> LlamaConfig:
    # Heads do not matter here, but a config refuses sizes that do not fit D.
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
    return LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, head_dim=64, hidden_act="relu")

"""The block as one operator that vLLM's compiler does not look into.

vLLM traces a model once for all numbers of tokens, so what depends on them is asked in here: when a CUDA graph is
captured, or in each call.
"""

import torch
from torch import library
from torch.nn.functional import linear

from hf_twell.dispatch.activity import Activity
from hf_twell.dispatch.choose import choose
from hf_twell.dispatch.key import key_of
from hf_twell.ops import api, reference


def _ffn(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, density: float, union: float | None, asked: bool = False
) -> torch.Tensor:
    """ReLU feed-forward block, by kernels where these are faster at the given activity, else by plain matmuls.

    Formula: y = (relu(x Wg^T) * (x Wu^T)) Wd^T, with [Wg; Wu] = gate_up.

    Shapes:
        x (..., D); gate_up (2F, D); down (D, F), best by columns; returns (..., D).
    """
    gate, up = gate_up.chunk(2)
    key = key_of(x, up, down, asked=asked, rival="vllm")
    way = choose(key, Activity(density, union=union))
    if way == "kernels":
        return api.ffn(x, up, down, gate, key=key, way=way)
    if way == "plain":
        return reference.ffn(x, up, down, gate)
    if x.is_cpu:
        return api.dense_ffn(x, up, down, gate)
    # As vLLM does, one matmul for both: few tokens feel a second one. One kernel reads the halves where they lie.
    halves = linear(x, gate_up).chunk(2, -1)
    return linear(torch.ops.hf_twell.activation(*halves, None, None, None), down)


# Not library.custom_op: its calls take longer, and a small block on a CPU feels it.
library.define(
    "hf_twell_vllm::ffn",
    "(Tensor x, Tensor gate_up, Tensor down, float density, float? union, bool asked=False) -> Tensor",
)
library.impl("hf_twell_vllm::ffn", "CompositeExplicitAutograd", _ffn)
library.register_fake("hf_twell_vllm::ffn", lambda x, *_: x.new_empty(x.shape))

"""What `hf-twell bench ffn --experts` measures: a layer of routed experts against Transformers' own implementations."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_twell.bench import workload
from hf_twell.bench.check import check_block
from hf_twell.bench.environment import DTYPES, environment
from hf_twell.bench.progress import Report, silent
from hf_twell.bench.timing import interleaved_ms
from hf_twell.bench.wanted import Wanted
from hf_twell.blocks.architectures import EXPERTS
from hf_twell.blocks.experts import SparseExperts
from hf_twell.blocks.modeling import FfnSettings, FfnState, sparse_class
from hf_twell.ops import api, reference

ROUTINGS = 8  # that take turns, so that a call of few tokens finds other experts than the last ones did
FIRST = 64  # tokens that are left out: a sequence's first ones are denser
BATCHED_TOKENS = 8  # up to so many tokens; batched_mm copies the weights of every pair


@torch.inference_mode()
def bench_experts(
    tokens: Sequence[int],
    activities: Sequence[Wanted],
    *,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    dtype: str = "bfloat16",
    device: str = "cpu",
    backend: str = "auto",
    repeats: int | None = None,
    report: Report = silent,
) -> Iterator[dict]:
    """One row for each number of tokens and density: times of stock and sparse experts, and the error of the sparse.

    Weights are random, and each token goes through `top_k` experts drawn evenly; a trained router is less even, so that
    its tokens meet fewer experts. One call at a time; another routing each time.

    Args:
        activities: the density among the neurons of a token's own experts; no unions.
        intermediate: F of one expert.
        backend: the sparse block's; "cuda" takes its kernels whatever the density is.

    Raises:
        ValueError: a result less accurate than twice eager PyTorch's; no speed is given then.
    """
    where, kind = torch.device(device), DTYPES[dtype]
    for asked in activities:
        report("making the workload")
        neurons = experts * intermediate
        pool, gate, up, down = workload.make_ffn(
            max(tokens) + FIRST, hidden, neurons, asked.density * neurons, dtype=kind, device=where
        )
        gate_up = torch.cat([gate.view(experts, -1, hidden), up.view(experts, -1, hidden)], dim=1)
        down = down.view(hidden, experts, -1).transpose(0, 1).contiguous()
        del gate, up
        stock, sparse = _block(gate_up, down, top_k), _block(gate_up, down.clone(), top_k)
        sparse.__class__ = sparse_class(Qwen3MoeExperts, SparseExperts)
        sparse.twell, sparse.twell_state = FfnSettings("experts", 0, EXPERTS, backend), FfnState()
        for count in tokens:
            x = pool[FIRST : FIRST + count]
            yield _measure(stock, sparse, x, top_k, asked, repeats, report) | environment(where)


def _block(gate_up: torch.Tensor, down: torch.Tensor, top_k: int) -> Any:
    experts, hidden, width = down.shape
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "num_experts": experts, "hidden_act": "relu"}
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=top_k)
    with torch.device("meta"):
        block = Qwen3MoeExperts(config).eval()
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
        setattr(block, name, torch.nn.Parameter(weight, requires_grad=False))
    block.config._experts_implementation = "grouped_mm"
    return block


def _measure(stock, sparse, x, top_k, asked, repeats, report) -> dict:
    experts, hidden, width = stock.down_proj.shape
    g = torch.Generator().manual_seed(1)
    routings = [torch.rand(len(x), experts, generator=g).topk(top_k).indices.to(x.device) for _ in range(ROUTINGS)]
    share = torch.rand(len(x), top_k, generator=g).softmax(-1).to(x.device, x.dtype)
    names = ["grouped_mm", *(["batched_mm"] if len(x) <= BATCHED_TOKENS else []), "sparse"]
    if x.is_cuda:
        names.insert(1, "compiled")
        torch.compiler.reset()  # each number of tokens is compiled by itself
    compiled = torch.compile(stock, dynamic=False)  # when it is called

    def once(name: str, turn: int = 0) -> torch.Tensor:
        if name == "sparse":
            return sparse(x, routings[turn % ROUTINGS], share)
        stock.config._experts_implementation = "grouped_mm" if name == "compiled" else name
        return (compiled if name == "compiled" else stock)(x, routings[turn % ROUTINGS], share)

    report("checking")
    once("sparse")  # a first call looks at the density, and settles the memory order
    truth, active, union = _truth(stock, x, routings[0], share)
    outputs = {"eager": {"y": once("eager")}, **{name: {"y": once(name)} for name in names}}
    errors = check_block(outputs, {"y": truth}, x.dtype, len(x), active.item())["y"]
    calls = {name: (lambda turn, name=name: once(name, turn)) for name in names}
    times = interleaved_ms(calls, repeats or 11, x.device, head_start=True, report=report)
    l0 = active.item() / len(x)
    return {
        "bench": "ffn",
        "tokens": len(x),
        "hidden": hidden,
        "intermediate": width,
        "experts": experts,
        "top_k": top_k,
        "experts_reached": round(sum(len(each.unique()) for each in routings) / ROUTINGS, 1),
        "dtype": str(x.dtype).removeprefix("torch."),
        "requested_l0": round(asked.density * width * top_k, 3),
        "pass": "forward",
        "backend": api.resolve("auto", x.device.type),
        "l0": round(l0, 2),
        "density": round(l0 / width / top_k, 5),
        "union_of_experts": round(union, 5),
        "unions": {},
        "timed": "single calls",
        "took": "kernels" if sparse.takes_kernels(x, routings[0]) else "plain matmuls",
        "down_stored_by": "rows" if sparse.down_proj.is_contiguous() else "columns",
        "error": errors["sparse"],
        "error_eager": errors["eager"],
        **{f"{name}_ms": round(value, 5) for name, value in times.items()},
        "speedup": round(min(value for name, value in times.items() if name != "sparse") / times["sparse"], 3),
    }


def _truth(stock, x, index, share) -> tuple[torch.Tensor, torch.Tensor, float]:
    """y in fp32, or fp64 of fp32 weights, one expert's weights at a time; how many neurons are active; and the share of
    the neurons of experts with tokens that at least one of an expert's tokens activates."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    y, active = torch.zeros(x.shape, dtype=wide, device=x.device), torch.zeros((), device=x.device)
    unions = []
    for expert in index.unique().tolist():
        token, slot = (index == expert).nonzero(as_tuple=True)
        gate, up = stock.gate_up_proj[expert].to(wide).chunk(2)
        rows = x[token].to(wide)
        is_active = rows @ gate.T > 0
        active += is_active.sum()
        unions.append(is_active.any(0).float().mean())
        each = reference.ffn(rows, up, stock.down_proj[expert].to(wide), gate)
        y.index_add_(0, token, each * share[token, slot, None].to(wide))
    return y, active, torch.stack(unions).mean().item()

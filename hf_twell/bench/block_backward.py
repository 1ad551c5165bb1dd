"""What `hf-twell bench ffn --backward` measures: one block in training, L1 or count term included, correctness first.

Dense variants compute y, all gradients and the term. Ours is a patched block in training as `SparsityCallback` runs
it, so it also counts what is active, and follows its density: each of its steps sees weights of a new version, as after
an optimizer step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hf_twell.bench import workload
from hf_twell.bench.check import check_block, kernel_calls, wider_dtype
from hf_twell.bench.progress import Report
from hf_twell.bench.timing import held_mib, interleaved_ms, millijoules, peak_mib
from hf_twell.blocks.batches import runs_of
from hf_twell.blocks.modeling import L1Inputs
from hf_twell.ops import reference
from hf_twell.ops.runs import Runs

# Of dL/dh, whose elements are about 0.6 for the workload's dy: a lost L1 term must show. Exact in bf16 and fp16.
L1_SCALE = 0.125
# Of dL/da likewise, to which the term adds up to 5 times this, and N times that for the strongest token of a run of N:
# both must show. With more, errors would be mostly of tokens that are equally strong in x's dtype alone.
COUNT_SCALE = 2**-8
WARM_UP = 4  # steps until the block's path is chosen: its density is known only after a step
TENSORS = ("y", "gradient of x", "gradient of w_gate", "gradient of w_up", "gradient of w_down")


def dense(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    l1_scale: torch.Tensor | None = None,
    count_scale: torch.Tensor | None = None,
    runs: Runs | None = None,
) -> torch.Tensor:
    return reference.ffn(x, w_up, w_down, w_gate, l1_scale=l1_scale, count_scale=count_scale, runs=runs)


def measure_backward(
    variants: dict[str, Callable],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    copies: int,
    repeats: int,
    energy: bool,
    pairs: float,
    report: Report,
    term: str = "l1",
    share: int | None = None,
) -> dict:
    """Times, errors and memory of forward and backward, `.grad` None before each.

    Args:
        variants: {name: a function like `dense`}.
        x: (T, D). weights: gate, up, down. copies: so many sets of weights take turns.
        pairs: active neurons of x, over all tokens. report: told of what is being done.
        term: "l1" or "count". share: with "count", x is one sequence of runs of so many tokens, which count, too.
    """
    device = x.device
    x, grad_y = x.requires_grad_(), torch.randn_like(x)
    counts = term == "count"
    scale = torch.tensor(COUNT_SCALE if counts else L1_SCALE, device=device)
    runs = None if share is None else runs_of({"inputs_embeds": x.unsqueeze(0)}, share)
    added: dict[str, Any] = {"count_scale": scale, "runs": runs} if counts else {"l1_scale": scale}
    sets = [[weight.clone().requires_grad_() for weight in weights] for _ in range(copies)]
    blocks = [_training_block(some, scale, counts, runs) for some in sets]  # over the same memory
    names = [*variants, "sparse"]

    def forward(name, turn=0):
        if name == "sparse":
            return blocks[turn % copies](x)
        return variants[name](x, *sets[turn % copies], **added)

    def step(name, turn=0):
        forward(name, turn).backward(grad_y)

    def prepare(_name, turn=0):
        block = blocks[turn % copies]
        l1 = block.twell_state.l1
        for leaf in (x, *sets[turn % copies], l1.tally, l1.unions, *block.parameters()):
            leaf.grad = None
        for parameter in block.parameters():
            torch.autograd.graph.increment_version(parameter)  # as an optimizer step does

    def outputs(name):
        leaves = list(blocks[0].parameters()) if name == "sparse" else sets[0]
        return _with_gradients(lambda: forward(name), (x, *leaves), grad_y)

    def prepared_step(name, turn=0):
        prepare(name, turn)
        step(name, turn)

    report("checking")
    for _ in range(WARM_UP):
        prepared_step("sparse")
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what the block learns of its density has arrived
    wide = wider_dtype(x.dtype)
    wide_leaves = [tensor.detach().to(wide).requires_grad_() for tensor in (x, *weights)]
    truth = _with_gradients(lambda: dense(*wide_leaves, **added), wide_leaves, grad_y.to(wide))
    errors = check_block({name: outputs(name) for name in names}, truth, x.dtype, len(x), pairs)
    truth = wide_leaves = None  # gigabytes, which no measurement below should find
    result: dict[str, Any] = {
        "timed": "single calls",
        "took": "kernels" if kernel_calls(forward("sparse")) else "plain matmuls",
        "term": term,
        f"{term}_scale": scale.item(),
        **({"share": share} if share else {}),
        "errors": {tensor: {name: error[name] for name in ("sparse", "eager")} for tensor, error in errors.items()},
    }
    calls = {name: lambda turn, name=name: step(name, turn) for name in names}
    result["times"] = interleaved_ms(calls, repeats, device, prepare, head_start=True, report=report)
    for name in names:
        prepare(name)
        if device.type == "cuda":
            report("memory and energy", name)
            result[f"{name}_held_mib"] = held_mib(lambda name=name: forward(name), device)
            result[f"{name}_peak_mib"] = peak_mib(lambda name=name: step(name), device)
        if energy:
            millijoules_of_step = millijoules(partial(prepared_step, name), device)
            result[f"{name}_mj_per_token"] = millijoules_of_step / len(x)
    return result


def _training_block(weights, scale, counts, runs):
    gate, up, down = (weight.detach() for weight in weights)
    block = workload.patched_block(gate, up, down).train().requires_grad_()
    tally, unions = (torch.zeros(size, device=gate.device, requires_grad=True) for size in (1 + len(gate), 1))
    block.twell_state.l1 = L1Inputs(scale, None, tally, counts=counts, runs=runs, unions=unions)
    return block


def _with_gradients(forward, leaves, grad_y) -> dict:
    y = forward()
    return dict(zip(TENSORS, (y.detach(), *torch.autograd.grad(y, leaves, grad_y)), strict=True))

"""A tiny Llama trained from dense to sparse on the words of a Markov chain, by the kernels or by plain PyTorch.

Run under torchrun, it trains in every process, wrapped as its first argument says ("ddp", "fsdp2", "zero2", "zero3"),
by "kernels" or "reference", its second, and writes the curve to the file named as its third.
"""

import functools
import sys

import torch

import hf_twell
from hf_twell import L1Penalty
from hf_twell.ops import api
from tests.conftest import leave, tiny_llama

WORDS, SUCCESSORS, LENGTH = 96, 8, 64
SIZES = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 2}
WINDOW = 50
L1_WEIGHT = 0.05
LEARNING_RATE = 2e-3


def markov_batches(steps: int, batch: int, seed: int) -> torch.Tensor:
    """(steps, batch, LENGTH): each word has the same few successors, so the loss falls to log(SUCCESSORS)."""
    g = torch.Generator().manual_seed(seed)
    follow = torch.randint(1, WORDS, (WORDS, SUCCESSORS), generator=torch.Generator().manual_seed(0))
    words = [torch.randint(1, WORDS, (steps * batch,), generator=g)]
    for _ in range(LENGTH - 1):
        words.append(follow[words[-1], torch.randint(SUCCESSORS, words[-1].shape, generator=g)])
    return torch.stack(words, 1).view(steps, batch, LENGTH)


def count_kernels(train):
    """`train`, and how often a block went to the operator instead of plain linears."""

    @functools.wraps(train)
    def counted(*args, **options):
        calls, fused = [], api.ffn
        api.ffn = lambda *a, **k: calls.append(1) or fused(*a, **k)
        try:
            return {**train(*args, **options), "calls": len(calls)}
        finally:
            api.ffn = fused

    return counted


@count_kernels
def train(backend: str, *, steps: int, device="cuda", batch=8, rank=0, accelerator=None) -> dict:
    """Losses of all steps (means over ranks), and the density at the end; fp32 weights under bfloat16 autocast."""
    model = hf_twell.sparsify(tiny_llama(**SIZES, initializer_range=0.1).to(device), backend=backend).train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    penalty = L1Penalty(model, L1_WEIGHT)
    losses = []
    for step, words in enumerate(markov_batches(steps, batch, seed=1 + rank).to(device)):
        penalty.l1_weight = L1_WEIGHT * min(1.0, 2 * step / steps)
        if step == steps - WINDOW:
            penalty.report()
        for micro_batch in penalty.micro_batches([{"input_ids": words}]):
            with torch.autocast(words.device.type, torch.bfloat16, enabled=accelerator is None):
                loss = model(**micro_batch, labels=micro_batch["input_ids"], use_cache=False).loss
            loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    losses = torch.stack(losses)
    if accelerator is not None:
        losses = accelerator.reduce(losses, "mean")
    return {"loss": losses.cpu(), "density": penalty.report()["density"]}


def window_means(losses: torch.Tensor) -> torch.Tensor:
    return losses.view(-1, WINDOW).mean(1)


def new_accelerator(kind: str, batch: int):
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin

    if kind == "ddp":
        return Accelerator(mixed_precision="bf16")
    if kind == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            reshard_after_forward=True,
        )
        return Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    # Under ZeRO-3, kernels need a block's weights gathered as a whole: docs/training.md.
    plugin = DeepSpeedPlugin(zero_stage=int(kind.removeprefix("zero")), transformer_moe_cls_names="SparseLlamaMLP")
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = batch
    return Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)


def main(kind: str, name: str, output: str, steps: int, batch: int = 8) -> None:
    accelerator = new_accelerator(kind, batch)
    device, rank = accelerator.device, accelerator.process_index
    backend = device.type if name == "kernels" else name
    curve = train(backend, steps=steps, device=device, batch=batch, rank=rank, accelerator=accelerator)
    leave({**curve, "wrapped": accelerator.distributed_type.value}, output)


if __name__ == "__main__":
    main(*sys.argv[1:4], steps=int(sys.argv[4]))

"""What `hf-twell bench train` measures: whole training steps of the same Llama, dense and sparse, checked first."""

import gc
import importlib.util
import math
from collections import defaultdict

import torch
from transformers.models.llama import modeling_llama

from hf_twell.bench.check import check_training, kernel_calls
from hf_twell.bench.environment import environment
from hf_twell.bench.models import PLAIN, How, RandomLlama, best, sharing_copy, wider
from hf_twell.bench.timing import interleaved_ms, millijoules, peak_mib
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.convert.sparsify import unpatch
from hf_twell.models.attention import WITHOUT_MASK
from hf_twell.train.penalty import L1Penalty

L1_WEIGHT = 2e-4
WARM_UP = 4  # steps until every sparse block's path is chosen: its density is known only after a step


def bench_train(subject: RandomLlama, *, batch: int = 8, length: int | None = None, how: How = PLAIN) -> dict:
    """One optimizer step of one micro-batch of workload text: forward, loss, backward, AdamW, gradients set to None.

    All variants share one set of weights, gradients and optimizer states, so no variant's memory is in another's peak,
    and take turns; before each timed step comes an untimed one of the same variant. Sparse variants also have the L1
    term and count what is active, as in sparse training; dense ones do not. Compiled is the whole model with its loss,
    in torch.compile's default mode. The learning rate is 0: all the work is done, and the activity stays as it is.

    Raises:
        ValueError: blocks without the workload's statistics, a wrong loss, or gradients less accurate than twice eager
            PyTorch's error.
    """
    model, report = subject.model, how.report
    report("looking at its sparsity")
    # Nothing is padded, and a mask, which some versions make when compiled, would keep them from flash attention.
    model.set_attn_implementation(WITHOUT_MASK)
    text = subject.prompts(batch, length)
    device, dtype = text.device, str(model.dtype).removeprefix("torch.")
    model.train()
    dense = subject.dense = unpatch(sharing_copy(model))  # over the same weights
    _make_uncertain(dense, text[:1])
    description = subject.describe(text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    steps = {"eager": _Step(dense, text, optimizer), "sparse": _Step(model, text, optimizer)}
    absent = {}  # variants that cannot be measured here, and why
    if how.compile:
        torch._dynamo.reset()
        steps["compiled"] = _Step(sharing_copy(dense), text, optimizer, compiled=True)
        steps["sparse_compiled"] = _Step(sharing_copy(model), text, optimizer, compiled=True)
    if device.type != "cuda":
        absent["liger"] = "its kernels need a GPU"
    elif importlib.util.find_spec("liger_kernel") is None:
        absent["liger"] = "the package liger_kernel is not installed"
    else:
        steps["liger"] = _LigerStep(sharing_copy(dense), text, optimizer)
    checked = _check(steps, dense, text, absent, report)
    gc.collect()  # what checking has left behind is no variant's memory

    calls = {name: lambda turn, step=step: step() for name, step in steps.items()}
    times = interleaved_ms(calls, how.repeats, device, lambda name, turn: steps[name](), report=report)
    memory, joules = {}, {}
    for name, step in steps.items():
        if device.type == "cuda":
            report("memory and energy", name)
            # Weights and optimizer states, which every variant has.
            memory["resident_mib"] = round(torch.cuda.memory_allocated(device) / 2**20, 2)
            memory[f"{name}_peak_mib"] = round(memory["resident_mib"] + peak_mib(step, device), 2)
        if how.energy:
            joules[f"{name}_mj_per_token"] = millijoules(calls[name], device) / text.numel()
    if memory:
        ours, theirs = best({name: memory[f"{name}_peak_mib"] for name in steps})
        memory["peak_share"] = round(ours / theirs, 4)
    ours, theirs = best(times)
    subject.statistics(text)  # which training, too, has left as they were
    return {
        "bench": "train",
        "batch": batch,
        "length": text.shape[1],
        **description,
        "optimizer": f"AdamW, fused, states in {dtype}, learning rate 0",
        "l1_weight": L1_WEIGHT,
        **checked,
        **{f"{name}_ms": round(value, 3) for name, value in times.items()},
        **{f"{name}_tokens_per_s": round(text.numel() / value * 1e3, 1) for name, value in times.items()},
        "speedup": round(theirs / ours, 3),
        **memory,
        **joules,
        "absent": absent,
        **environment(device),
    }


class _Step:
    """One variant's training step."""

    def __init__(self, model, text, optimizer, compiled=False) -> None:
        self.model, self.optimizer, self.compiled = model, optimizer, compiled
        self.batch = {"input_ids": text, "labels": text}
        # Without weight until its gradients have been compared with those of dense variants.
        self.penalty = L1Penalty(model, 0.0) if sparse_ffns(model) else None

    def __call__(self) -> None:
        self.gradients()
        self.optimizer.step()
        self.clear()

    def gradients(self):
        """Forward and backward; returns the loss."""
        if self.penalty is None:
            loss = self.forward()
            loss.backward()
            return loss.detach()
        for _ in self.penalty.micro_batches([self.batch]):
            loss = self.forward()
            loss.backward()
        return loss.detach()

    def forward(self):
        return self.model(**self.batch, use_cache=False).loss

    def clear(self):
        self.optimizer.zero_grad(set_to_none=True)

    def warm_up(self) -> None:
        """Steps until sparse blocks have chosen their paths; those of a compiled model choose anew, together."""
        device = self.batch["input_ids"].device
        for _ in range(WARM_UP if self.penalty else 0):
            self()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # what the blocks learn of their density has arrived
        self.layers_on_kernels = kernel_calls(self.forward()) if self.penalty else 0
        if not self.compiled:
            return
        self.model.compile(dynamic=False)
        for _ in range(WARM_UP if self.penalty else 0):
            self()
        ways = [ffn.twell_state.on_kernels for ffn in sparse_ffns(self.model)]
        self.layers_on_kernels = self.layers_on_kernels if None in ways else sum(ways)


class _LigerStep(_Step):
    """The dense model with Liger's norm, rotary embedding and loss; its SwiGLU computes SiLU, so that stays out."""

    def warm_up(self):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        stock = {name: getattr(modeling_llama, name) for name in ("apply_rotary_pos_emb", "LlamaRMSNorm")}
        apply_liger_kernel_to_llama(model=self.model, swiglu=False)
        self.rotary = modeling_llama.apply_rotary_pos_emb
        # The other variants share this module.
        for name, value in stock.items():
            setattr(modeling_llama, name, value)

    def forward(self):
        stock, modeling_llama.apply_rotary_pos_emb = modeling_llama.apply_rotary_pos_emb, self.rotary
        try:
            return super().forward()
        finally:
            modeling_llama.apply_rotary_pos_emb = stock


def _check(steps: dict[str, _Step], dense, text, absent, report) -> dict:
    """Warm up all variants and compare their losses and gradients; those that do not run here move to `absent`."""
    report("checking: in higher precision")
    loss, truth = _wide_gradients(dense, text)
    losses, errors = {}, {}
    for name, step in list(steps.items()):
        report(f"checking: {name}")
        try:
            step.warm_up()
            losses[name] = step.gradients().item()
            errors[name] = _gradient_errors(step.model, truth)
        except Exception as error:  # a compiler or Liger that does not take this model: the others go on
            if name in ("eager", "sparse"):
                raise
            absent[name] = f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"
            losses.pop(name, None)
            del steps[name]
        step.clear()
        if step.penalty is not None:
            step.penalty.l1_weight = L1_WEIGHT
    check_training(losses, errors, loss, dense.dtype)
    return {
        **{f"{name}_layers_on_kernels": step.layers_on_kernels for name, step in steps.items() if step.penalty},
        "loss": loss,
        **{f"loss_{name}": value for name, value in losses.items()},
        "gradient_errors": errors,
    }


def _wide_gradients(dense, text) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in higher precision, of one sequence after another and kept on the CPU, for they are large."""
    model = wider(dense)
    losses = []
    for sequence in text.split(1):
        loss = model(input_ids=sequence, labels=sequence, use_cache=False).loss / len(text)
        loss.backward()
        losses.append(loss.item())
    return sum(losses), {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


def _gradient_errors(model, truth) -> dict[str, float]:
    """Relative RMS error over all layers for each kind of matrix, such as gate_proj.

    Vectors stay out: in their few elements, which are sums over all tokens, the order of summation shows.
    """
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            both, wanted = sums[name.split(".")[-2]], truth[name].to(parameter.device)
            both[0] += (parameter.grad.to(wanted.dtype) - wanted).norm().item() ** 2
            both[1] += wanted.norm().item() ** 2
    return {kind: float(f"{math.sqrt(off / size):.3g}") for kind, (off, size) in sums.items()}


@torch.no_grad()
def _make_uncertain(model, text) -> None:
    """Scale the head, which recites, until it gives the next token about half of the probability.

    Gradients of a loss of 0 would be all rounding errors, and cheaper in energy than any real ones.
    """
    logits = model(text, use_cache=False).logits[:, :-1]
    right = logits.gather(2, text[:, 1:, None]).float().mean().item()
    model.lm_head.weight.mul_(math.log(model.config.vocab_size) / right)

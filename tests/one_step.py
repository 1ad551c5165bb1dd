"""The gradient of one optimizer step over eight rows of unequal length, in Trainer, SFTTrainer or a hand-written loop.

Run under torchrun, it writes the gradients of several set-ups to the file named as its argument.
"""

import functools
import sys
import tempfile

import torch
from torch.distributed.tensor import DTensor
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from hf_twell import L1Penalty, SparsityCallback, sparsify
from hf_twell.train.distillation import Distillation
from tests.conftest import leave, tiny_llama

LENGTHS = (5, 23, 9, 31, 3, 17, 12, 8)
LABELS = sum(length - 1 for length in LENGTHS)
L1_WEIGHT = 3.0  # makes the L1 term most of the gradient
SHARE = 8  # tokens of a run: rows hold none, one or several whole ones
# One optimizer step on the CPU, whose gradient is not clipped.
ONE_STEP = {
    "max_steps": 1,
    "max_grad_norm": 1e9,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}


def rows() -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 96, (length,), generator=generator).tolist() for length in LENGTHS]
    return [{"input_ids": row, "labels": row} for row in ids]


def pad(features: list[dict], side="right") -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in features)

    def filled(values, fill):
        padding = [[fill] * (width - len(value)) for value in values]
        pairs = zip(values, padding, strict=True)
        return torch.tensor([value + more if side == "right" else more + value for value, more in pairs])

    return {
        "input_ids": filled([row["input_ids"] for row in features], 0),
        # A first token is predicted by none, and Trainer counts it where others stand before it.
        "labels": filled([[-100, *row["labels"][1:]] for row in features], -100),
        "attention_mask": filled([[1] * len(row["input_ids"]) for row in features], 0),
    }


COLLATORS = {
    "padded": pad,
    "padded left": functools.partial(pad, side="left"),
    "padding_free": DataCollatorWithFlattening(),
}


class KeepGradient(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradient = flat_gradient(model)


class OwnLoss(Trainer):
    """Its loss may be anything, so that distillation leaves it to the trainer."""

    def compute_loss(self, *args, **options):
        assert self.compute_loss_func is None
        return super().compute_loss(*args, **options)


def flat_gradient(model) -> torch.Tensor:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
    return torch.cat([each.flatten() for each in whole]).clone()


def make_trainer(folder, kind=Trainer, model=None, collator=None, term=None, **arguments) -> Trainer:
    """A trainer of one step over all rows, unless `arguments` say otherwise; of a sparse model where none is given.

    Args:
        term: options of a SparsityCallback for it.
    """
    args = TrainingArguments(str(folder), **{**ONE_STEP, **arguments})
    trainer = kind(model or sparsify(tiny_llama()), args, train_dataset=rows(), data_collator=collator or pad)
    if term is not None:
        trainer.add_callback(SparsityCallback(trainer, **term))
    return trainer


def trainer_gradient(
    kind="Trainer",
    layout="padded",
    accumulation=1,
    processes=1,
    l1_weight=L1_WEIGHT,
    distil=None,
    share=None,
    backend="auto",
    **arguments,
):
    """The gradient just before the optimizer step, and the log row of that step.

    Args:
        kind: "Trainer", "SFTTrainer", or a class derived from Trainer.
        share: with one, the term is that of a count which runs of so many tokens share.
        backend: of the blocks. The model is as dense as an untrained one, so that "auto" takes plain matmuls.
    """
    common = {
        **ONE_STEP,
        "per_device_train_batch_size": len(LENGTHS) // accumulation // processes,
        "gradient_accumulation_steps": accumulation,
    }
    model, folder = sparsify(tiny_llama(), backend=backend), tempfile.mkdtemp()
    if kind == "SFTTrainer":
        common |= {"output_dir": folder, "bf16": False, "gradient_checkpointing": False}
        trainer = sft_trainer(model, layout, {**common, **arguments})
    else:
        kind = Trainer if kind == "Trainer" else kind
        trainer = make_trainer(folder, kind, model, COLLATORS[layout], **common, **arguments)
    keep = KeepGradient()
    trainer.add_callback(keep)
    if l1_weight is not None:
        teacher = None if distil is None else Distillation(model, parent(), **distil)
        term = {"l1_weight": l1_weight}
        if share is not None:
            term = {"target_union": 0.25, "term": "count", "share": share}
        callback = SparsityCallback(trainer, **term, distillation=teacher)
        callback.penalty.l1_weight = l1_weight  # of the first step to a target, too, which is otherwise only measured
        trainer.add_callback(callback)
    trainer.train()
    return keep.gradient, trainer.state.log_history[0]


def parent():
    """A dense model that is not the one to train."""
    torch.manual_seed(5)
    model = tiny_llama()
    for weights in model.parameters():
        weights.data += 0.05 * torch.randn_like(weights)
    return model


def sft_trainer(model, layout, arguments):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    args = SFTConfig(**arguments, max_length=None, padding_free=layout == "padding_free")
    return SFTTrainer(model, args, train_dataset=Dataset.from_list(rows()), processing_class=tokenizer)


def loop_gradient(
    micro_batches: int = 4,
    *,
    training=True,
    compiled=False,
    wrap=lambda model: model,
    scaler=None,
    layer_weights=None,
    layout="padded",
    backend="auto",
    **term,
) -> tuple[torch.Tensor, dict]:
    """The hand-written loop of the README, with Trainer's normalisation of the task loss; its gradient and report."""
    # With a cache, documents of a row would see each other.
    model = wrap(sparsify(tiny_llama(use_cache=False), backend=backend).train(training))
    forward = torch.compile(model, fullgraph=True) if compiled else model
    size = len(LENGTHS) // micro_batches
    batches = [COLLATORS[layout](rows()[i : i + size]) for i in range(0, len(LENGTHS), size)]
    penalty = L1Penalty(model, l1_weight=L1_WEIGHT, **term)
    penalty.layer_weights = layer_weights
    for batch in penalty.micro_batches(batches, scaler=scaler):
        loss = forward(**batch, num_items_in_batch=LABELS).loss
        (loss if scaler is None else scaler.scale(loss)).backward()
    return flat_gradient(model), penalty.report()


def autograd_gradient(weights=(L1_WEIGHT,) * 3) -> torch.Tensor:
    """The definition itself, by plain autograd over all rows at once: task loss + mean over layers of weight x L1."""
    model = sparsify(tiny_llama()).train()
    batch, terms = pad(rows()), []
    mask = batch["attention_mask"].unsqueeze(-1)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda _, args: terms.append((args[0].abs() * mask).sum() / mask.sum())
        )
    loss = model(**batch, num_items_in_batch=LABELS).loss
    (loss + sum(w * term for w, term in zip(weights, terms, strict=True)) / len(terms)).backward()
    return flat_gradient(model)


def shared_gradient(weight=L1_WEIGHT) -> tuple[torch.Tensor, float]:
    """The definition of the count term that runs share, by autograd over all rows at once; and the runs' union.

    The gradient of the largest of several values is that of the strongest token.
    """
    model = sparsify(tiny_llama()).train()
    batch, gates = pad(rows()), []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _, __, gate: gates.append(gate.relu()))
    loss, term, union = model(**batch, num_items_in_batch=LABELS).loss, 0.0, 0.0
    for active in gates:
        for row, length in zip(active, LENGTHS, strict=True):
            for run in row[:length].split(SHARE):
                term += torch.tanh(run / 0.2).sum() + len(run) * torch.tanh(run.amax(0) / 0.2).sum()
                union += len(run) * (run > 0).any(0).double().mean().item()
    (loss + weight / len(gates) * term / sum(LENGTHS)).backward()
    return flat_gradient(model), union / len(gates) / sum(LENGTHS)


if __name__ == "__main__":
    results = {}
    for kind in sys.argv[2:]:
        for layout, accumulation in (("padded", 1), ("padded", 2), ("padding_free", 2)):
            for share in (None, SHARE):
                gradient, logs = trainer_gradient(kind, layout, accumulation, processes=2, share=share)
                results[kind, layout, accumulation, share] = (gradient, logs)
    leave(results, sys.argv[1])

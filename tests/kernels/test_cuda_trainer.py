"""The whole way from dense to sparse in Transformers' Trainer on a GPU: blocks move to the kernels, losses stay."""

import math

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hf_twell
from hf_twell import SparsityCallback
from hf_twell.dispatch import limits
from hf_twell.ops import build
from hf_twell.train.distillation import Distillation
from tests import loss_curves
from tests.conftest import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not build.status("cuda", build=True).available, reason="needs the CUDA kernels"),
]
STEPS, BATCH, ACCUMULATION = 300, 8, 2
LAYERS = loss_curves.SIZES["num_hidden_layers"]


def train(folder, backend: str, steps=STEPS, distil=None, **arguments) -> list[dict]:
    """The log of a run whose L1 term rises over half of its steps; two micro-batches a step."""
    model = hf_twell.sparsify(tiny_llama(**loss_curves.SIZES, initializer_range=0.1), backend=backend)
    args = TrainingArguments(
        str(folder), max_steps=steps, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION, lr_scheduler_type="constant",
        learning_rate=loss_curves.LEARNING_RATE, **arguments,
    )  # fmt: skip
    args._n_gpu = 1  # of several Trainer would make DataParallel, which the callback refuses
    words = loss_curves.markov_batches(steps, ACCUMULATION * BATCH, seed=1).flatten(0, 1)
    trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in words])
    teacher = distil and Distillation(model, tiny_llama(**loss_curves.SIZES, initializer_range=0.1), **distil)
    callback = SparsityCallback(trainer, l1_weight=loss_curves.L1_WEIGHT, warmup_steps=0.5, distillation=teacher)
    trainer.add_callback(callback)
    torch._dynamo.reset()
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def window_ratios(mine: list[dict], theirs: list[dict], key: str) -> torch.Tensor:
    """Of the means over 50 steps each."""
    means = [loss_curves.window_means(torch.tensor([row[key] for row in rows])) for rows in (mine, theirs)]
    return means[0] / means[1]


@pytest.mark.parametrize("settings", ["bf16", "fp16", "bf16 gradient_checkpointing", "bf16 torch_compile"])
def test_from_dense_to_sparse_with_the_losses_of_plain_pytorch(tmp_path, monkeypatch, settings):
    arguments = dict.fromkeys(settings.split(), True)
    monkeypatch.setitem(limits.read(), "kCudaTrainingLimits", ((8, 0.0), (math.inf, 0.05)))
    mine, theirs = (train(tmp_path / backend, backend, **arguments) for backend in ("auto", "reference"))
    on_kernels = [row["twell/layers_on_kernels"] for row in mine]
    assert (on_kernels[0], on_kernels[-1]) == (0, LAYERS), on_kernels
    assert mine[0]["twell/density"] > 0.2
    assert mine[-1]["twell/density"] < 0.02
    ratios = window_ratios(mine, theirs, "loss")
    assert (ratios - 1).abs().max() <= 0.005, ratios
    # Single rows say less: two runs of plain PyTorch in fp32 whose initial weights differ by one in ten thousand are up
    # to 0.135 apart in a row of the last hundred, and up to 0.07 in such a mean.
    ratios = window_ratios(mine, theirs, "twell/density")
    assert (ratios - 1).abs().max() <= 0.1, ratios


def test_compiled_distillation_teaches_the_same(tmp_path):
    distil, keys = {"logits": 0.3, "layers": 0.5}, ("loss", "twell/kl", "twell/layer_error")
    runs = [
        train(tmp_path / str(compiled), "auto", steps=20, distil=distil, bf16=True, torch_compile=compiled)
        for compiled in (False, True)
    ]
    eager, compiled = (torch.tensor([[row[key] for key in keys] for row in rows]) for rows in runs)
    assert (compiled / eager - 1).abs().max() <= 0.02, compiled / eager

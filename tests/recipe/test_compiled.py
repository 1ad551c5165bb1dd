"""A recipe compiles one layer, whose graphs all layers share, and trains as an eager run does."""

import json

import pytest
import torch
import transformers as tf
from safetensors import safe_open
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_twell import SparsityCallback, sparsify
from hf_twell.recipe.trainer import PackedTrainer
from hf_twell.recipe.variants import LoraOutsideFfns, freeze
from hf_twell.train.distillation import Distillation
from tests import one_step
from tests.conftest import tiny_llama, write_recipe
from tests.mixtures import NEXT, ROUTED, TEXT
from tests.rounding import rounding

pytestmark = [pytest.mark.slow, pytest.mark.numeric]

COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
MANY = 12  # layers: more than the graphs that PyTorch makes of one function, by default


def trained(
    folder, layers: int, distil=None, lora=False, make=tiny_llama, **arguments
) -> tuple[dict, torch.Tensor, dict]:
    """The log row of a step, its gradient, and what was compiled: so many graphs, of so many calls in all."""
    torch.compiler.reset()
    counters.clear()
    model, parent = (make(num_hidden_layers=layers) for _ in range(2))
    sparsify(model)
    if lora:
        LoraOutsideFfns(model)
    else:
        freeze(model, ["embed_tokens", "norm"])
    for weights in parent.parameters():
        weights.data *= 1.1
    args = tf.TrainingArguments(str(folder), **one_step.ONE_STEP, **arguments)
    words = torch.randint(3, 96, (8, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in words]
    trainer = PackedTrainer(model, args, tf.default_data_collator, train_dataset=data)
    term = {"target_density": 0.1, "term": "count", "parent_loss": 5.0}
    callback = SparsityCallback(trainer, **term, distillation=distil and Distillation(model, parent, **distil))
    callback.penalty.l1_weight = 1.0  # of the first step to a target, which is otherwise only measured
    trainer.add_callback(callback)
    keep = one_step.KeepGradient()
    trainer.add_callback(keep)
    trainer.train()
    assert model.loss_function is ForCausalLMLoss
    return trainer.state.log_history[0], keep.gradient, dict(counters["stats"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"distil": {"logits": 0.6, "layers": 0.7}},
        {"lora": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=["alone", "distilled", "lora", "checkpoints", "re-entrant checkpoints"],
)
def test_layers_share_graphs_that_compute_what_eager_ones_do(tmp_path, options):
    *_, of_few = trained(tmp_path, 3, **options, **COMPILED)
    row, gradient, of_many = trained(tmp_path, MANY, **options, **COMPILED)
    expected, eager, of_none = trained(tmp_path, MANY, **options)
    assert of_many == of_few
    assert not of_none
    # Sums over 32 (norms, q/k/v/o, gate, up), 16 (softmax) and 52 (down) terms in each layer, forward and backward.
    bound = rounding(2 * MANY * (6 * 32 + 16 + 52))
    assert (gradient - eager).norm() <= bound * eager.norm()
    for key in expected.keys() & {"loss", "twell/kl", "twell/layer_error"}:
        assert row[key] == pytest.approx(expected[key], rel=bound), key


def hybrid(**changes) -> tf.PreTrainedModel:
    """Of each four layers three have linear attention."""
    torch.manual_seed(0)
    return tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**{**TEXT, **NEXT, **changes}))


def routed(**changes) -> tf.PreTrainedModel:
    """Its first layer is dense."""
    torch.manual_seed(0)
    config = {**TEXT, **ROUTED, "head_dim": 8, "mlp_only_layers": [0], "output_router_logits": True, **changes}
    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**config))


@pytest.mark.parametrize("make", [hybrid, routed])
def test_layers_of_each_kind_share_graphs(tmp_path, make):
    """Dynamo alone: of linear attention, aot_eager fails in backward (docs/training.md)."""
    dynamo = {**COMPILED, "torch_compile_backend": "eager"}
    *_, of_few = trained(tmp_path, 4, make=make, **dynamo)
    row, gradient, of_many = trained(tmp_path, MANY, make=make, **dynamo)
    expected, eager, _ = trained(tmp_path, MANY, make=make)
    assert of_many == of_few
    assert torch.equal(gradient, eager)
    assert row["loss"] == expected["loss"]


def test_the_loss_is_compiled_too(tmp_path, monkeypatch):
    """Else float32 copies of all logits would be made."""
    compile_part, seen = torch.compile, []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda part, **options: compile_part(part, backend=backend))
    trained(tmp_path, 3, **COMPILED)
    assert sum("cross_entropy" in name for name in seen) == 1


def test_a_mode_compiles_the_model_as_a_whole(tmp_path):
    *_, compiled = trained(tmp_path, 3, **COMPILED, torch_compile_mode="default")
    assert compiled["unique_graphs"] == 1


def test_a_recipe_saves_and_resumes_as_if_nothing_were_compiled(tmp_path, run_json):
    recipe = write_recipe(tmp_path, "target_density: 0.1\ndistill: {logits: 0.5, layers: 0.5}", documents=6)
    changes = ["training.torch_compile=true", "training.torch_compile_backend=aot_eager"]
    eager = run_json("train", recipe, f"output_dir={tmp_path / 'eager'}")
    counters.clear()
    compiled = run_json("train", recipe, *changes)
    assert counters["stats"]["unique_graphs"] > 0
    (tmp_path / "out" / "checkpoint-4" / "twell_state.json").unlink()  # as if the run had broken off
    resumed = run_json("train", recipe, *changes, "--resume")
    for result in (compiled, resumed):
        losses, expected = ([row["loss"] for row in each["logs"]] for each in (result, eager))
        assert losses == pytest.approx(expected, rel=1e-4)
        assert result["after"]["loss"] == pytest.approx(eager["after"]["loss"], rel=1e-4)
    for folder in ("final", "checkpoint-4"):
        names = [names_in(tmp_path / run / folder) for run in ("out", "eager")]
        assert names[0] == names[1]
    assert "_orig_mod" not in json.dumps(sorted(names[0]))


def names_in(folder) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())

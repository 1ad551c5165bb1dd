"""What users do to models with PyTorch and Transformers themselves: change, copy, cut, split, generate, train on."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers as tf
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hf_twell import L1Penalty, SparsityCallback, TwellLlamaForCausalLM, sparsify, unpatch
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.ops import api
from tests.conftest import ids, in_two_processes, logits, tiny_llama
from tests.convert.test_own_type import dense
from tests.split_models import train


def few_active(**changes):
    """A tiny Llama of whose 52 neurons 48 are never active, so that kernels run."""
    model = tiny_llama(mlp_bias=True, **changes).eval()
    for layer in model.model.layers:
        layer.mlp.gate_proj.bias.data[4:] = -9.0
    return model


def pair():
    """A sparse model that has been evaluated, so that it keeps down_proj by columns; and its stock dense ReLU twin."""
    model, twin = sparsify(few_active()), few_active(hidden_act="relu")
    torch.testing.assert_close(logits(model), logits(twin))
    return model, twin


def other_weights():
    generator = torch.Generator().manual_seed(1)
    return {
        name: weights + 0.1 * torch.randn(weights.shape, generator=generator)
        for name, weights in few_active().state_dict().items()
    }


def test_by_columns():
    """The tests below begin with what is special in an evaluated model, where kernels can be had."""
    model, _ = pair()
    if api.resolve("auto", "cpu") != "cpu":
        pytest.skip("needs the CPU kernels")
    assert model.model.layers[0].mlp.down_proj.weight.stride() == (1, 32)


def same_but_moved(model, twin):
    torch.testing.assert_close(logits(model), logits(twin))
    assert not torch.allclose(logits(twin), logits(few_active(hidden_act="relu")), atol=1e-2)


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


class TwiceLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def of_another_class(linear):
    linear.__class__ = TwiceLinear


def with_a_tensor_for_bias(linear):
    bias = linear.bias.detach() + 0.5
    del linear.bias
    linear.bias = bias


def with_a_tensor_for_weight(linear):
    weight = 2 * linear.weight.detach()
    del linear.weight
    linear.weight = weight


def with_lora(linear):
    peft, holder = pytest.importorskip("peft"), nn.ModuleDict({"linear": linear})
    torch.manual_seed(0)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["linear"], init_lora_weights=False), holder)
    return holder["linear"].eval()


def quantized_when_called(linear):
    holder = nn.ModuleDict({"linear": linear})
    linear.weight.data *= 1.5  # what rounding does may be too little to see
    return torch.ao.quantization.quantize_dynamic(holder, {nn.Linear}, inplace=True)["linear"]


def with_weight_norm(linear):
    parametrizations.weight_norm(linear).parametrizations.weight.original0.data *= 2


def with_weight_norm_by_hooks(linear):
    nn.utils.weight_norm(linear).weight_g.data *= 2


def pruned_for_good(linear):
    prune.remove(prune.l1_unstructured(linear, "weight", 0.3), "weight")


# Each returns the module that is to be in the linear's place, or None: the same one.
TRICKS = {
    "parametrized": lambda linear: parametrize.register_parametrization(linear, "weight", Twice()),
    "a tensor for bias": with_a_tensor_for_bias,
    "weight norm": with_weight_norm,
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", 0.3),
    "pruned for good": pruned_for_good,
    "another class": of_another_class,
    "a tensor for weight": with_a_tensor_for_weight,
    "weight norm by hooks": with_weight_norm_by_hooks,
    "spectral norm": lambda linear: parametrizations.spectral_norm(linear).eval(),
    "spectral norm by hooks": lambda linear: nn.utils.spectral_norm(linear).eval(),
    "LoRA": with_lora,
}
# Modules of which `sparsify` would say that they cannot be read.
REPLACEMENTS = {
    "in a sequence": lambda linear: nn.Sequential(linear, nn.Tanh()),
    "quantized when called": quantized_when_called,
}
ONCE = "without sparsify again"
WAYS = [(trick, when) for trick in TRICKS for when in ("before", "after", ONCE)]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize(("trick", "when"), [*WAYS, *((trick, ONCE) for trick in REPLACEMENTS)])
def test_tricks_on_projections(trick, name, when):
    model, twin = (few_active(), few_active(hidden_act="relu")) if when == "before" else pair()
    for each in (model.train(), twin.train()):  # where down_proj is contiguous, which pruning wants
        torch.manual_seed(0)
        for layer in each.model.layers:
            linear = layer.mlp.get_submodule(name)
            setattr(layer.mlp, name, (TRICKS | REPLACEMENTS)[trick](linear) or linear)
    if when != ONCE:
        sparsify(model)
    model.eval(), twin.eval()
    for _ in range(2):
        same_but_moved(model, twin)
    assert len(sparse_ffns(model)) == 3


def test_what_wants_contiguous_weights_gets_them_in_training_mode(tmp_path):
    model, twin = pair()
    model.train()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    twin.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(logits(model.eval()), logits(twin))
    assert torch.equal(*(nn.utils.parameters_to_vector(each.parameters()) for each in (model.train(), twin)))


def merge(model):
    other = other_weights()
    model.load_state_dict({name: (weights + other[name]) / 2 for name, weights in model.state_dict().items()})


def give_data(model):
    for name, weights in model.named_parameters():
        weights.data = other_weights()[name]


def write_in_place(model):
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(3)


CHANGES = {
    "assigned": lambda model: model.load_state_dict(other_weights(), assign=True),
    "loaded": lambda model: model.load_state_dict(other_weights()),
    "merged": merge,
    "data": give_data,
    "in place": write_in_place,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights(change):
    model, twin = pair()
    for each in (model, twin):
        CHANGES[change](each)
    for _ in range(2):
        same_but_moved(model, twin)


HELD = {
    "state_dict": lambda model: model.state_dict(),
    "data": lambda model: {name: weight.data for name, weight in model.named_parameters()},
    "rows": lambda model: {name: weight.detach()[:] for name, weight in model.named_parameters()},
}


@pytest.mark.parametrize("how", HELD)
def test_weights_written_through_what_was_held_before_evaluation(how):
    """As servers take new weights in: `held = model.state_dict()` once, and `held[name].copy_(new)` for each update."""
    model, twin = sparsify(few_active()), few_active(hidden_act="relu")
    for each in (model, twin):
        held = HELD[how](each)
        logits(each)
        for name, weights in other_weights().items():
            held[name].copy_(weights)
    same_but_moved(model, twin)
    for name, weights in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], weights)


@pytest.mark.parametrize("gradients", [False, True])
def test_functional_call(gradients):
    model, twin = pair()
    given = other_weights()
    for layer in model.model.layers:
        layer.mlp.twell_state.recent.look_in = 0  # the next call looks at the density
    with torch.set_grad_enabled(gradients):
        results = [torch.func.functional_call(each, given, (), {"input_ids": ids()}) for each in (model, twin)]
    torch.testing.assert_close(*(result.logits for result in results))
    assert all(weights.is_contiguous() for weights in given.values()), "the caller's own stay as they were"
    torch.testing.assert_close(logits(model), logits(twin))


def test_averaged_model():
    averages = []
    for model in pair():
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model.train()(input_ids=ids(), labels=ids()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            averages.append(logits(average.eval()))
            logits(model.eval())
    torch.testing.assert_close(torch.stack(averages[:3]), torch.stack(averages[3:]))
    assert len(sparse_ffns(average)) == 0
    assert not torch.allclose(averages[0], averages[2], atol=1e-3)


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_whole,
    "share_memory": lambda model: copy.deepcopy(model).share_memory(),
    "float64": lambda model: copy.deepcopy(model).double(),
    "other attention": lambda model: (model.set_attn_implementation("eager"), model)[1],
}


@pytest.mark.parametrize("how", COPIES)
def test_copies(how):
    model, twin = pair()
    copied = COPIES[how](model)
    torch.testing.assert_close(logits(copied), logits(COPIES[how](twin)))
    assert len(sparse_ffns(copied)) == 3
    write_in_place(copied)
    if copied is not model:
        torch.testing.assert_close(logits(model), logits(twin))


def test_layers_cut_off_and_embeddings_resized(tmp_path):
    model, twin = pair()
    sparsify(model, layers=[0, 2])
    for each in (model, twin):
        each.model.layers = each.model.layers[:2]
        each.config.num_hidden_layers = 2
        torch.manual_seed(0)
        each.resize_token_embeddings(104)
    torch.testing.assert_close(logits(model), logits(twin))
    model.save_pretrained(tmp_path / "model")
    advice = r"twell entry; pass layers=range\(2\) for all"
    for again in (lambda **options: sparsify(model, **options), lambda **options: load(tmp_path / "model", **options)):
        with pytest.raises(ValueError, match=advice):
            again()
        torch.testing.assert_close(logits(again(layers=range(2))), logits(twin))


def load(path, **options):
    return TwellLlamaForCausalLM.from_pretrained(path, **options).eval()


def test_a_block_replaced():
    model, twin = pair()
    for each in (model, twin):
        each.set_submodule("model.layers.1.mlp", copy.deepcopy(twin.model.layers[2].mlp))
    same_but_moved(model, twin)
    assert len(sparse_ffns(model)) == 2
    same_but_moved(sparsify(model), twin)
    assert len(sparse_ffns(model)) == 3


def copied_by_peft(model):
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"]))


BLOCK_CHANGES = {
    "unpatched": unpatch,
    "other layers": lambda model: sparsify(model, layers=[0]),
    "replaced": lambda model: model.set_submodule("model.layers.1.mlp", copy.deepcopy(model.model.layers[2].mlp)),
    "cut off": lambda model: setattr(model.model, "layers", model.model.layers[:2]),
    "copied": copied_by_peft,
}


@pytest.mark.parametrize("change", BLOCK_CHANGES)
def test_an_l1_term_on_blocks_that_are_gone_is_refused(change):
    model = sparsify(tiny_llama())
    penalty = L1Penalty(model, 0.5)
    BLOCK_CHANGES[change](model)
    with pytest.raises(ValueError, match="are not sparse any more, or not the model's"):
        penalty.begin_step([{"input_ids": ids()}])


# Generation of other kinds


def padded():
    rows, mask = ids().clone(), torch.ones_like(ids())
    rows[0, :4] = mask[0, :4] = 0
    return rows, mask


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"output_hidden_states": True}])
def test_other_ways_to_generate(options):
    rows, mask = padded()
    if "prompt_lookup_num_tokens" in options:
        rows = torch.cat([ids()[:1], ids()[:1]], dim=1)
        mask = torch.ones_like(rows)
    options |= {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(*(each.generate(rows, **options) for each in pair()))


@pytest.mark.slow
def test_generate_batch():
    """Continuous batching, with its paged attention."""
    options = tf.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = tf.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    texts = []
    for model in pair():
        rows = [row.tolist() for row in ids()]
        done = model.generate_batch(rows, options, continuous_batching_config=small, progress_bar=False)
        texts.append([done[name].generated_tokens for name in sorted(done)])
    assert texts[0] == texts[1]
    assert [len(text) for text in texts[0]] == [5, 5]


# Trainer's own devices


def trained(model, folder, callbacks, **options):
    rows = [{"input_ids": row, "labels": row} for row in ids().repeat(8, 1)]
    args = tf.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, optim="sgd", **options
    )
    trainer = tf.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:4])
    for callback in callbacks(trainer):
        trainer.add_callback(callback)
    trainer.train()
    return trainer


def test_early_stopping_and_the_best_model(tmp_path):
    options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    options |= {"load_best_model_at_end": True, "learning_rate": 0.05, "max_steps": 9}
    # The greatest loss, so that the first checkpoint is the best.
    options |= {"greater_is_better": True, "save_total_limit": 1}
    model, twin = pair()
    stop = tf.EarlyStoppingCallback(1)
    ours = trained(model, tmp_path / "ours", lambda trainer: [stop, SparsityCallback(trainer, 0.0)], **options)
    theirs = trained(twin, tmp_path / "theirs", lambda trainer: [stop], **options)
    assert ours.state.global_step == theirs.state.global_step == 2
    assert Path(ours.state.best_model_checkpoint).name == "checkpoint-1"
    for name in ("ours", "theirs"):
        assert [item.name for item in (tmp_path / name).iterdir()] == ["checkpoint-1"]
    torch.testing.assert_close(logits(model.eval()), logits(twin.eval()))


@pytest.mark.slow
def test_auto_find_batch_size(tmp_path):
    """Steps that ran out of memory leave nothing behind: the run is the one with the size that was found."""

    def out_of_memory(model, args, batch):
        if model.training and len(batch["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")

    models, logs = [], []
    for size in (3, 2):
        model = sparsify(few_active())
        model.register_forward_pre_hook(out_of_memory, with_kwargs=True)
        options = {"per_device_train_batch_size": size, "auto_find_batch_size": size > 2, "max_steps": 3}
        trainer = trained(model, tmp_path, lambda trainer: [SparsityCallback(trainer, 0.5)], **options)
        logs.append([[row[key] for key in ("loss", "twell/l0", "twell/l1")] for row in trainer.state.log_history[:-1]])
        models.append(model.eval())
    assert trainer._train_batch_size == 2
    assert logs[0] == logs[1]
    assert torch.equal(logits(models[0]), logits(models[1]))


# Models split over processes


@pytest.mark.slow
def test_split_over_two_processes(tmp_path):
    """By tensors, by layers, and by FSDP: `tests/split_models.py` says what each process computed."""
    sparsify(few_active()).save_pretrained(tmp_path / "sparse")
    few_active().save_pretrained(tmp_path / "dense")
    own_type = sparsify(dense(), backend="reference")
    own_type.save_pretrained(tmp_path / "own_type")
    in_two_processes("tests.split_models", tmp_path)
    twin = few_active(hidden_act="relu")
    truth, text = logits(twin), twin.generate(ids(), max_new_tokens=5, do_sample=False)
    twin(input_ids=ids(), labels=ids()).loss.backward()
    gradient = twin.model.layers[0].mlp.up_proj.weight.grad
    results = torch.load(tmp_path / "results.pt")
    for name, result in results["exact"].items():
        torch.testing.assert_close(result["logits"], truth, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(result["gradient"], gradient, atol=1e-5, rtol=1e-4)
        assert torch.equal(result["text"], text), name
        assert result["blocks"] == result["layers"], name
    assert len(results["exact"]) == 7
    start = copy.deepcopy(own_type.state_dict())
    train(own_type, ids())
    for name, weight in own_type.state_dict().items():
        moved, apart = weight - start[name], results["trained"][name] - weight
        # Rounding, and the row of a neuron whose gate lies at zero: one of 52.
        assert apart.norm() < 52**-0.5 * moved.norm(), name
    for name, message in results["refused"].items():
        assert "\n" not in message, name
    tensors = "model.layers.0.mlp has 26 of its 52 neurons in this process (tensor parallelism)"
    assert results["refused"].pop("pipeline").startswith("LlamaForCausalLM has 3 layers but 1 ")
    assert [message.startswith(tensors) for message in results["refused"].values()] == [True, True]
    saved = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(saved), truth)

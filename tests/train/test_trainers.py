"""Trainers, and what they are told to do: each trains a sparse model exactly, with the L1 term too, or is refused.

`Watch` is the truth: what a stock ReLU model really receives in the same trainer, with the L1 term added by hooks.
"""

import copy
import functools
import tempfile
import warnings
from typing import NamedTuple

import pytest
import torch
import transformers as tf
from torch import nn

from hf_twell import L1Penalty, SparsityCallback, measure_sparsity, sparsify
from tests.conftest import TINY, one_of, relu_llama, tiny_llama
from tests.one_step import L1_WEIGHT, ONE_STEP, KeepGradient, pad, rows

COMMON = {**ONE_STEP, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


class Watch:
    """Hooks on a stock model: the masks of what it receives, and with the step's `tokens` the L1 term's gradient."""

    def __init__(self, model: nn.Module, tokens: float | None = None):
        self.masks, self.tokens, self.l0 = [], tokens, 0.0
        model.register_forward_pre_hook(self.receive, with_kwargs=True)
        self.downs = [module for name, module in model.named_modules() if name.endswith("mlp.down_proj")]
        for down in self.downs:
            down.register_forward_pre_hook(self.add)

    def receive(self, model, args, inputs):
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        self.mask = None
        if torch.is_grad_enabled():
            self.mask = torch.ones(ids.shape) if mask is None else mask.float()
            self.masks.append(self.mask)

    def add(self, down, args):
        h, share = args[0], 0 if self.tokens is None else 1 / len(self.downs) / self.tokens
        if not share or not h.requires_grad:
            return
        weight, h_value = share * self.mask.unsqueeze(-1), h.detach()

        def backward(grad):  # once for each token, however often it is recomputed
            self.l0 += ((h_value != 0) * weight).sum().item()
            return grad + L1_WEIGHT * weight * h_value.sign()

        h.register_hook(backward)


def trained(make, model, **callback) -> tuple[torch.Tensor, dict]:
    """The gradient just before the first optimizer step, and its log."""
    trainer, keep = make(model), KeepGradient()
    trainer.add_callback(keep)
    if callback:
        trainer.add_callback(SparsityCallback(trainer, **callback))
    trainer.train()
    return keep.gradient, trainer.state.log_history[0]


class Truth(NamedTuple):
    """Of one step of a stock ReLU model: the task's gradient, that with the L1 term, and L0."""

    task: torch.Tensor
    gradient: torch.Tensor
    l0: float


def truth_of(make, dense=tiny_llama) -> Truth:
    def stock():
        model = dense(hidden_act="relu")
        model.load_state_dict(dense().state_dict())
        return model

    model = stock()
    watch = Watch(model)
    task, _ = trained(make, model)
    tokens, model = sum(mask.sum().item() for mask in watch.masks), stock()
    watch = Watch(model, tokens)
    gradient, _ = trained(make, model)
    assert (gradient - task).norm() > 0.5 * gradient.norm(), "the L1 term is most of the gradient"
    return Truth(task, gradient, watch.l0)


def check_exact(make, dense=tiny_llama, truth: Truth | None = None):
    """`truth` may be that of another trainer, which takes the same step."""
    truth = truth or truth_of(make, dense)
    gradient, _ = trained(make, sparsify(dense()))
    assert (gradient - truth.task).norm() <= 1e-5 * truth.task.norm()
    gradient, logs = trained(make, sparsify(dense()), l1_weight=L1_WEIGHT)
    assert (gradient - truth.gradient).norm() <= 1e-5 * truth.gradient.norm()
    assert logs["twell/l0"] == pytest.approx(truth.l0, rel=1e-5)


def check_exact_without_callback(make):
    task, _ = trained(make, relu_llama().train())
    gradient, _ = trained(make, sparsify(tiny_llama()))
    assert (gradient - task).norm() <= 1e-5 * task.norm()


def check_refused(make, match: str, **callback):
    with pytest.raises(ValueError, match=match):
        trained(make, sparsify(tiny_llama()), **(callback or {"l1_weight": L1_WEIGHT}))


# Transformers


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows())


def loss_of_words(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def transformers_trainer(kind=tf.Trainer, dataset=None, collator=pad, loss=None, **arguments):
    args = {"output_dir": tempfile.mkdtemp(), **COMMON, **arguments}
    args = tf.Seq2SeqTrainingArguments(**args) if kind is tf.Seq2SeqTrainer else tf.TrainingArguments(**args)
    options = {"train_dataset": dataset or rows(), "data_collator": collator, "compute_loss_func": loss}
    return lambda model: kind(model, args, **options)


# What gives the gradient of the same rows in one batch, and what does not.
SAME_STEP = {
    "Seq2SeqTrainer": {"kind": tf.Seq2SeqTrainer},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "tokens not averaged": {"average_tokens_across_devices": False},
    "tokens seen": {"include_num_input_tokens_seen": "non_padding"},
    "loss function": {"loss": loss_of_words},
    "checkpointing": {"gradient_checkpointing": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "stream": {"dataset": Stream()},
    "stream, dispatched": {"dataset": Stream(), "accelerator_config": {"dispatch_batches": True}},
    "micro-batches of 3, 3 and 2": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
    "flattened": {"collator": tf.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)},
}
OTHER_STEPS = {
    "neftune": {"neftune_noise_alpha": 5.0},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "flattened, one sequence": {"collator": tf.DataCollatorWithFlattening(return_position_ids=False)},
}


@functools.cache
def one_batch() -> Truth:
    return truth_of(transformers_trainer(per_device_train_batch_size=8, gradient_accumulation_steps=1))


@pytest.mark.parametrize("case", one_of("flattened", SAME_STEP))
def test_trainer(case):
    check_exact(transformers_trainer(**SAME_STEP[case]), truth=one_batch())


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHER_STEPS)
def test_trainer_of_another_objective(case):
    check_exact(transformers_trainer(**OTHER_STEPS[case]))


def tiny_llava(**changes):
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = tf.CLIPVisionConfig(**vision, image_size=16, patch_size=8)
    torch.manual_seed(0)
    text = tf.LlamaConfig(**{**TINY, **changes})
    config = tf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=95)
    model = tf.LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    return model


def with_images(features):
    """Each row begins with the four tokens of an image."""
    rows = [{key: [95] * 4 + values for key, values in feature.items()} for feature in features]
    images = torch.randn(len(rows), 3, 16, 16, generator=torch.Generator().manual_seed(len(rows)))
    return {**pad(rows), "pixel_values": images}


@pytest.mark.slow
def test_images():
    data = [{key: [min(i, 94) for i in values] for key, values in row.items()} for row in rows()]
    check_exact(transformers_trainer(dataset=data, collator=with_images), tiny_llava)


@pytest.mark.slow
def test_token_classification():
    def dense(**changes):
        torch.manual_seed(0)
        return tf.LlamaForTokenClassification(tf.LlamaConfig(**{**TINY, **changes}, num_labels=96))

    check_exact(transformers_trainer(), dense)


class Twice(tf.Trainer):
    def compute_loss(self, model, inputs, **options):
        return sum(tf.Trainer.compute_loss(self, model, inputs, **options) for _ in range(2)) / 2


class Half(tf.Trainer):
    def _prepare_inputs(self, inputs):
        return {key: value[:2] for key, value in super()._prepare_inputs(inputs).items()}


def words_without_mask(features):
    return {key: value[:, :3] for key, value in pad(features).items() if key != "attention_mask"}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_that_runs_twice_is_refused(checkpointing):
    """The term would be twice as strong, and the density above 1."""
    options = {"kind": Twice, "gradient_checkpointing": checkpointing}
    check_refused(transformers_trainer(**options), "went through the model more than once with gradients")
    check_refused(transformers_trainer(**options), "more than once", target_density=0.1)


@pytest.mark.parametrize("collator", [pad, words_without_mask])
def test_a_batch_that_the_trainer_changes_is_refused(collator):
    check_refused(transformers_trainer(Half, collator=collator), "pass the batch that the model really receives")


@pytest.mark.slow
def test_virtual_tokens_are_refused():
    peft = pytest.importorskip("peft")
    for collator in (pad, words_without_mask):
        model = sparsify(tiny_llama())
        model = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
        with pytest.raises(ValueError, match="no virtual tokens"):
            trained(transformers_trainer(collator=collator), model, l1_weight=0.1)


def test_encoder_decoders_are_refused():
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    part = tf.T5GemmaModuleConfig(**{name: TINY[name] for name in names}, head_dim=8, num_hidden_layers=2)
    model = sparsify(tf.T5GemmaForConditionalGeneration(tf.T5GemmaConfig(encoder=part, decoder=part, vocab_size=96)))
    with pytest.raises(ValueError, match="T5GemmaForConditionalGeneration is an encoder-decoder"):
        L1Penalty(model, 0.1)
    with pytest.raises(ValueError, match="decoder-only"):
        measure_sparsity(model, [pad(rows())])


# trl


@pytest.fixture(scope="module")
def trl():
    pytest.importorskip("datasets")
    return pytest.importorskip("trl")


CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{{ ' ' }}{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{index}": index for index in range(3, 96)}}
    words = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", chat_template=CHAT)


def text(start: int, length: int) -> str:
    return " ".join(f"w{3 + (start + 5 * index) % 90}" for index in range(length))


def pairs() -> list[dict]:
    """Prompts with a chosen and a rejected completion, all of unequal length."""
    texts = [(text(i, 3 + i % 3), " " + text(7 * i, 2 + i), " " + text(11 * i, 9 - i)) for i in range(8)]
    return [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in texts]


def judged() -> list[dict]:
    rows = enumerate(pairs())
    return [
        {"prompt": r["prompt"], "completion": r["chosen" if i % 2 else "rejected"], "label": i % 2 > 0} for i, r in rows
    ]


def trl_trainer(trl, name, dataset, *, options=None, **arguments):
    from datasets import Dataset

    common = {"output_dir": tempfile.mkdtemp(), **COMMON, "bf16": False, "gradient_checkpointing": False}
    args = getattr(trl, f"{name}Config")(**{**common, **arguments})
    dataset = Dataset.from_list(dataset)

    def make(model):
        others = options(model) if options else {}
        trainer = getattr(trl, f"{name}Trainer")
        return trainer(model, args=args, train_dataset=dataset, processing_class=tokenizer(), **others)

    return make


def reference(model) -> dict:
    return {"ref_model": copy.deepcopy(model)}


def completions() -> list[dict]:
    return [{"prompt": row["prompt"], "completion": row["completion"]} for row in judged()]


SFT = {
    "packing": {"packing": True, "max_length": 24, "per_device_train_batch_size": 2},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 24, "per_device_train_batch_size": 2},
    "dft": {"loss_type": "dft"},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("case", one_of("packing", SFT))
def test_sft(case, trl):
    check_exact(trl_trainer(trl, "SFT", rows(), **{"max_length": None, **SFT[case]}))


@pytest.mark.slow
def test_sft_with_more_padding(trl):
    check_exact(trl_trainer(trl, "SFT", rows(), pad_to_multiple_of=32, max_length=None), truth=one_batch())


@pytest.mark.slow
@pytest.mark.parametrize("padding_free", [False, True])
def test_sft_on_completions_alone(padding_free, trl):
    arguments = {"completion_only_loss": True, "padding_free": padding_free, "max_length": None}
    check_exact(trl_trainer(trl, "SFT", completions(), **arguments))


@pytest.mark.slow
def test_sft_on_the_assistant_alone(trl):
    roles = ("user", "assistant")
    texts = [(row["prompt"], row["completion"].strip()) for row in judged()]
    rows = [{"messages": [{"role": r, "content": c} for r, c in zip(roles, row, strict=True)]} for row in texts]
    check_exact(trl_trainer(trl, "SFT", rows, assistant_only_loss=True))


@pytest.mark.slow
def test_sft_loss_function(trl):
    make = trl_trainer(trl, "SFT", rows(), options=lambda model: {"compute_loss_func": loss_of_words})
    check_exact(make, truth=one_batch())


@pytest.mark.parametrize("layout", [{"padding_free": True, "max_length": None}, {"packing": True, "max_length": 24}])
def test_sft_padding_without_a_mask_is_refused(layout, trl):
    check_refused(trl_trainer(trl, "SFT", rows(), pad_to_multiple_of=32, **layout), "leave pad_to_multiple_of out")


DPO = {
    "padded to 8": {"pad_to_multiple_of": 8},
    "re-entrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reference computed before": {"options": None, "precompute_ref_log_probs": True},
}


@pytest.fixture(scope="module")
def plain_dpo(trl) -> Truth:
    return truth_of(trl_trainer(trl, "DPO", pairs(), options=reference))


@pytest.mark.slow
@pytest.mark.parametrize("case", DPO)
def test_dpo(case, trl, plain_dpo):
    check_exact(trl_trainer(trl, "DPO", pairs(), **{"options": reference, **DPO[case]}), truth=plain_dpo)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type, trl):
    check_exact(trl_trainer(trl, "KTO", judged(), options=reference, loss_type=loss_type))


@pytest.mark.slow
def test_reward(trl):
    def scorer(**changes):
        config = tiny_llama(**changes).config
        config.num_labels = 1
        torch.manual_seed(1)
        return tf.LlamaForSequenceClassification(config)

    check_exact(trl_trainer(trl, "Reward", pairs()), scorer)


@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_a_dense_reference_is_told(name, trl, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    make = trl_trainer(trl, name, pairs() if name == "DPO" else judged())
    model = tiny_llama()
    model.config._name_or_path = str(tmp_path)
    trainer = make(sparsify(model))
    with pytest.warns(UserWarning, match=r"ref_model computes 'silu'.*ref_model=copy.deepcopy\(model\) after sparsify"):
        SparsityCallback(trainer, 0.1)
    trainer = trl_trainer(trl, name, pairs() if name == "DPO" else judged(), options=reference)(sparsify(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SparsityCallback(trainer, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_trainers_that_generate_are_refused(name, trl):
    def rewards(completions, **_):
        return [float(len(completion) % 5) for completion in completions]

    prompts = [{"prompt": row["prompt"]} for row in pairs()]
    arguments = {"num_generations": 2, "max_completion_length": 3, "beta": 0.0}
    options = {"options": lambda model: {"reward_funcs": rewards}, **arguments}
    make = trl_trainer(trl, name, prompts, **options)
    check_refused(make, f"{name}Trainer hands out batches of type list .* without SparsityCallback")
    check_exact_without_callback(make)


def test_batches_of_other_keys_are_refused(trl):
    orpo = pytest.importorskip("trl.experimental.orpo")
    make = trl_trainer(orpo, "ORPO", pairs())
    check_refused(make, "ORPOTrainer hands out batches with keys .*'chosen_input_ids'")
    check_exact_without_callback(make)

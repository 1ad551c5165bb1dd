"""The vLLM plugin against Transformers: vLLM runs in an environment of its own, which `make test-all` makes."""

import json
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from hf_twell.serving import vllm_plugin
from hf_twell.serving.vllm_plugin.density import known_densities, known_settings
from tests.paths import ROOT
from tests.vllm_engines import (
    AS_NEAR,
    FAMILIES,
    SAME,
    TIMEOUT_S,
    distance,
    engines,
    expected,
    needs_vllm,
    prompts,
    save,
    tiny,
)

EAGER, FP32, BF16 = {"enforce_eager": True}, {"dtype": "float32"}, {"dtype": "bfloat16"}
SEVERAL, ONE = prompts(7, 16, 21, 30), prompts(25)  # the former come to the blocks in one call of 74 tokens
SPARSE_LINE = "hf_twell: 2 of 2 feed-forward blocks use the sparse kernels where these are faster, at densities of "
PLAIN_LINE = "hf_twell: 0 of 2 feed-forward blocks use the sparse kernels where these are faster, they are plain ReLU "
slow = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S), needs_vllm]


def in_vllm(test):
    for mark in slow:
        test = mark(test)
    return test


def kernel_rows(result) -> list[list[int]]:
    """Of each call, the numbers of tokens that came to the kernels."""
    return [call["rows"]["hf_twell::infer"] for call in result["calls"]]


def test_vllm_finds_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["entry-points"]["vllm.general_plugins"]["hf_twell"]) is vllm_plugin.register


def test_the_plugin_imports_neither_torch_nor_vllm():
    heavy = {"torch", "transformers", "vllm"}
    code = f"import sys, hf_twell.serving.vllm_plugin; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_known_density_is_the_settings_else_the_checkpoints():
    entry = {"version": 1, "density": [0.01, 0.02]}
    assert known_densities({}, entry, 2) == ([0.01, 0.02], "the checkpoint's twell entry")
    for given, values in ((0.5, [0.5, 0.5]), ([0, 1], [0, 1])):
        assert known_densities({"hf_twell": {"density": given}}, entry, 2)[0] == values
    assert known_densities({"other": 1}, {}, 2) == (None, "the density is not known")
    for values, layers in (([0.01, 0.02], 3), ([0.01, 0.02], 1), ([], 2)):  # some were added since, or cut off
        says = f"the density in the checkpoint's twell entry has {len(values)} values for {layers} layers"
        assert known_densities({}, entry | {"density": values}, layers) == (None, says)
    assert known_densities({"hf_twell": {"density": 0.5}}, entry, 3)[0] == [0.5] * 3


def test_a_null_counts_as_not_given():
    entry = {"version": 1, "density": [0.01, 0.02]}
    for settings in (None, {"density": None}, {"density": None, "kernels": None}):
        assert known_settings({"hf_twell": settings}) == {}
        assert known_densities({"hf_twell": settings}, entry, 2)[0] == [0.01, 0.02]
    assert known_settings({"hf_twell": {"density": None, "kernels": False}}) == {"kernels": False}
    assert known_densities({}, entry | {"density": None}, 2) == (None, "the density is not known")


@pytest.mark.parametrize(
    ("settings", "entry", "says"),
    [
        ({"densities": 1}, {}, "it takes {'density': 0.01}"),
        (0.01, {}, "it takes {'density': 0.01}"),
        ({"density": 1.5}, {}, "gives the density as 1.5; give a number from 0 to 1, or a list of 2"),
        ({"density": [0.1]}, {}, r"\['density'\] gives the density as \[0.1\]; .* a list of 2"),
        ({"density": True}, {}, "gives the density as True"),
        ({"density": "0.1"}, {}, "gives the density as '0.1'"),
        ({"kernels": "no"}, {}, r"\['kernels'\] is 'no'; give true or false"),
        ({}, {"density": [0.1, float("nan")]}, "the checkpoint's twell entry gives the density"),
        ({}, {"density": [0.1, 0.1, 2]}, r"as \[0.1, 0.1, 2\]; give a number from 0 to 1, or a list of 2"),
    ],
)
def test_what_can_be_no_density_is_refused(settings, entry, says):
    with pytest.raises(ValueError, match=says):
        known_densities({"hf_twell": settings}, entry, 2)


@in_vllm
def test_families_give_the_tokens_of_transformers(run, tmp_path):
    """One compiled, three eager, and beside them a model with SiLU, which stays vLLM's own.

    A compiled Llama is in test_vllm_quantized.py.
    """
    runs, references = [], []
    for family in FAMILIES:
        model = tiny(family)
        path = save(model, tmp_path / family)
        references.append([expected(model, SEVERAL), expected(model, ONE)])
        options = FP32 if family == "qwen3" else FP32 | EAGER
        runs.append(
            {"model": path, "options": options, "calls": [{"prompts": SEVERAL, "logprobs": True}, {"prompts": ONE}]}
        )
    silu = tiny()
    silu.save_pretrained(tmp_path / "silu")
    runs.append({"model": str(tmp_path / "silu"), "options": FP32 | EAGER, "calls": [{"prompts": SEVERAL}]})
    *results, untouched = run(runs)
    for result, (first, second) in zip(results, references, strict=True):
        assert "error" not in result, result
        assert result["lines"] == [SPARSE_LINE + "2.00% to 2.00%, from the checkpoint's twell entry"]
        assert result["blocks"] == ["SparseFfn"] * 2
        assert result["calls"][0]["tokens"] == first["tokens"]
        assert result["calls"][1]["tokens"] == second["tokens"]
        assert distance(result["calls"][0]["logprobs"], first["logprobs"]) < SAME
        assert kernel_rows(result) == [[4, 74], [1, 25]]
    assert (untouched["lines"], untouched["blocks"]) == ([], ["LlamaMLP"] * 2)
    assert untouched["activations"] == ["SiluAndMul"] * 2
    assert untouched["calls"][0]["tokens"] == expected(silu, SEVERAL)["tokens"]


@in_vllm
def test_the_density_decides_which_way_a_block_goes(run, tmp_path):
    model = tiny()
    path, unknown = save(model, tmp_path / "sparse"), save(model, tmp_path / "unknown", density=None)
    second = save(model, tmp_path / "second", layers=[1])
    three = prompts(3)  # at three tokens no kernels pay in blocks of this size, at one they do
    tokens = expected(model, three)["tokens"]

    def override(density):
        return {"additional_config": {"hf_twell": {"density": density}}}

    sparse = [0, 1]
    cases = [
        # What is given, what the line says, and which blocks are sparse.
        (path, {}, "at densities of 2.00% to 2.00%, from the checkpoint's twell entry", sparse),
        (path, override(0.5), "they are plain ReLU blocks: they are too dense for kernels to be faster", []),
        (path, override([0.5, 0.01]), "at densities of 1.00% to 1.00%, from additional_config['hf_twell']", [1]),
        (unknown, {}, "density is not known; to use kernels, store it with `hf-twell sparsify MODEL OUT --text", []),
        (unknown, override(0), "at densities of 0.00% to 0.00%, from additional_config['hf_twell']", sparse),
        (second, {}, "the others are plain ReLU blocks: the checkpoint's twell entry leaves them out", [1]),
    ]
    runs = [{"model": each[0], "options": FP32 | EAGER | each[1], "calls": [{"prompts": three}]} for each in cases]
    results = run([*runs, {"model": path, "options": FP32 | EAGER | override([0.5]), "calls": []}])
    for (*_, line, sparse), result in zip(cases, results, strict=False):
        assert "error" not in result, result
        assert line in result["lines"][0]
        blocks = ["SparseFfn" if layer in sparse else "LlamaMLP" for layer in range(2)]
        activations = ["NoneType" if layer in sparse else "ReluAndMul" for layer in range(2)]
        assert (result["blocks"], result["activations"]) == (blocks, activations)
        asked, kernels = ([1, 3], [1]) if sparse else ([], [])
        rows = result["calls"][0]["rows"]
        assert (rows["hf_twell_vllm::ffn"], rows["hf_twell::infer"]) == (asked, kernels)
        assert result["calls"][0]["tokens"] == tokens
    assert "gives the density as [0.5]; give a number from 0 to 1, or a list of 2" in results[-1]["error"]


@in_vllm
def test_bfloat16_is_as_near_to_float32_as_vllms_own_path(run, tmp_path):
    """Which is what runs where no kernels can be had."""
    model = tiny().bfloat16()
    path = save(model, tmp_path / "model")
    truth = expected(model.float(), SEVERAL)["logprobs"]
    runs = [{"model": path, "options": BF16 | EAGER, "calls": [{"prompts": SEVERAL, "logprobs": True}]}]
    (tmp_path / "file").touch()
    with engines(tmp_path, HF_TWELL_CACHE=str(tmp_path / "file" / "no-folder")) as run_without:
        (dense,) = run_without(runs)
    (sparse,) = run(runs)
    assert "blocks: no compiled kernels could be had for cpu" in dense["lines"][0]
    assert (dense["blocks"], sparse["blocks"]) == (["LlamaMLP"] * 2, ["SparseFfn"] * 2)
    assert (kernel_rows(dense), kernel_rows(sparse)) == ([[]], [[4, 74]])
    assert sparse["norms"] == ["RMSNorm"] * 5, "on a CPU no norms are exchanged"
    errors = [distance(result["calls"][0]["logprobs"], truth) for result in (dense, sparse)]
    assert 0 < errors[1] < AS_NEAR * errors[0], errors


@in_vllm
def test_what_vllm_does_beside(run, tmp_path):
    """LoRA, biases, new weights, the prefix cache, speculation: right, by kernels or without."""
    peft = pytest.importorskip("peft")
    model, other, biased = tiny(), tiny(seed=5), tiny(mlp_bias=True)
    for layer in biased.model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            torch.nn.init.normal_(linear.bias, std=0.3)
    path, other_path, biased_path = (
        save(each, tmp_path / name) for name, each in (("model", model), ("other", other), ("biased", biased))
    )
    targets = ["gate_proj", "up_proj", "down_proj", "q_proj"]
    lora = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(tiny(hidden_act="relu"), lora).eval()
    adapted.save_pretrained(tmp_path / "lora")
    (tmp_path / "lying").mkdir()
    config = json.loads(Path(path, "config.json").read_text()) | {"hidden_act": "silu"}
    (tmp_path / "lying" / "config.json").write_text(json.dumps(config))

    long = prompts(200)
    both = [{"prompts": SEVERAL}, {"prompts": SEVERAL, "lora": str(tmp_path / "lora")}]
    # Any token that was seen before gets the three after it as a draft.
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    runs = [
        (path, {"enable_lora": True, "max_lora_rank": 8}, both),
        (biased_path, {}, [{"prompts": SEVERAL}]),
        (path, {}, [{"prompts": SEVERAL}, {"prompts": SEVERAL, "reload": other_path}]),
        (path, {}, [{"prompts": long}, {"prompts": long}]),
        (str(tmp_path / "lying"), {}, []),
        (path, {"speculative_config": ngram}, [{"prompts": long, "new_tokens": 24}]),
    ]
    runs = [{"model": where, "options": FP32 | EAGER | options, "calls": calls} for where, options, calls in runs]
    adapter, biases, reloaded, cached, lying = run(runs[:-1])
    with engines(tmp_path) as run_apart:  # drafts import numba, beside which Dynamo fails in later engines
        (speculated,) = run_apart(runs[-1:])
    tokens = expected(model, SEVERAL)["tokens"]

    assert adapter["lines"] == [PLAIN_LINE + "blocks: LoRA is on"]
    assert [call["tokens"] for call in adapter["calls"]] == [tokens, expected(adapted, SEVERAL)["tokens"]]
    assert biases["lines"] == [PLAIN_LINE + "blocks: they have biases"]
    assert biases["calls"][0]["tokens"] == expected(biased, SEVERAL)["tokens"]
    assert [call["tokens"] for call in reloaded["calls"]] == [tokens, expected(other, SEVERAL)["tokens"]]
    assert kernel_rows(reloaded) == [[4, 74]] * 2
    assert [call["tokens"] for call in cached["calls"]] == [expected(model, long)["tokens"]] * 2
    assert (cached["calls"][1]["cached"], kernel_rows(cached)) == ([128], [[1, 200], [1, 72]])
    assert "its activation is 'silu' and not 'relu'" in lying["error"]
    assert speculated["calls"][0]["tokens"] == expected(model, long, 24)["tokens"]
    assert 4 in kernel_rows(speculated)[0]  # one token and three drafts

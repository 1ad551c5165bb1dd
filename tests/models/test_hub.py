"""Publishing, against a stand-in for the Hub: what arrives, what a second process loads, and what goes wrong well.

The client runs in processes of its own, as huggingface_hub reads HF_ENDPOINT when it is imported.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
import yaml
from safetensors.torch import load

import hf_twell
from hf_twell.cli import main
from hf_twell.files.folders import save_model
from hf_twell.models import cards
from hf_twell.models.hub import folder_card
from tests.conftest import TINY, ids, logits, tiny_llama
from tests.forks import forks
from tests.hub_server import HubServer
from tests.mixtures import mixture
from tests.paths import MODEL, ROOT


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture(autouse=True)
def no_failure(hub):
    hub.fail = None
    hub.requests.clear()


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    """The demo model, sparse, on disk."""
    folder = tmp_path_factory.mktemp("hub") / "demo-relu"
    model = hf_twell.sparsify(tf.AutoModelForCausalLM.from_pretrained(MODEL))
    save_model(model, folder, tf.AutoTokenizer.from_pretrained(MODEL))
    return folder


@pytest.fixture(scope="module")
def run(hub, tmp_path_factory):
    """Python code in a process of its own, in a working directory, with the Hub."""
    folder = tmp_path_factory.mktemp("client")
    with forks(folder, hub.client_environment(folder / "home")) as run:
        yield run


def trained(folder: Path, layers=None, *, term, **arguments) -> tf.Trainer:
    """A trainer that has trained a tiny sparse model with these options of SparsityCallback, and written its card."""
    args = tf.TrainingArguments(str(folder), **{"logging_steps": 1, "use_cpu": True, "report_to": [], **arguments})
    rows = [{"input_ids": list(range(3, 15)), "labels": list(range(3, 15))}] * 24
    trainer = tf.Trainer(hf_twell.sparsify(tiny_llama(), layers=layers), args, train_dataset=rows, eval_dataset=rows)
    trainer.add_callback(hf_twell.SparsityCallback(trainer, **term))
    trainer.train()
    trainer.create_model_card(model_name="me/x")
    return trainer


def command(*arguments) -> str:
    return f"import sys; from hf_twell.cli import main; sys.exit(main({[str(a) for a in arguments]!r}))"


def run_anew(hub, tmp_path, code: str, **environment) -> subprocess.CompletedProcess:
    """With an environment of its own."""
    env = hub.client_environment(tmp_path / "home") | environment
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)


def metadata(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def contents(folder: Path) -> dict:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


LOAD = """
import sys, torch, transformers
ids = torch.randint(3, 96, (2, 11), generator=torch.Generator().manual_seed(0))
def logits(model):
    with torch.no_grad():
        return model(input_ids=ids).logits
plain = logits(transformers.AutoModelForCausalLM.from_pretrained("me/demo-relu"))
assert "hf_twell" not in sys.modules
words = transformers.AutoTokenizer.from_pretrained("me/demo-relu")("The cell")["input_ids"]
import hf_twell
model = hf_twell.TwellLlamaForCausalLM.from_pretrained("me/demo-relu", backend="reference")
assert len(hf_twell.blocks.modeling.sparse_ffns(model)) == 4
assert torch.equal(logits(model), plain)
torch.save((plain, words), "loaded.pt")
"""


def test_push(hub, sparse, tmp_path):
    before = contents(sparse)
    (tmp_path / "sparsity.json").write_text(json.dumps(figures_of_sparsity()))
    (tmp_path / "scores.json").write_text(json.dumps(figures_of_scores()))
    files = ["--sparsity", tmp_path / "sparsity.json", "--scores", tmp_path / "scores.json"]
    arguments = ["push", sparse, "me/demo-relu", "--base-model", "their/demo", *files, "--json"]
    done = run_anew(hub, tmp_path, command(*arguments), HF_HUB_VERBOSITY="debug", HF_DEBUG="1")
    assert done.returncode == 0, done.stderr
    assert hub.token not in done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["repo_id"] == "me/demo-relu"
    assert contents(sparse) == before

    published = hub.repos["me/demo-relu"]
    assert set(published) == set(before) | {"README.md"} == set(result["files"])
    config = json.loads(published["config.json"])
    assert (config["architectures"], config["hidden_act"]) == (["LlamaForCausalLM"], "relu")
    text = published["README.md"].decode()
    assert metadata(text)["base_model"] == "their/demo"
    loads = ('from_pretrained("me/demo-relu")', "hf_twell.sparsify(model)")
    for needed in ("12.5 |", *loads, "| arc_easy |", "0.4210 ± 0.0123"):
        assert needed in text


@pytest.mark.slow
def test_push_then_load_by_hub_id(hub, sparse, tmp_path, run):
    done = run(command("push", sparse, "me/demo-relu"), tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(LOAD, tmp_path)
    assert done.returncode == 0, done.stderr
    plain, words = torch.load(tmp_path / "loaded.pt")
    assert torch.equal(plain, logits(tf.AutoModelForCausalLM.from_pretrained(sparse)))
    assert words == tf.AutoTokenizer.from_pretrained(sparse)("The cell")["input_ids"]


PUSH_ALL = """
import sys, torch, hf_twell
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
import peft
sys.path.insert(0, {root!r})
from tests.conftest import tiny_llama
tiny_llama().save_pretrained("dense")
rows = [{{"input_ids": torch.arange(3, 15), "labels": torch.arange(3, 15)}}] * 8

def trainer_for(model, name):
    args = TrainingArguments(name, max_steps=2, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no",
                             hub_model_id=f"me/{{name}}", disable_tqdm=True)
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.add_callback(hf_twell.SparsityCallback(trainer, l1_weight=2e-4))
    if name != "unnamed":
        hf_twell.use_model_card(trainer, base_model="their/base")
    trainer.train()
    trainer.push_to_hub()

sparse = lambda: hf_twell.sparsify(AutoModelForCausalLM.from_pretrained("dense"))
lora = lambda: peft.get_peft_model(sparse(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["gate_proj"]))
trainer_for(sparse(), "trained")
trainer_for(sparse(), "unnamed")
trainer_for(lora(), "trained-lora")
twell = hf_twell.TwellLlamaForCausalLM.from_pretrained("dense")
twell.push_to_hub("me/custom", sparsity=hf_twell.measure_sparsity(twell, [torch.arange(3, 50)[None]]))
try:
    hf_twell.push_to_hub(lora(), "me/lora")
except ValueError as error:
    assert "its base 'dense' is no name on the Hub" in str(error)
tokenizer = AutoTokenizer.from_pretrained({demo!r})
hf_twell.push_to_hub(lora(), "me/lora", tokenizer, base_model="me/base")
tiny_llama().push_to_hub("me/base")
stock = hf_twell.sparsify(AutoModelForCausalLM.from_pretrained("dense"))
hf_twell.push_to_hub(stock, "me/stock", tokenizer, base_model="their/base")
stock.config._name_or_path = "their/parent"  # as where it was loaded from the Hub
options = dict(commit_message="first", commit_description="of two", private=True, token=True, create_pr=False)
stock.push_to_hub("me/own-method", max_shard_size="20KB", tags=["mine"], **options)
assert stock.push_to_hub("me/own-method", create_pr=True, tags=["later"])["url"].endswith("me/own-method/discussions/1")
hf_twell.unpatch(stock).push_to_hub("me/unpatched")
hf_twell.sparsify(stock).push_to_hub("me/unpatched")
"""


@pytest.mark.slow
def test_trainer_models_and_adapters(hub, tmp_path, run):
    done = run(PUSH_ALL.format(root=str(ROOT), demo=str(MODEL)), tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.token not in done.stdout + done.stderr
    truth = logits(hf_twell.sparsify(tiny_llama().eval(), backend="reference"))
    for name in ("trained", "unnamed", "custom", "stock", "own-method", "unpatched"):
        published = hub.repos[f"me/{name}"]
        config = json.loads(published["config.json"])
        assert (config["architectures"], config["hidden_act"]) == (["LlamaForCausalLM"], "relu"), name
        assert "hf_twell" in metadata(published["README.md"].decode())["tags"], name
        assert "hf_twell.sparsify(model)" in published["README.md"].decode(), name
        if name in ("custom", "stock", "unpatched"):
            model = tiny_llama(hidden_act="relu").eval()
            model.load_state_dict(load(published["model.safetensors"]))
            assert torch.equal(logits(model), truth)
    trained = hub.repos["me/trained"]["README.md"].decode()
    assert metadata(trained)["base_model"] == "their/base"
    assert "| coefficient of the L1 term | 0.0002 |" in trained
    assert "| optimizer steps | 2 |" in trained
    assert "dead neurons measured in training, over the tokens of the last log (step 2)" in trained
    assert "## Evaluation" not in trained
    assert "Measured on 47 tokens." in hub.repos["me/custom"]["README.md"].decode()
    stock = hub.repos["me/stock"]["README.md"].decode()
    assert "## Sparsity" not in stock, "nothing was measured"
    assert metadata(stock)["base_model"] == "their/base"
    for name in ("stock", "lora"):
        assert "tokenizer.json" in hub.repos[f"me/{name}"], name
    assert "model.safetensors.index.json" in hub.repos["me/own-method"]
    assert hub.private == {"me/own-method"}
    assert hub.messages["me/own-method"] == ("first", "of two")
    assert hub.messages["me/stock"][0] == "Upload sparse model"
    own = metadata(hub.repos["me/own-method"]["README.md"].decode())
    assert own["base_model"] == "their/parent"
    tags = own["tags"]
    assert "mine" in tags
    assert "later" not in tags, "that one is in a pull request"
    assert "automatically generated" not in hub.repos["me/unpatched"]["README.md"].decode(), "ours replaces it"

    for name in ("trained-lora", "lora"):
        published = hub.repos[f"me/{name}"]
        assert "AutoPeftModel" in published["README.md"].decode()
        assert json.loads(published["adapter_config.json"])["base_sparsified_by_hf_twell"]["version"] == 1
        assert str(tmp_path) not in published["README.md"].decode()
    for names in ('"me/trained-lora", "dense"', '"me/lora"'):  # the latter as its card says, with the base it names
        code = f"import hf_twell; model = hf_twell.load_adapter({names})"
        done = run(f"{code}; print(len(hf_twell.blocks.modeling.sparse_ffns(model)))", tmp_path)
        assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


@pytest.mark.slow
def test_a_checkpoint_leaves_its_training_behind(hub, sparse, tmp_path, run):
    """Its optimizer and pickles, its own README.md, and what is hidden; on the branch and with the words asked for."""
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(sparse, folder)
    rest = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "old.pkl", "trainer_state.json")
    for name in (*rest, "README.md", ".env", "_private.txt"):
        (folder / name).write_text("left out")
    (folder / "twell_state.json").write_text(json.dumps({"l1_weight": 0.5, "step": 2}))
    (folder / "runs").mkdir()
    (folder / "runs" / "events").write_text("left out")
    (tmp_path / "card.md").write_text("mine")
    arguments = ["push", folder, "me/checkpoint", "--card", tmp_path / "card.md", "--private", "--message", "words"]
    done = run(command(*arguments, "--revision", "try"), tmp_path)
    assert done.returncode == 0, done.stderr
    published = hub.repos["me/checkpoint@try"]
    assert set(published) == set(contents(sparse)) | {"README.md"}
    assert published["README.md"] == b"mine"
    assert hub.repos["me/checkpoint"] == {}, "main, which was not asked for"
    assert "me/checkpoint" in hub.private
    assert hub.messages["me/checkpoint@try"][0] == "words"
    commit = hub.commits["me/checkpoint@try"][:8]
    assert done.stdout == f"{hub.endpoint}/me/checkpoint: {len(published)} files, commit {commit}\n"


@pytest.mark.slow
def test_every_chat_template_is_published(hub, tmp_path, run):
    """Transformers writes all but the first into a folder of their own."""
    tokenizer = tf.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    save_model(hf_twell.sparsify(tiny_llama()), tmp_path / "sparse", tokenizer)
    done = run(command("push", tmp_path / "sparse", "me/tools"), tmp_path)
    assert done.returncode == 0, done.stderr
    published = hub.repos["me/tools"]
    assert published["chat_template.jinja"] == b"{{ messages }}"
    assert published["additional_chat_templates/tool_use.jinja"] == b"{{ tools }}"


PUSH_NAMED = """
import sys, torch, hf_twell, peft
sys.path.insert(0, {root!r})
from tests.conftest import tiny_llama
config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["gate_proj"])
model = peft.get_peft_model(hf_twell.sparsify(tiny_llama()), config, adapter_name="named")
hf_twell.push_to_hub(model, "me/named", base_model="me/base")
model = peft.get_peft_model(hf_twell.sparsify(tiny_llama()), config)
model.add_adapter("better", peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["gate_proj"]))
hf_twell.push_to_hub(model, "me/first", base_model="me/base")
model.set_adapter("better")
hf_twell.push_to_hub(model, "me/better", base_model="me/base")
own = hf_twell.sparsify(tiny_llama())
own.add_adapter(config, adapter_name="own")
hf_twell.push_to_hub(own, "me/own", base_model="me/base")
model.base_model.set_adapter(["default", "better"])
try:
    hf_twell.push_to_hub(model, "me/both", base_model="me/base")
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_active_adapter_is_published(hub, tmp_path, run):
    done = run(PUSH_NAMED.format(root=str(ROOT)), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the adapters default, better are active together")
    assert "me/both" not in hub.repos
    for name, rank in (("named", 2), ("own", 2), ("first", 2), ("better", 3)):
        published = hub.repos[f"me/{name}"]
        files = set(published) - {"generation_config.json"}  # which Transformers saves beside an adapter of its own
        assert files == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
        assert {min(weights.shape) for weights in load(published["adapter_model.safetensors"]).values()} == {rank}
        config = json.loads(published["adapter_config.json"])
        assert (config["r"], config["base_sparsified_by_hf_twell"]["version"]) == (rank, 1)
        assert f'load_adapter("me/{name}")' in published["README.md"].decode()


@pytest.mark.slow
def test_an_upload_that_breaks_off(hub, sparse, tmp_path, run):
    before = contents(sparse)
    hub.fail = ("POST", "/commit/", 507)
    done = run(command("push", sparse, "me/broken"), tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hf-twell: error")]
    assert "do the same again" in line
    assert "Traceback" not in done.stderr
    assert hub.token not in done.stdout + done.stderr
    assert contents(sparse) == before
    assert hub.repos["me/broken"] == {}, "all files arrive in one commit, or none"

    hub.fail = None
    hub.requests.clear()
    done = run(command("push", sparse, "me/broken"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert not [request for request in hub.requests if request.startswith("PUT")], "the weights had arrived"
    assert "model.safetensors" in hub.repos["me/broken"]


PUSH_FOLDER = "from hf_twell.models.hub import push_folder; push_folder({folder!r}, 'me/refused')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "advice"), [(401, "hf auth login"), (403, "hf auth login"), (500, "the same again")]
)
def test_a_refusal_does_not_show_the_token(hub, sparse, tmp_path, status, advice, run):
    """Nor does the traceback of a script."""
    hub.fail = ("POST", "/api/repos/create", status)
    done = run(PUSH_FOLDER.format(folder=str(sparse)), tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert hub.token not in done.stdout + done.stderr
    assert f"OSError: me/refused: the {'Hub refused' if status < 500 else 'upload broke off'} (" in done.stderr
    assert advice in done.stderr
    assert "me/refused" not in hub.repos


@pytest.mark.slow
def test_no_server(hub, sparse, tmp_path):
    done = run_anew(hub, tmp_path, command("push", sparse, "me/x"), HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "the upload broke off" in done.stderr
    assert "Traceback" not in done.stderr


# The card and what is refused before anything is sent; no Hub is needed for these.


def figures_of_sparsity(layers=4) -> dict:
    rows = [{"l0": 12.5 + i, "density": 0.0125, "dead": 0.1, "intermediate_size": 1000} for i in range(layers)]
    return {"tokens": 1234, "l0": 14.0, "density": 0.014, "dead": 0.1, "layers": rows, "files": ["/home/x/notes.txt"]}


def figures_of_scores() -> dict:
    metrics = {"acc": {"value": 0.421, "stderr": 0.0123}, "acc_norm": {"value": None, "stderr": None}}
    task = {"version": 1.0, "num_fewshot": 5, "split": "test", "n_samples": 2376, "metrics": metrics}
    loss = {"tokens": 5000, "nats_per_token": 3.21, "perplexity": 24.8, "bits_per_byte": None}
    common = {"dtype": "bfloat16", "batch_size": 8, "limit": None}
    return {**common, "tasks": {"arc_easy": task}, "text": {"/home/x/book.txt": loss}}


def tiny_model(cls, act="silu"):
    """Random, on a Llama; one that sees has a deeper and wider part for that."""
    text = tf.LlamaConfig(**TINY, hidden_act=act)
    if cls is not tf.LlavaForConditionalGeneration:
        return cls(text).eval()
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    return cls(tf.LlavaConfig(vision_config=tf.CLIPVisionConfig(**sizes, num_hidden_layers=4), text_config=text)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("cls", [tf.LlamaModel, tf.LlamaForSequenceClassification, tf.LlavaForConditionalGeneration])
def test_models_of_other_tasks_are_checked_and_loaded_as_what_they_are(cls, hub, tmp_path, run):
    """AutoModelForCausalLM would drop a reward model's head, and knows no models that see."""
    hf_twell.sparsify(tiny_model(cls)).save_pretrained(tmp_path / "model")
    text = folder_card(tmp_path / "model", "me/x")
    assert "AutoModelForCausalLM" not in text
    assert "pipeline_tag" not in metadata(text)
    code = re.search(r"```python\n(.*?)tokenizer =", text, re.DOTALL)[1]
    exec(code.replace('"me/x"', repr(str(tmp_path / "model"))), names := {})
    assert type(names["model"]) is cls
    twin = tiny_model(cls, "relu")
    twin.load_state_dict(names["model"].state_dict())
    torch.testing.assert_close(*(each(input_ids=ids())[0] for each in (names["model"], twin)))
    done = run(command("push", "model", "me/reward", "--json"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.repos["me/reward"]["README.md"].decode() == text.replace("me/x", "me/reward").replace("# x", "# reward")
    done = run(command("sparsify", "model", "other"), tmp_path)
    assert done.returncode == 1
    assert f"is a {cls.__name__}, and only causal language models are taken here; load it from Python" in done.stderr
    assert not (tmp_path / "other").exists()


def test_what_was_not_measured_is_absent():
    config = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 1000}
    config["architectures"] = ["LlamaForCausalLM"]
    bare = cards.model_card("me/x", config)
    for absent in ("## Sparsity", "## Evaluation", "base model", "L1 term", "base_model", "None", "$"):
        assert absent not in bare
    text = cards.model_card("me/x", config, sparsity=figures_of_sparsity(), scores=figures_of_scores())
    assert "Measured on 1,234 tokens of `notes.txt`." in text
    assert text.count("| 12.5 |") == 1
    assert "acc_norm" not in text
    assert "book.txt" not in text, "one of its figures is not finite"
    assert "/home/x" not in text
    assert "| mean | 14.0 |  | 1.40 % | 10.00 % |" in text
    assert "| arc_easy | test | 5 | 2376 | acc | 0.4210 ± 0.0123 |" in text
    assert "In bfloat16, batch size 8." in text
    partial = {**figures_of_sparsity(), "partial": True}
    limited = {**figures_of_scores(), "dtype": "float32", "limit": 20}
    text = cards.model_card("me/x", config, sparsity=partial, scores=limited)
    assert "Measured on 1,234 tokens of `notes.txt`, reading only part of it." in text
    assert "In float32, batch size 8; only the first 20 rows or documents of each." in text
    assert "| shape | 4 layers, D=64, F=1,000 |" in text
    whole = {"text_config": config, "twell": {"layers": [0, 3]}, "architectures": ["Gemma3ForConditionalGeneration"]}
    text = cards.model_card("me/x", whole)
    assert "| shape | 4 layers, D=64, F=1,000 |" in text
    assert "| kernels and L1 term on layers | 0, 3 |" in text
    assert cards.CLAUSES["l1"] not in cards.model_card("me/x", config, method={"step": 10}), "nor was it trained so"
    text = cards.model_card("me/x", {**config, "quantization_config": {"quant_method": "bitsandbytes"}})
    assert "| quantized weights | bitsandbytes |" in text
    assert "it needs what reads bitsandbytes, and no remote code:" in text
    method = {"l1_weight": 2e-4, "step": 1000, "warmup_steps": 50, "warmup": "sine"}
    text = cards.model_card("me/x", config, method=method)
    assert "| coefficient of the L1 term | 0.0002 after a sine warm-up over 50 steps |" in text


def test_names_in_a_card_are_the_hubs_and_break_no_table(tmp_path, monkeypatch):
    """A folder here of the same name is no model there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their" / "demo").mkdir(parents=True)
    for base, named in (("their/base", True), ("their/demo", False), ("/their/base", False), ("./base", False)):
        for text in (cards.model_card("me/x", {}, base_model=base), cards.adapter_card(base, "me/x")):
            assert metadata(text).get("base_model") == (base if named else None)
            assert (base in text) == named
    scores = {**figures_of_scores(), "text": {}}
    scores["tasks"]["a|b"] = scores["tasks"].pop("arc_easy")
    assert "| a\\|b | test | 5 |" in cards.model_card("me/x", {}, scores=scores)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mixtral", "2 layers, D=32; 6 experts of F=40 (2 a token) in each"),
        ("qwen2_moe", "2 layers, D=32; 6 experts of F=24 (2 a token) and `shared_expert` of F=16 in each"),
        ("qwen3_moe", "2 layers, D=32; F=40 in 1; 6 experts of F=24 (2 a token) in 1"),
        ("llama4_text", "4 layers, D=32; F=48 in 2; 6 experts of F=40 (2 a token) and `shared_expert` of F=40 in 2"),
        ("qwen3_vl_moe", "2 layers, D=32; 6 experts of F=24 (2 a token) in each"),
        ("qwen3_5_moe_text", "4 layers, D=32; 6 experts of F=24 (2 a token) and `shared_expert` of F=16 in each"),
    ],
)
def test_the_card_of_a_mixture_says_which_blocks_there_are(name, shape, tmp_path):
    """Its config may name no width of a block, or that of blocks that no layer has."""
    model = mixture(name)
    stock = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    assert f"| shape | {shape} |" in cards.model_card("me/x", stock)
    hf_twell.sparsify(model).save_pretrained(tmp_path)
    assert f"| shape | {shape} |" in folder_card(tmp_path, "me/x")


def test_a_mixture_that_cannot_be_made_is_told_as_such():
    config = mixture("mixtral").config.to_dict() | {"num_attention_heads": 0}
    with pytest.raises(ValueError, match=r"^no mixtral can be made of config.json \(ZeroDivisionError: "):
        cards.model_card("me/x", config)


def test_the_card_tells_unions_beside_the_density():
    config = tf.LlamaConfig(num_hidden_layers=2, hidden_act="relu").to_dict()
    sparsity = figures_of_sparsity(2) | {"unions": {"16": 0.05, "64": 0.101, "128": None}}
    of_no_layer = cards.model_card("me/model", config, sparsity=sparsity)
    assert "union" not in of_no_layer.partition("## Sparsity")[2]
    for index, row in enumerate(sparsity["layers"]):
        row["unions"] = {"16": 0.04, "64": 0.1 + index / 100, "128": None}
    card = cards.model_card("me/model", config, sparsity=sparsity)
    assert "| union of 16 / 64 / 128 tokens, measured | 5.0 / 10.1 / n/a % |" in card
    assert "| 1 | 13.5 | 1000 | 1.25 % | 4.0 / 11.0 / n/a % | 10.00 % |" in card
    assert "| mean | 14.0 |  | 1.40 % | 5.0 / 10.1 / n/a % | 10.00 % |" in card
    for row in (sparsity, *sparsity["layers"]):  # as JSON with sorted keys has them
        row["unions"] = dict(sorted(row["unions"].items()))
    assert cards.model_card("me/model", config, sparsity=sparsity) == card
    stored = {"density": [0.0125, 0.0155], "unions": {"128": [0.2, 0.3], "16": [0.04, 0.06], "64": [0.1, 0.11]}}
    card = cards.model_card("me/model", config | {"twell": stored})
    assert "| union of 16 / 64 / 128 tokens, measured | 5.0 / 10.5 / 25.0 % |" in card


def test_the_card_warns_of_engines_that_assume_silu():
    text = cards.model_card("me/x", {"architectures": ["LlamaForCausalLM"]})
    warning = " ".join(line.removeprefix("> ") for line in text.splitlines() if line.startswith("> "))
    assert "need ReLU" in warning
    assert "wrong outputs without an error" in warning
    silent = ("llama.cpp", "Ollama", "MLX LM", "CTranslate2", "ExLlamaV2", "TensorRT-LLM")
    serving = (MODEL.parents[2] / "docs" / "serving.md").read_text()
    for engine in silent:
        assert engine in warning
        assert re.search(rf"^\| {engine}\b.*in silence", serving, re.MULTILINE), "the page says the same"


UNION = {"target_union": 0.3, "term": "count", "share": 4}


@pytest.mark.parametrize(
    ("options", "clause", "aim"),
    [
        ({"target_density": 0.02}, "l1", "| density aimed at | 2.00 %"),
        (UNION, "count", "| active in any of 4 tokens, aimed at | 30.00 %"),
    ],
)
def test_the_card_of_a_run_to_a_target_says_so(options, clause, aim, tmp_path):
    trained(tmp_path, term=options, max_steps=2, save_steps=2)
    for text in ((tmp_path / "README.md").read_text(), folder_card(tmp_path / "checkpoint-2", "me/x")):
        assert cards.CLAUSES[clause] in text
        assert f"{aim} after a linear warm-up over 0.1 of the steps |" in text
        assert ("tokens pressed to share their neurons | 4 |" in text) == ("share" in options)


@pytest.mark.parametrize(("layers", "log_layers"), [(None, True), ([0], True), (None, False)])
def test_a_card_tells_what_training_logged_of_every_layer_or_nothing(tmp_path, layers, log_layers):
    trained(tmp_path, layers, term={"l1_weight": 1.0, "log_layers": log_layers}, max_steps=2, save_strategy="no")
    text = (tmp_path / "README.md").read_text()
    assert ("(step 2)" in text) == ("## Sparsity" in text) == (layers is None and log_layers)
    assert ("| kernels and L1 term on layers | 0 |" in text) == (layers is not None)


def test_the_card_of_the_best_checkpoint_tells_its_own_steps(tmp_path):
    best_at_end = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 1.0}
    evaluated = {"max_steps": 3, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, **best_at_end}
    trainer = trained(tmp_path, term={"l1_weight": 0}, **evaluated)
    best = trainer.state.best_global_step
    assert best < trainer.state.global_step, "a learning rate of 1 makes it worse"
    text = (tmp_path / "README.md").read_text()
    assert f"(step {best})" in text
    assert f"| optimizer steps | {best} |" in text


@pytest.mark.parametrize("figures", [{"sparsity": {"l0": 1}}, {"scores": {"tasks": {}}}])
def test_the_card_of_an_adapter_has_no_figures(tmp_path, figures):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["gate_proj"])
    hf_twell.save_adapter(peft.get_peft_model(hf_twell.sparsify(tiny_llama()), config), tmp_path / "lora")
    with pytest.raises(ValueError, match="the card of an adapter holds no figures"):
        folder_card(tmp_path / "lora", "me/x", base_model="me/base", **figures)


@pytest.mark.parametrize("told", ["before the callback", "after it", "never"])
def test_a_card_that_was_asked_for_outlasts_the_callback(tmp_path, told):
    args = tf.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = tf.Trainer(hf_twell.sparsify(tiny_llama()), args)

    def written_card():
        trainer.create_model_card(model_name="me/x")
        return (tmp_path / "README.md").read_text()

    if told == "before the callback":
        hf_twell.use_model_card(trainer, base_model="their/base")
    hf_twell.SparsityCallback(trainer, l1_weight=1.0)
    if told == "after it":
        hf_twell.use_model_card(trainer, base_model="their/base")
    callback = hf_twell.SparsityCallback(trainer, l1_weight=2.0)  # replaces the one before
    text = written_card()
    assert "| coefficient of the L1 term | 2 |" in text
    assert metadata(text).get("base_model") == (None if told == "never" else "their/base")
    callback.detach()
    if told == "never":
        assert "create_model_card" not in vars(trainer), "it is Trainer's own again"
    else:
        assert metadata(written_card())["base_model"] == "their/base"


def test_figures_of_another_model_are_refused(sparse, tmp_path, error_line):
    for name, content, message in (
        ("layers", json.dumps(figures_of_sparsity(3)), "of 3 layers, the model has 4"),
        ("dense", json.dumps({**figures_of_sparsity(4), "activation": "silu"}), "of a model with silu: run"),
        ("scores", json.dumps(figures_of_scores()), "no figures of sparsity"),
        ("text", "none", "is no JSON"),
        ("list", "[]", "holds no JSON object"),
    ):
        path = tmp_path / name
        path.write_text(content)
        assert message in error_line("push", sparse, "me/x", "--dry-run", "--sparsity", path)
    assert "no file at" in error_line("push", sparse, "me/x", "--dry-run", "--scores", tmp_path / "absent")


def test_real_figures(sparse, tmp_path, capsys):
    """From `hf-twell inspect` and `hf-twell eval` themselves, into the card."""
    (tmp_path / "notes.txt").write_text((MODEL.parent / "text" / "heldout.txt").read_text()[:4000])
    text = ["--text", str(tmp_path / "notes.txt"), "--device", "cpu"]
    assert main(["inspect", str(sparse), *text, "--output", str(tmp_path / "sparsity.json")]) == 0
    assert main(["eval", str(sparse), *text, "--output", str(tmp_path / "scores.json")]) == 0
    capsys.readouterr()
    files = ["--sparsity", str(tmp_path / "sparsity.json"), "--scores", str(tmp_path / "scores.json")]
    assert main(["push", str(sparse), "me/x", "--dry-run", *files]) == 0
    printed = capsys.readouterr().out
    measured = json.loads((tmp_path / "sparsity.json").read_text())
    for index, layer in enumerate(measured["layers"]):
        assert f"| {index} | {layer['l0']:.1f} | 1024 |" in printed
    loss = json.loads((tmp_path / "scores.json").read_text())["text"][str(tmp_path / "notes.txt")]
    assert f"| notes.txt | {loss['tokens']:,} | {loss['nats_per_token']:.4g} |" in printed


def test_a_dry_run_refuses_what_publishing_would_and_shows_the_card_that_is_given(sparse, tmp_path, capsys, error_line):
    for name in ("me/x/y", "my model", "relu"):
        assert name in error_line("push", sparse, name, "--dry-run")
    card = tmp_path / "card.md"
    assert "card.md" in error_line("push", sparse, "me/x", "--dry-run", "--card", card)
    card.write_text("mine")
    assert main(["push", str(sparse), "me/x", "--dry-run", "--card", str(card)]) == 0
    assert capsys.readouterr().out == "mine"


def test_folders_that_are_refused(sparse, tmp_path, error_line):
    torn, bare = (Path(shutil.copytree(sparse, tmp_path / name)) for name in ("torn", "bare"))
    (torn / "model.safetensors").write_bytes((sparse / "model.safetensors").read_bytes()[:1000])
    (bare / "model.safetensors").unlink()
    for folder, says in (
        (MODEL, "is no sparse model"),
        (tmp_path / "absent", "is no model folder"),
        (torn, "no whole safetensors file"),
        (bare, "holds no model.safetensors"),
    ):
        assert says in error_line("push", folder, "me/x", "--dry-run")
    assert "not a name" in error_line("push", sparse, "not a name", "--json")
    for model in (tiny_llama(), tf.AutoTokenizer.from_pretrained(MODEL)):
        with pytest.raises(ValueError, match="has no sparse blocks"):
            hf_twell.push_to_hub(model, "me/x")


def test_a_model_is_checked_before_anything_is_sent():
    """And an adapter."""
    peft = pytest.importorskip("peft")
    model = hf_twell.sparsify(tiny_llama())
    with pytest.raises(ValueError, match="write USER/mine"):
        hf_twell.push_to_hub(model, "mine")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up_proj"]))
    with pytest.raises(ValueError, match="is no name on the Hub"):
        hf_twell.push_to_hub(adapted, "me/mine", tf.AutoTokenizer.from_pretrained(MODEL))

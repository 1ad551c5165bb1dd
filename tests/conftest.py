import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

# Tiny matrices are slowest where several threads and processes share two cores; `make test` runs two processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing in the tests may reach the network.
os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false"
)

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_twell.cli import main
from hf_twell.dispatch import limits
from hf_twell.ops import api
from tests.ffn_cases import DTYPES, ISAS
from tests.paths import HELDOUT, MODEL, ROOT

# Else DeepSpeed, where it is installed, warns on the stdout of whichever test imports it first.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

COMMAND = [sys.executable, "-m", "hf_twell"]  # `hf-twell` in a process of its own
SHARED = ROOT.parent / "shared"
needs_lm_eval = pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="needs lm-eval")


def finished(*command, **options) -> subprocess.CompletedProcess:
    """A command that has run in a process of its own, by this checkout; with other options of `subprocess.run`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, **options)


def started(*arguments, **options) -> subprocess.Popen:
    """`hf-twell` in a process of its own, by this checkout, which Ctrl-C reaches; with other options of `Popen`."""
    options["env"] = {**os.environ, "PYTHONPATH": str(ROOT)} | options.get("env", {})
    # A shell that runs the tests in the background has them ignore the signal, and children inherit that.
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([*COMMAND, *map(str, arguments)], **options)


def in_two_processes(*module) -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m")
    done = finished(*launch, *module, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]


def fsdp2(mixed_precision: str) -> list:
    """How the recipe for FSDP2 starts a script, which follows, in two processes on a CPU."""
    config = str(ROOT / "recipes" / "accelerate" / "fsdp2.yaml")
    launch = ["-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "2"]
    return [*launch, "--mixed_precision", mixed_precision, ROOT / "tests" / "fsdp_on_cpu.py"]


def leave(results, path) -> None:
    """Ends a process of a group, whose first writes the results."""
    if torch.distributed.get_rank() == 0:
        torch.save(results, path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort the interpreter's own shutdown


def write_recipe(folder: Path, settings: str, documents: int) -> Path:
    """Of four short steps on the demo model and on text of its own, with these lines of further settings."""
    texts = HELDOUT.read_text().split("<|endoftext|>\n")
    for name, count, length in (("train", documents, 1500), ("heldout", 2, 600)):
        (folder / f"{name}.txt").write_text("<|endoftext|>\n".join(text[:length] for text in texts[:count]))
    path = folder / "recipe.yaml"
    path.write_text(
        f"model: {MODEL}\noutput_dir: out\ntrain: train.txt\nheldout: [heldout.txt]\nsequence_length: 32\n"
        "training: {max_steps: 4, per_device_train_batch_size: 2, logging_steps: 1, save_steps: 2, use_cpu: true}\n"
        f"{settings}\n"
    )
    return path


def one_of(fast, cases) -> list:
    """Parameters of a test of which one is in `make test` and the others are in `make test-all` alone."""
    assert fast in cases
    return [case if case == fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def shared_path(relative: str) -> Path:
    """A real input beside the repository, or a skip that names what is missing."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"needs ../shared/{relative}, which is not beside this repository")
    return path


@pytest.fixture(autouse=True)
def kernels_at_every_size(monkeypatch):
    """Tests' blocks are smaller than those that "auto" leaves to plain matmuls; `monkeypatch.undo()` leaves these."""
    monkeypatch.setitem(limits.read(), "kCpuCachedElements", 0)
    monkeypatch.setitem(limits.read(), "kCpuSmallestH", 0)


@pytest.fixture
def poisoned_buffers():
    """Deterministic mode fills fresh memory with NaN, so a cell that no kernel writes fails the test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """What one test compiles would count towards the next one's limit of compilations, in any order of tests."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def one_thread():
    """The number of threads decides the order of sums, and on tiny models threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    """The CPU kernels of one instruction set; a skip where this processor lacks it."""
    monkeypatch.setenv("HF_TWELL_CPU_ISA", request.param)
    try:
        api.ffn(torch.zeros(1, 8), torch.zeros(4, 8), torch.zeros(8, 4), backend="cpu")
    except RuntimeError as error:
        if "cannot run here" not in str(error):
            raise
        pytest.skip(str(error))
    return request.param


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture
def run_json(capsys):
    """A function: what `hf-twell` prints as JSON for these arguments."""

    def run(*arguments) -> dict:
        capsys.readouterr()
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def error_line(capsys):
    """A function: the one line in which `hf-twell` with these arguments ends, after whatever it did before."""

    def run(*arguments) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert [line for line in lines if line.startswith("hf-twell: error: ")] == lines[-1:]
        assert not any("Traceback" in line for line in lines)
        return lines[-1]

    return run


@pytest.fixture(scope="module")
def tokenizer():
    """That of the demo model."""
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def stories() -> Path:
    """A really trained Llama of 260K parameters (F=172, 5 layers, fp32)."""
    return shared_path("data/stories260K-hf")


@pytest.fixture
def stories_model(stories):
    return AutoModelForCausalLM.from_pretrained(stories)


TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def tiny_llama(**changes) -> LlamaForCausalLM:
    """A random Llama with weights large enough that every neuron sees both signs."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **changes}))


def relu_llama() -> LlamaForCausalLM:
    """The weights of `tiny_llama()` as a stock dense ReLU model."""
    model = tiny_llama(hidden_act="relu").eval()
    model.load_state_dict(tiny_llama().state_dict())
    return model


def ids(length: int = 11) -> torch.Tensor:
    """Token ids for a tiny model, (2, length)."""
    return torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model, length: int = 11) -> torch.Tensor:
    return model(input_ids=ids(length)).logits


def training_rows(trainer) -> dict[int, dict]:
    """The log rows of the steps of a training, by step."""
    return {row["step"]: row for row in trainer.state.log_history if "loss" in row}

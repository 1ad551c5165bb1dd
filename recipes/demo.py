"""From dense to sparse, to disk and back, and how fast it is, in a few minutes on a CPU: what `make demo` runs.

A small pretrained SiLU Llama generates. Its activation becomes ReLU, and it is converted as `recipes/demo.yaml` says.
The sparse model is saved, and plain Transformers, in a process of its own that never imports this package, must compute
the very same logits from the folder. Quality stands beside the dense model's, and speed beside dense blocks'.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hf_twell.cli.endings import ending_in_one_line
from hf_twell.cli.output import quiet_others

quiet_others()  # before the imports that would warn

import matplotlib
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

import hf_twell
from hf_twell.bench.block import bench_ffn
from hf_twell.bench.generate import bench_generate
from hf_twell.bench.models import Checkpoint
from hf_twell.bench.wanted import Wanted
from hf_twell.files.tables import percent, text_table
from hf_twell.ops import build
from hf_twell.recipe.finetune import finetune
from hf_twell.recipe.packing import PackedText
from hf_twell.recipe.schema import load_recipe

PROMPT = "Once upon a time, there was a little girl"
BLOCK = {"hidden": 2048, "intermediate": 5632}  # that of docs/bench.md
NEXT = """
next:
  ask this model:              .venv/bin/hf-twell serve {model}
  what would yours lose?       .venv/bin/hf-twell inspect YOUR_MODEL --text YOUR_TEXT.txt
  convert it, or train anew:   README.md, "Try it\""""
PLAIN_TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM
folder, inputs, output = sys.argv[1:]
with torch.no_grad():
    torch.save(AutoModelForCausalLM.from_pretrained(folder)(torch.load(inputs)).logits, output)
assert "hf_twell" not in sys.modules
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="in place of the values of recipes/demo.yaml")
    changes = parser.parse_args().changes
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    started = time.monotonic()
    recipe = load_recipe(Path(os.path.relpath(Path(__file__).with_name("demo.yaml"))), changes)
    build.status("cpu", build=True)  # a minute, once per user
    heldout = PackedText(AutoTokenizer.from_pretrained(recipe.model), recipe.heldout, recipe.sequence_length)

    say(f"1. The dense model {recipe.model} goes on from {PROMPT!r}")
    print(sample(recipe.model))

    say("2. SiLU becomes ReLU, and the model is trained to few active neurons; the dense model teaches")
    result = finetune(recipe, overwrite=True, heldout=heldout)
    print(f"loss and active neurons by step: {draw(result['logs'], Path(recipe.output_dir) / 'training.png')}")
    print(f"\nthe sparse model goes on:\n{sample(result['model'])}")

    say("3. Plain Transformers, without hf_twell, loads the saved model")
    check_reload(result["model"], heldout.sequences[:2])
    print(f"equal logits, to the last bit. The model is in {result['model']}")

    say(f"4. Speed on this machine's CPU, {torch.get_num_threads()} threads (medians; dense and sparse in turns)")
    swapped, sparse = (result[when]["sparsity"] for when in ("before", "after"))
    print(speed(result["model"], heldout.sequences[0], sparse["density"]))

    say(f"5. Quality on held-out text ({sparse['tokens']:,} tokens)")
    every = {"l0": AutoConfig.from_pretrained(recipe.model).intermediate_size, "density": 1.0}
    models = {
        "dense (SiLU)": (result["dense"], every),
        "swapped to ReLU, untrained": (result["before"], swapped),
        "sparse: ReLU, trained": (result["after"], sparse),
    }
    headers = ["model", "loss", "perplexity", "active neurons per token (L0)", "density"]
    print(text_table(headers, [quality(name, *figures) for name, figures in models.items()]))
    print("\nThe dense model is better: this training, short as its warning says, shows how it works, not its cost.")
    print(f"\ndone in {time.monotonic() - started:.0f} s")
    print(NEXT.format(model=result["model"]))
    return 0


def quality(name: str, figures: dict, sparsity: dict) -> list:
    return [name, figures["loss"], math.exp(figures["loss"]), sparsity["l0"], percent(sparsity["density"])]


def speed(folder: str, ids: torch.Tensor, density: float) -> str:
    """Tokens a second of the model, and of a block of real size with as many of its neurons active."""
    model = hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(folder, dtype="float32")).eval()
    of_model = bench_generate(Checkpoint(model, ids), new_tokens=64)
    if not of_model["same_tokens"]:
        raise SystemExit("the kernels generate another text than plain PyTorch does: please report this")
    (of_block,) = bench_ffn([1], [Wanted(density)], compile_dense=False, **BLOCK)
    per_second = [1e3 / of_block[f"{side}_ms"] for side in ("eager", "sparse")]
    rows = [
        ["the model", of_model["dense_tokens_per_s"], of_model["sparse_tokens_per_s"]],
        [f"one block of a larger model, {BLOCK['hidden']} x {BLOCK['intermediate']}", *per_second],
    ]
    headers = ["tokens a second", "dense", "sparse", "times"]
    table = text_table(headers, [[*row, f"{row[2] / row[1]:.2f}"] for row in rows])
    small = "Python takes most of the time of a model this small. The block has the same density, in bfloat16."
    same = f"Dense and sparse generated the same {of_model['new_tokens']} tokens (greedy, the same weights)."
    return f"{table}\n{same}\n{small}"


def sample(model: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(1)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    ids = lm.generate(**inputs, max_new_tokens=80, do_sample=True, temperature=0.7, top_k=40)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def draw(logs: list[dict], path: Path) -> Path:
    """Task loss and L0 over optimizer steps."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    steps = [entry["step"] for entry in logs]
    left.plot(steps, [entry["loss"] for entry in logs])
    right.plot(steps, [entry["twell/l0"] for entry in logs])
    left.set(xlabel="optimizer step", ylabel="training loss (nats per token)", title="task loss")
    right.set(xlabel="optimizer step", ylabel="active neurons per token (L0)", title="sparsity", ylim=(0, None))
    figure.savefig(path, dpi=120)
    return path


def check_reload(model: str, ids: torch.Tensor) -> None:
    ours = hf_twell.sparsify(AutoModelForCausalLM.from_pretrained(model), backend="reference")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        inputs, output = f"{folder}/ids.pt", f"{folder}/logits.pt"
        torch.save(ids, inputs)
        # What other packages tell every program there is shown only where the program fails.
        command = [sys.executable, "-c", PLAIN_TRANSFORMERS, model, inputs, output]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"plain Transformers does not load the saved model; it said:\n{done.stderr}")
        if not torch.equal(torch.load(output), ours(ids).logits):
            raise SystemExit("plain Transformers computes other logits from the saved model: please report this")


def say(line: str) -> None:
    print(f"\n\033[1m{line}\033[0m" if sys.stdout.isatty() else f"\n{line}", flush=True)


if __name__ == "__main__":
    sys.exit(ending_in_one_line("demo.py", main))

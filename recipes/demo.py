"""From dense to sparse and back from disk in a few minutes on a CPU: what `make demo` runs.

A small pretrained SiLU Llama generates; a bare ReLU swap shows what it costs; fine-tuning with the L1 term makes it
sparse, and the same fine-tuning without the term is the control. The sparse model is saved, and plain Transformers,
in a process of its own that never imports this package, must compute the very same logits from the folder.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hf_twell.cli.output import quiet_others

quiet_others()  # before the imports that would warn

import matplotlib
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, logging

import hf_twell
from hf_twell.files.tables import percent, text_table
from hf_twell.recipe.arguments import training_arguments
from hf_twell.recipe.finetune import finetune
from hf_twell.recipe.measured import measure
from hf_twell.recipe.packing import PackedText
from hf_twell.recipe.schema import Recipe, load_recipe

PROMPT = "Once upon a time, there was a little girl"
PLAIN_TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM
folder, inputs, output = sys.argv[1:]
with torch.no_grad():
    torch.save(AutoModelForCausalLM.from_pretrained(folder)(torch.load(inputs)).logits, output)
assert "hf_twell" not in sys.modules
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="in place of the values of recipes/demo.yaml")
    changes = parser.parse_args().changes
    logging.set_verbosity_error()
    started = time.monotonic()
    recipe = load_recipe(Path(os.path.relpath(Path(__file__).with_name("demo.yaml"))), changes)
    output = Path(recipe.output_dir)

    say(f"1. The dense model {recipe.model} goes on from {PROMPT!r}")
    print(sample(recipe.model))
    dense = dense_figures(recipe)

    say("2. The activation becomes ReLU, and the model is fine-tuned with the L1 term")
    sparse = finetune(recipe, overwrite=True)
    say("3. The same fine-tuning without the L1 term, as a control")
    control = finetune(dataclasses.replace(recipe, l1_weight=0.0, output_dir=str(output / "control")), overwrite=True)

    say(f"4. Results on held-out text ({sparse['after']['sparsity']['tokens']:,} tokens)")
    rows = [
        row("dense (SiLU)", dense),
        row("bare ReLU swap", sparse["before"]),
        row("ReLU, fine-tuned with the L1 term", sparse["after"]),
        row("ReLU, the same without the L1 term", control["after"]),
    ]
    headers = ["model", "held-out loss", "active neurons per token (L0)", "density", "dead neurons"]
    print(text_table(headers, rows))
    plot = draw(sparse["logs"], control["logs"], output / "training.png")
    print(f"\nplot: {plot}\n\nthe sparse model goes on:\n{sample(sparse['model'])}")

    say("5. Plain Transformers, without hf_twell, loads the saved model")
    check_reload(sparse["model"], recipe)
    print(f"equal logits, to the last bit. The model is in {sparse['model']}\n")
    print(f"done in {time.monotonic() - started:.0f} s")


def dense_figures(recipe: Recipe) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=recipe.dtype)
    heldout = PackedText(tokenizer, recipe.heldout, recipe.sequence_length, description="tokenizing held-out text")
    return measure(Trainer(model, training_arguments(recipe), eval_dataset=heldout), heldout)


def row(name: str, figures: dict) -> list:
    sparsity = figures["sparsity"]
    return [name, figures["loss"], sparsity["l0"], percent(sparsity["density"]), percent(sparsity["dead"])]


def sample(model: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(1)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    ids = lm.generate(**inputs, max_new_tokens=80, do_sample=True, temperature=0.7, top_k=40)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def draw(sparse: list[dict], control: list[dict], path: Path) -> Path:
    """Task loss and L0 over optimizer steps, with and without the L1 term."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, logs in (("with the L1 term", sparse), ("without", control)):
        steps = [entry["step"] for entry in logs]
        left.plot(steps, [entry["loss"] for entry in logs], label=name)
        right.plot(steps, [entry["twell/l0"] for entry in logs], label=name)
    left.set(xlabel="optimizer step", ylabel="training loss (nats per token)", title="task loss")
    right.set(xlabel="optimizer step", ylabel="active neurons per token (L0)", title="sparsity", ylim=(0, None))
    left.legend()
    figure.savefig(path, dpi=120)
    return path


def check_reload(model: str, recipe: Recipe) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    heldout = PackedText(tokenizer, recipe.heldout, recipe.sequence_length, description="reading held-out text")
    ids = heldout.sequences[:2]
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
    main()

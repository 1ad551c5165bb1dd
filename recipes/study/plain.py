"""What becomes of a sparse model that is fine-tuned without hf_twell's callback: its density, losses and tasks.

    python recipes/study/plain.py MODEL --text chats.jsonl --heldout A.txt B.txt --eval DIR --output out/plain

MODEL is a sparse one: a folder or a Hub name. Each mode is a row of OUTPUT/rows.jsonl, and one that is there is passed
over. `untouched` is MODEL itself. `full` trains all weights, and `lora` adapters on the linears of attention and of
feed-forward blocks, which are merged. Both train by Transformers' Trainer alone, on one GPU or the CPU, on all tokens
of the text, which is begun again where it ends; their models are in OUTPUT/RUN. DIR of --eval holds the tasks' rows, as
for `hf-twell eval --data-dir`.
"""

import argparse
import statistics
import time
import warnings
from pathlib import Path

import torch
from study import add_row, packed, rows_of, scores, union_of
from transformers import Trainer, TrainingArguments, default_data_collator

import hf_twell
from hf_twell.bench.environment import environment
from hf_twell.convert.entry import ACTIVITY, check_entry
from hf_twell.models.loading import load_model
from hf_twell.recipe.packing import check_length
from hf_twell.recipe.variants import LORA

LEARNING_RATES = {"full": 2e-5, "lora": 2e-4}


def sparse(path: Path | str, **options) -> tuple:
    """`load_model` of a sparse model; a ValueError of another, which `sparsify` would convert without a word."""
    model, tokenizer = load_model(path, **options)
    if check_entry(model.config) is None:
        raise ValueError(f"{path} is not sparse: its config has no twell entry; convert it first (docs/converting.md)")
    return model, tokenizer


def fine_tuned(mode: str, rate: float, steps: int, folder: Path, args) -> list[str]:
    """Train MODEL as users do, save it to `folder`, and return what hf_twell warned of."""
    package = str(Path(hf_twell.__file__).parent)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        model, tokenizer = sparse(args.model)
        check_length(model, args.length)
        dtype = model.dtype
        hf_twell.sparsify(model.float())  # autocast computes in bfloat16, where that is on
        if mode == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(**LORA | {"target_modules": "all-linear"}, task_type="CAUSAL_LM"))
        on_gpu = torch.cuda.is_available()
        options = {"bf16": on_gpu, "dataloader_pin_memory": on_gpu, "save_strategy": "no", "report_to": []}
        options |= {"learning_rate": rate, "lr_scheduler_type": "cosine", "logging_steps": 10, "seed": 0}
        options |= {"per_device_train_batch_size": args.batch, "max_steps": steps}
        text = packed(args.text, tokenizer, args.length, args.output)
        arguments = TrainingArguments(str(folder), **options)
        Trainer(model, arguments, default_data_collator, train_dataset=text).train()
        model = model.merge_and_unload() if mode == "lora" else model
        model.to(dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    own = [str(each.message) for each in heard if each.filename.startswith(package) or "hf_twell" in str(each.message)]
    return list(dict.fromkeys(own))


def measured(model: Path | str, args) -> dict:
    """The activity that a model has on the held-out text, and the one that its config tells of."""
    loaded, tokenizer = sparse(model, dtype=torch.bfloat16 if torch.cuda.is_available() else None)
    told = {key: loaded.config.twell.get(key) for key in ACTIVITY}  # before it is measured anew
    sequences = packed(args.heldout, tokenizer, args.length, args.output).sequences
    found = hf_twell.measure_sparsity(loaded, sequences.split(args.batch))
    layers = [{"density": round(layer["density"], 4), "union": union_of(layer)} for layer in found["layers"]]
    return {
        "density": found["density"],
        "union": {run: statistics.mean(layer["union"][run] for layer in layers) for run in layers[0]["union"]},
        "layers": layers,
        "told": told,
    }


def make(mode: str, args) -> None:
    """Make a mode's row, unless it is there."""
    rows, started = args.output / "rows.jsonl", time.perf_counter()
    steps = -(-args.tokens // (args.batch * args.length))
    run, model, tokens, rate, heard = mode, args.model, 0, None, []
    if mode != "untouched":
        tokens, rate = steps * args.batch * args.length, args.learning_rate or LEARNING_RATES[mode]
        run = f"{mode}-{tokens}-{rate:g}"
        model = args.output / run
    if run in rows_of(rows):
        return
    if mode != "untouched":
        heard = fine_tuned(mode, rate, steps, model, args)
    row = {"run": run, "mode": mode, "parent": Path(args.model).name, "tokens": tokens, "learning_rate": rate}
    row |= {"warnings": heard, **measured(model, args), "limit": args.limit}
    options = {"data_dir": args.eval, "limit": args.limit, "text": args.heldout, "context": args.length}
    row |= scores(model, args.tasks, batch_size=args.batch_scored, **options)
    row["minutes"] = round((time.perf_counter() - started) / 60, 2)
    row["environment"] = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    add_row(rows, row)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", nargs="+", required=True, help="what is learnt: .txt, or .jsonl of text or messages")
    parser.add_argument("--heldout", nargs="+", required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    modes = ["untouched", *LEARNING_RATES]
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--learning-rate", type=float, help="by default 2e-5 (full) and 2e-4 (lora)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence (default: 1024)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step (default: 16)")
    tasks = ["lambada_openai", "arc_easy", "arc_challenge", "hellaswag"]
    parser.add_argument("--tasks", nargs="*", default=tasks, help=f"(default: {' '.join(tasks)})")
    parser.add_argument("--batch-scored", type=int, default=128, help="requests scored at a time (default: 128)")
    parser.add_argument("--limit", type=int, help="first rows of each task, and documents of each text; by default all")
    args = parser.parse_args(argv)
    for mode in args.modes:
        make(mode, args)


if __name__ == "__main__":
    main()

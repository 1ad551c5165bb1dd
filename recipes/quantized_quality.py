"""What int8 or fp8 weights cost a model: its losses and tasks, as the study of a pretrained parent measures them.

    python recipes/quantized_quality.py MODEL --study DIR --weights bf16 int8 fp8 --rows quantized.jsonl

DIR is the output folder of pretrained_study.py, with its text and the tasks' rows. A row for each kind of weights; bf16
rounds them to it and does nothing else. torchao quantizes a dense model's blocks, `hf-twell quantize` a sparse one's.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from pretrained_study import LOSS_BATCH
from pretrained_text import ROWS_FOLDER
from study_measure import METRICS, provenance, sequence_losses, task_scores

from hf_twell.blocks.architectures import find_ffns
from hf_twell.files.folders import save_model
from hf_twell.files.tables import text_table
from hf_twell.models.loading import load_model
from hf_twell.models.quantizing import CONFIGS, quantize, quantize_block

TASKS = ["lambada", *METRICS]


def load_quantized(model: str, weights: str, folder: Path, device: str):
    """(model, tokenizer) in bfloat16, its blocks' weights quantized; a sparse one saved and read again, as users do."""
    given, tokenizer = load_model(model, dtype=torch.bfloat16, device="cpu")
    if weights == "bf16":
        return given.to(device), tokenizer
    if given.config.hidden_act != "relu":
        for site in find_ffns(given):
            quantize_block(site.module, site.form, weights)
        return given.to(device), tokenizer
    save_model(given, folder / "bf16", tokenizer)
    quantized, tokenizer = quantize(folder / "bf16", weights)
    save_model(quantized, folder / weights, tokenizer)
    return load_model(folder / weights, dtype=torch.bfloat16, device=device)


def measure(model: str, weights: str, study: Path, limit: int | None, device: str) -> dict:
    """One row."""
    text = torch.load(study / "text.pt")["texts"]
    with tempfile.TemporaryDirectory() as folder:
        loaded, tokenizer = load_quantized(model, weights, Path(folder), device)
        sequences = {name: part[:limit].long() for name, part in text.items()}
        losses = {name: sequence_losses(loaded, part, LOSS_BATCH) for name, part in sequences.items()}
        return {
            "model": str(model),
            "weights": weights,
            "losses": {name: part.double().mean().item() for name, part in losses.items()},
            "tasks": task_scores(loaded, tokenizer, TASKS, study / ROWS_FOLDER, limit),
            **provenance(device),
        }


def _rounded(row: dict) -> list[str]:
    return [f"{loss:.4f}" for loss in row["losses"].values()] + [
        f"{score['acc']:.3f}" for score in row["tasks"].values()
    ]


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a GGUF file")
    parser.add_argument("--study", type=Path, required=True, help="the output folder of pretrained_study.py")
    parser.add_argument("--weights", nargs="+", choices=["bf16", *CONFIGS], default=["bf16", "int8", "fp8"])
    parser.add_argument("--name", help="of the model in rows (default: its path)")
    parser.add_argument("--limit", type=int, help="rows of each task, and sequences of each text")
    parser.add_argument("--rows", type=Path, required=True, help="append rows to this file")
    args = parser.parse_args(argv)
    if not (args.study / "text.pt").is_file():
        parser.error(f"{args.study} holds no text.pt; give the output folder of pretrained_study.py")
    device, rows = "cuda" if torch.cuda.is_available() else "cpu", []
    for weights in args.weights:
        row = measure(args.model, weights, args.study, args.limit, device)
        rows.append({**row, "model": args.name or row["model"]})
        with args.rows.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    shown = [[row["weights"], *_rounded(row)] for row in rows]
    print(text_table(["weights", *rows[0]["losses"], *rows[0]["tasks"]], shown), file=sys.stderr)
    return rows


if __name__ == "__main__":
    main()

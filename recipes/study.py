"""What each way from SiLU to sparse ReLU costs: small dense parents are trained here and converted by every method.

    python recipes/study.py recipes/study.yaml --text DIR --eval DIR --output DIR
    python recipes/study.py recipes/study.yaml --output DIR --smoke      # tiny, on a CPU, in minutes
    python recipes/study.py recipes/study.yaml --output DIR --list       # which rows are there and which are missing

Each run appends one row to `study.jsonl` in the output folder; a run whose row is there is skipped, so the same command
goes on where it was stopped. After each row, `study.md` (table) and `study.png` (loss above dense
against density) are drawn from the rows alone. `--minutes` stops before a run that would begin later than that. The
same command may be started several times at once, on one GPU or more: the processes share the folder, and each takes a
run that nobody has begun.
"""

import time
from pathlib import Path

import torch
import yaml
from pretrain import pack, train_tokenizer
from study_loop import list_runs, make_rows, merged, missing_runs, study_arguments
from study_measure import measure, provenance
from study_report import report
from study_sharing import alone, read_rows
from study_text import cut, kept_in, split_documents, spread
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_twell.blocks.architectures import find_ffns
from hf_twell.recipe.finetune import finetune
from hf_twell.recipe.packing import PackedText
from hf_twell.recipe.schema import Recipe


class FatRelu(torch.nn.Module):
    """x where x > threshold, else 0."""

    def __init__(self, threshold: float):
        super().__init__()
        self.threshold = threshold

    def forward(self, x):
        return torch.where(x > self.threshold, x, 0)


def plan(study: dict) -> list[dict]:
    """Every run, each with a unique `id`, in the order in which they run."""
    runs = []
    for entry in study["runs"]:
        for family in entry.get("families", study["families"]):
            for seed in entry.get("seeds", [0]):
                for value in entry.get("thresholds", entry.get("target_density", [None])):
                    run = {key: entry[key] for key in entry if key not in ("seeds", "families", "thresholds")}
                    run |= {"family": family, "seed": seed}
                    run["threshold" if "thresholds" in entry else "target_density"] = value
                    shown = "" if value is None else f"/{value:g}"
                    run["id"] = f"{family}/{entry['name']}{shown}/seed{seed}"
                    runs.append(run)
    return runs


def prepare(study: dict, text: Path | None, output: Path) -> tuple[Path, PackedText, PackedText]:
    """The tokenizer, and the training and held-out sequences; kept in the output folder."""
    length = study["sequence_length"]

    def make() -> dict:
        training, held = [], []
        for source in study["sources"]:
            read, unread = split_documents(text, source, study["held_out_every"])
            training, held = training + read, held + unread
        tokenizer = train_tokenizer(training, study["vocab_size"], length)
        tokenizer.save_pretrained(output / "tokenizer")
        sequences, heldout = (cut(pack(tokenizer, documents).long(), length) for documents in (training, held))
        return {"train": sequences, "heldout": spread(heldout, study["heldout_sequences"])}

    kept = kept_in(output, make)
    return output / "tokenizer", PackedText.of(kept["train"]), PackedText.of(kept["heldout"])


def start_of(run: dict, study: dict, output: Path, tokenizer: Path) -> str:
    """The folder of the model that a run begins with."""
    folder = output / run["family"]
    if run["start"] == "parent":
        return str(folder / "dense" / "final")
    start = folder / f"init{run['seed']}"
    with alone(output / "init.lock"):
        if not (start / "config.json").is_file():
            settings = dict(study["families"][run["family"]])
            torch.manual_seed(run["seed"])
            tok = AutoTokenizer.from_pretrained(tokenizer)
            special = {key: getattr(tok, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
            config = AutoConfig.for_model(settings.pop("model_type"), vocab_size=len(tok), **special, **settings)
            begun = start.with_name(f"{start.name}.begun")
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(begun)
            tok.save_pretrained(begun)
            begun.rename(start)
    return str(start)


def needs(run: dict, study: dict) -> str | None:
    """The id of the run whose model this one begins with."""
    if "threshold" in run:
        return next(r["id"] for r in plan(study) if (r["family"], r["name"]) == (run["family"], run["fatrelu"]))
    return f"{run['family']}/dense/seed0" if run["start"] == "parent" else None


def run_folder(run: dict, output: Path) -> Path:
    """Where a run's models lie; the dense parent's has no seed in its name."""
    name = run["id"].split("/", 1)[1] if run["name"] != "dense" else "dense"
    return output / run["family"] / name.replace(" ", "_").replace("/", "_")


def train(run: dict, study: dict, output: Path, data: tuple) -> tuple[Path, dict]:
    """Run a recipe; the final model's folder, and what the training itself tells."""
    tokenizer, training, heldout = data
    stage = study[run.get("stage") or ("pretrain" if run["start"] == "init" else "convert")]
    apart = ("name", "start", "stage", "family", "seed", "id", "threshold", "training")
    settings = {**study["training"], **stage, **run.get("training", {}), "seed": run["seed"], "report_to": []}
    recipe = Recipe(
        model=start_of(run, study, output, tokenizer),
        output_dir=str(run_folder(run, output)),
        train=[],
        heldout=[],
        sequence_length=study["sequence_length"],
        training=settings,
        **{key: value for key, value in run.items() if key not in apart},
    )
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    result = finetune(recipe, overwrite=True, train=training, heldout=heldout)
    batch = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    last = result["logs"][-1]
    return Path(result["model"]), {
        "tokens": settings["max_steps"] * batch * recipe.sequence_length,
        "minutes": round((time.perf_counter() - started) / 60, 2),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if torch.cuda.is_available() else None,
        "loss_before": result["before"]["loss"],
        "last_log": {key: value for key, value in last.items() if "layer_" not in key},
    }


def run_one(run: dict, study: dict, output: Path, data: tuple, eval_dir: Path | None) -> dict:
    """Train (or, for a threshold, load) and measure: one row."""
    rows = {row["id"]: row for row in read_rows(output / "study.jsonl")}
    needed = rows.get(needs(run, study))
    if "threshold" in run:
        folder, facts = run_folder(needed, output) / "final", {"tokens": needed["tokens"], "minutes": 0.0}
    else:
        folder, facts = train(run, study, output, data)
    device = "cuda" if torch.cuda.is_available() and not study["training"].get("use_cpu") else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    if "threshold" in run:
        for site in find_ffns(model):
            setattr(site.module, site.form.activation, FatRelu(run["threshold"]))
    tokenizer = AutoTokenizer.from_pretrained(data[0])
    figures = measure(model, tokenizer, data[2], eval_dir, study["eval_limit"], training=data[1])
    parent = rows.get(f"{run['family']}/dense/seed0") if run["start"] == "parent" else None
    about = {
        # Which parent: one trained again elsewhere differs, and has controls of its own.
        "parent_loss": parent and parent["loss"],
        "parameters": sum(p.numel() for p in model.parameters()),
        **provenance(device),
    }
    return {**run, **figures, **facts, **about}


def main(argv: list[str] | None = None) -> list[dict]:
    parser = study_arguments(__doc__)
    args = parser.parse_args(argv)
    study, text, started = yaml.safe_load(args.study.read_text()), args.text, time.monotonic()
    if args.smoke:
        study = merged(study, study.pop("smoke"))
        text, study["sources"], study["held_out_every"] = Path(__file__).parent / "demo" / "text", ["heldout"], 10
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "study.jsonl"
    rows = read_rows(path)
    missing = missing_runs(plan(study), rows, args.only)
    if args.list:
        list_runs(rows, missing)
        return rows
    if text is None and not (args.output / "text.pt").is_file():
        parser.error("--text is needed: the folder with " + ", ".join(study["sources"]))
    data = prepare(study, text, args.output)
    make_rows(
        missing,
        path,
        needs=lambda run: needs(run, study),
        make=lambda run: run_one(run, study, args.output, data, args.eval),
        report=report,
        minutes=args.minutes,
        started=started,
    )
    return read_rows(path)


if __name__ == "__main__":
    main()

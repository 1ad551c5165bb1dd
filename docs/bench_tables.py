"""Markdown tables of bench rows: the speed-up at each number of tokens and L0, and what whole models take."""

import math
from itertools import groupby

from hf_twell.cli.bench_table import CELLS
from hf_twell.files.tables import markdown_table

PASSES = {"forward": "One block, forward", "forward+backward": "One block, forward and backward"}
PLAIN = (
    "Beside each cell: our block with weights in {}, and how many times as long it took. Only these two were timed in "
    "turn; all other cells were timed at other moments.\n\n"
)
MODELS = {"prefill": "Prefill", "generate": "Generation", "train": "Training step"}


def tables(rows: list[dict]) -> str:
    """Of `hf-twell bench`'s rows, one section for each kind of bench, block's shape and dtype."""
    blocks = [row for row in rows if row["bench"] == "ffn"]
    sections = [_blocks(list(group)) for _, group in groupby(sorted(blocks, key=_block), key=_block)]
    for bench, title in MODELS.items():
        of_bench = [row for row in rows if row["bench"] == bench]
        if of_bench:
            sections.append(_models(title, of_bench))
    served = sorted((row for row in rows if row["bench"] == "serve"), key=_served)
    sections += [_servers(list(group)) for _, group in groupby(served, key=_served)]
    if steps := [row for row in rows if row["bench"] == "vllm"]:
        title = "## Steps of vLLM " + " and ".join(sorted({row["vllm"] for row in steps}))
        ranges = "Dense is the same engine without our kernels. In brackets the least and the most of several answers."
        sections.append(f"{title}\n\n{ranges}\n\n{markdown_table(*CELLS['vllm'](steps))}")
    head = (
        "# Measured\n\nWritten by `make figures` from the rows of `bench.jsonl` beside it. Speed-ups are over the "
        "better of eager and compiled PyTorch in the same run; in brackets the sparse block's time; *italic* where the "
        f"block chose plain matmuls. Processors: {_joined(rows, 'processor')}; commits: {commits(rows)}."
    )
    return "\n".join([head + "\n", *sections])


def _block(row):
    experts = f"{row['top_k']} of {row['experts']} experts a token" if "experts" in row else ""
    return row["pass"], row["hidden"], row["intermediate"], row["dtype"], row.get("weights") or "", experts


def _blocks(rows) -> str:
    direction, hidden, intermediate, dtype, weights, experts = _block(rows[0])
    found = {(row["tokens"], (row["requested_l0"], row.get("requested_union") or 0)): row for row in rows}
    tokens, l0s = (sorted(set(values)) for values in zip(*found, strict=True))
    held = f", weights in {weights}" if weights else ""
    title = f"## {PASSES[direction]}: D={hidden}, F={intermediate}, {dtype}{held}"
    if experts:
        title += f", {experts}\n\nOver the better of Transformers' grouped and batched matmuls."
    cells, plain = {"": _cell}, ""
    if any("sparse_plain_ms" in row for row in rows):
        cells[f", {dtype}"], plain = _plain, PLAIN.format(dtype)
    names = {(l0, union): f"L0 = {l0:g}" + (f", union of 64 = {union:.0%}" if union else "") for l0, union in l0s}
    columns = [(f"{names[wanted]}{name}", wanted, cell) for wanted in l0s for name, cell in cells.items()]
    lines = [[f"{count:,}", *(cell(found.get((count, l0))) for _, l0, cell in columns)] for count in tokens]
    return f"{title}\n\n{plain}{markdown_table(['tokens', *(name for name, *_ in columns)], lines)}"


def _plain(row: dict | None) -> str | None:
    """Our block in 16 bits, of a row whose weights are in 8."""
    if row is None or "sparse_plain_ms" not in row:
        return None
    return f"{_duration(row['sparse_plain_ms'])} ({row['speedup_plain']:.2f}x)"


def _cell(row: dict | None) -> str | None:
    if row is None:
        return None
    ratio = f"{row['speedup']:.2f}x"
    ms = min(row["sparse_ms"], row.get("sparse_compiled_ms", math.inf))
    return f"{ratio if row.get('took') != 'plain matmuls' else f'*{ratio}*'} ({_duration(ms)})"


def _duration(ms: float) -> str:
    return f"{ms:.3g} ms" if ms >= 1 else f"{1000 * ms:.3g} µs"


def _models(title: str, rows) -> str:
    """Every duration and speed of a whole model, a line for each; memory and energy are in the rows."""
    names = [name for row in rows for name in row if name.endswith(("_ms", "_tokens_per_s", "speedup"))]
    names = list(dict.fromkeys(names))
    settings = [_setting(row) for row in rows]
    lines = [[name.replace("_", " "), *(row.get(name) for row in rows)] for name in names]
    return f"## {title}\n\n{markdown_table(['', *settings], lines)}"


def _setting(row) -> str:
    kept = ("layers", "batch", "length", "l0", "dtype")
    words = [f"{key} {row[key]}" for key in kept if key in row]  # older rows lack some
    return ", ".join(words + ["Inductor's programmatic launch"] * bool(row.get("inductor_pdl")))


def _served(row):
    return row["engine"], row["engine_version"], row["model"], row["dtype"]


def _servers(rows) -> str:
    head, lines = CELLS["serve"](rows)
    return f"## Served: {', '.join(map(str, _served(rows[0])))}\n\n{markdown_table(head, lines)}"


def commits(rows: list[dict]) -> str:
    """Those whose code was measured; of rows that do not tell, those that brought the rows into the repository."""
    told = dict.fromkeys(row["commit"] for row in rows if row.get("commit"))
    added = dict.fromkeys(row["committed_with"] for row in rows if not row.get("commit") and "committed_with" in row)
    return (
        ", ".join([*told, *([f"not recorded (rows added by {', '.join(added)})"] if added else [])]) or "not recorded"
    )


def _joined(rows, key: str) -> str:
    return ", ".join(dict.fromkeys(str(row.get(key) or "not recorded") for row in rows))

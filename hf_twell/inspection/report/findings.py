"""An inspection in sentences: the headline, and which known effects of sparse models show in this one."""

from hf_twell.inspection.known_conversions import MUCH, in_words

MANY = 1.2  # a ratio from which on an effect counts as shown
LATE = 64  # positions from here on are "later" ones
FIRST = 4


def headline(result: dict) -> str:
    """One sentence on how sparse the model is."""
    layers = result["layers"]
    width = _mean(layer["intermediate_size"] for layer in layers)
    if not result["sparse"]:
        top = mean_share(layers, "magnitude_share", "10%")
        return (
            f"This model is dense: {number(result['l0'])} of {number(width)} neurons fire for every token. "
            f"The strongest tenth carries {percent(top)} of a token's activity."
        )
    dense, sparse = max(layers, key=_density), min(layers, key=_density)
    end = ""
    if len(layers) > 1:
        end = (
            f"; layer {dense['label']} is densest ({percent(dense['density'])}), "
            f"layer {sparse['label']} sparsest ({percent(sparse['density'])})"
        )
    return f"{number(result['l0'])} of {number(width)} neurons ({percent(result['density'])}) fire for a token{end}."


def measure(result: dict) -> tuple[str, str]:
    """The key and the name of what tells tokens apart: in a dense model every token's L0 is the same."""
    return ("l0", "active neurons") if result["sparse"] else ("effective_neurons", "effective neurons")


def layer_count(result: dict) -> int:
    """How many of the model's layers the figures are of: one that has routed experts and a shared one has two."""
    return len({layer["layer"] for layer in result["layers"]})


def findings(result: dict) -> list[dict[str, str]]:
    """[{"title", "text"}]: the effects that one expects, each shown or said to be absent, with its figures."""
    made = (_positions, _layers, _dead, _words, _neighbours, _hottest, _magnitude)
    return [finding for make in made if (finding := make(result))]


def savings_sentence(savings: dict) -> str:
    """What sparsity buys here, and whether that was measured."""
    if not savings["relu"]:
        return (
            "Nothing yet: the activation is zero nowhere, so every layer takes the dense path. The table says what "
            "this model's blocks would gain at lower densities, after sparsifying and fine-tuning."
        )
    if savings["backend"] == "reference":
        return "Nothing here: no compiled backend works on this machine (see `hf-twell doctor`)."
    decode, prefill = (savings["total"][which] for which in ("decode", "prefill"))
    how = "measured" if savings["measured"] else "predicted, not measured"
    small = ""
    if savings["too_small"]:
        small = (
            f" Blocks of this size keep plain matmuls in {' and '.join(savings['too_small'])} at any density: there a "
            "call itself costs what sparsity could save."
        )
    return (
        f"Feed-forward blocks on this machine ({how}): {_gain(decode)} in decode (one token) and {_gain(prefill)} in "
        f"prefill ({savings['tokens']['prefill']:,} tokens).{small}"
    )


def conversion_sentence(result: dict) -> str:
    """What a dense model draws from negative gates, what losing that costs, and what like parents have kept."""
    shares, cost = [layer["negative_share"] for layer in result["layers"]], result["conversion"]
    relu = cost["relu"]
    if relu["loss"] is None:
        return "With ReLU, this model's activations overflow: load it in bfloat16 or float32."
    long = relu["increase"] >= MUCH
    verdict = "That is much: expect a long fine-tuning" if long else "That is little: a short fine-tuning may do"
    return (
        f"Negative gates carry {percent(min(shares))} to {percent(max(shares))} of a block's output energy (mean "
        f"{percent(_mean(shares))}), and ReLU drops it: the swap alone, untrained, takes the loss from "
        f"{cost['loss']:.2f} to {relu['loss']:.2f} ({increase(relu['increase'])}). {verdict} "
        f"(docs/converting.md). {in_words(relu['increase'], cost['oracle'])}"
    )


def changes(conversion: dict) -> list[tuple[str, dict]]:
    """What each block computes with, by name, and the figures of `hf_twell.inspection.conversion_cost`."""
    oracle = [(f"strongest {100 * row['density']:g} %", row) for row in conversion["oracle"]]
    return [("all, ReLU", conversion["relu"]), *oracle]


def increase(value: float | None) -> str:
    """A signed percentage."""
    return "n/a" if value is None else f"{100 * value:+,.{0 if abs(value) >= 0.0995 else 1}f} %"


def mean_share(layers: list[dict], kind: str, top: str) -> float | None:
    """The mean of a share over the layers that have it: one in which nothing fires has none."""
    known = [layer[kind][top] for layer in layers if layer[kind][top] is not None]
    return _mean(known) if known else None


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:,.3g}"


def percent(share: float | None) -> str:
    if share is None:
        return "n/a"
    value = 100 * share
    if 99 < value < 100:
        return f"{min(value, 99.9):.1f} %"
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %" if value >= 0.095 else f"{value:.2g} %"


def milliseconds(value: float) -> str:
    return f"{value:.3g} ms" if value < 99.95 else f"{value:,.0f} ms"


def _gain(total: dict) -> str:
    return f"{milliseconds(total['sparse_ms'])} instead of {milliseconds(total['dense_ms'])} ({total['speedup']:.2f}x)"


def _positions(result):
    key, name = measure(result)
    early = [row for row in result["positions"] if row["last"] < FIRST]
    late = [row for row in result["positions"] if row["first"] >= LATE]
    if not early or not late:
        return None
    first, later = _weighted(early, key), _weighted(late, key)
    effect = _effect(first / later if later else 1, "First tokens are busier", "First tokens are quieter")
    return {
        "title": effect or "First tokens are like later ones",
        "text": f"On average over layers, the first {FIRST} tokens of a window have {number(first)} {name}, and those "
        f"after position {LATE} have {number(later)} ({first / later if later else 1:.2f}x).",
    }


def _layers(result):
    layers = result["layers"]
    if len(layers) < 3:
        return None
    key, name = measure(result)
    values = [layer[key] / layer["intermediate_size"] for layer in layers]
    busiest, quietest = max(values), min(values)
    at, least = (layers[values.index(value)]["label"] for value in (busiest, quietest))
    return {
        "title": f"Layer {at} is busiest" if quietest * MANY <= busiest else "Layers are about equally busy",
        "text": f"Layer {at} has most {name} ({percent(busiest)} of its neurons), "
        f"layer {least} fewest ({percent(quietest)}).",
    }


def _dead(result):
    layers = result["layers"]
    mostly = [layer["label"] for layer in layers if layer["dead"] > 0.5]
    worst = max(layers, key=lambda layer: layer["dead"])
    block = "layer" if len(layers) == layer_count(result) else "block"
    if mostly:
        title = f"{len(mostly)} of {len(layers)} {block}s are mostly dead"
        text = f"More than half of the neurons of {block}s {', '.join(mostly)} never fired"
    else:
        title = f"No {block} is mostly dead"
        text = f"Most dead neurons: {worst['dead_neurons']:,} in {block} {worst['label']} ({percent(worst['dead'])})"
    always = sum(layer["always_on_neurons"] for layer in layers)
    return {
        "title": title,
        "text": f"{text}, on {result['tokens']:,} tokens; {always:,} neurons of all {block}s fired for every token.",
    }


def _words(result):
    key, name = measure(result)
    rows = [row for row in result["vocabulary"]["by_count"] if row["tokens"] >= 50]
    if len(rows) < 2 or not rows[-1][key]:
        return None
    rare, common = rows[0], rows[-1]
    effect = _effect(rare[key] / common[key], "Rare tokens are busier", "Rare tokens are quieter")
    return {
        "title": effect or "Rare tokens are like common ones",
        "text": f"Tokens seen {_times(rare)} have {number(rare[key])} {name}, those seen {_times(common)} "
        f"have {number(common[key])} ({rare[key] / common[key]:.1f}x).",
    }


def _neighbours(result):
    runs, share = [layer["distinct"]["64"] for layer in result["layers"]], result["unions"]["64"]
    if not result["sparse"] or share is None:
        return None
    seen, strangers = _mean(run["neurons"] for run in runs), _mean(run["if_independent"] for run in runs)
    shares = "Neighbouring tokens share neurons"
    return {
        "title": shares if seen * 1.05 < strangers else "Neighbouring tokens share hardly more neurons than strangers",
        "text": f"64 neighbours use {number(seen)} distinct neurons of a layer, a union of {percent(share)}; 64 "
        f"unrelated tokens would use {number(strangers)}, and {number(64 * result['l0'])} if they shared none.",
    }


def _hottest(result):
    share = mean_share(result["layers"], "hottest_share", "10%")
    if not result["sparse"] or share is None:
        return None
    return {
        "title": "Few neurons do most of the firing" if share >= 0.5 else "Firing is spread over many neurons",
        "text": f"The tenth of a layer's neurons that fires most has {percent(share)} of all firings.",
    }


def _magnitude(result):
    shares = [mean_share(result["layers"], "magnitude_share", top) for top in ("1%", "5%", "10%")]
    if shares[2] is None:
        return None
    return {
        "title": "A few neurons carry most of a token" if shares[2] >= 0.75 else "A token's activity is spread widely",
        "text": "Of a token's sum of |h|, its strongest 1 / 5 / 10 % of neurons carry "
        f"{percent(shares[0])} / {percent(shares[1])} / {percent(shares[2])}.",
    }


def _effect(ratio, more, less):
    return more if ratio >= MANY else less if ratio * MANY <= 1 else None


def _times(row):
    return f"{row['first']:,} to {row['last']:,} times"


def _weighted(rows, key):
    return sum(row["tokens"] * _mean(row[key]) for row in rows) / sum(row["tokens"] for row in rows)


def _density(layer):
    return layer["density"]


def _mean(values):
    values = list(values)
    return sum(values) / len(values)

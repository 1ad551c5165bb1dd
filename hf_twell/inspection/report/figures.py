"""Which plots an inspection gets, and what each says in words."""

from hf_twell.inspection.report.findings import increase, mean_share, measure, milliseconds, number, percent
from hf_twell.inspection.report.plots import Plot, log_scale

RUN_LENGTHS = ("16", "64", "128")


def layer_plot(result: dict) -> Plot:
    layers, (key, name) = result["layers"], measure(result)
    means, labels = [layer[key] for layer in layers], [layer["label"] for layer in layers]
    highs = [layer["l0_quantiles"]["p90"] for layer in layers] if result["sparse"] else []
    plot = Plot(
        f"{name.capitalize()} by layer",
        "; ".join(f"layer {label}: {number(value)} on average" for label, value in zip(labels, means, strict=True)),
        "layer",
        f"{name} per token",
    )
    plot.y_axis(max([*means, *highs]), number)
    tips = [f"layer {label}: {number(value)} {name} per token" for label, value in zip(labels, means, strict=True)]
    plot.bars(means, tips)
    if highs:
        plot.legend.append(("a", "mean"))
        plot.whiskers([layer["l0_quantiles"]["p10"] for layer in layers], highs, "10th to 90th percentile of tokens")
    plot.x_ticks(_layer_ticks(layers))
    return plot


def magnitude_plot(result: dict) -> Plot | None:
    layers = result["layers"]
    known = [(index, layer["magnitude_share"]) for index, layer in enumerate(layers) if layer["magnitude_sample"]]
    if not known:
        return None
    shares = {top: [(index, 100 * share[top]) for index, share in known] for top in ("1%", "5%", "10%")}
    plot = Plot(
        "How much of a token's activity its strongest neurons carry",
        "; ".join(f"layer {layers[i]['label']}: strongest 10 % carry {value:.0f} %" for i, value in shares["10%"]),
        "layer",
        "share of the sum of |h| (%)",
    )
    plot.y_axis(100, number)
    plot.x_scale = lambda x: (x + 0.5) / len(layers)
    for series, (top, points) in zip("cba", shares.items(), strict=True):
        plot.line(points, series, f"strongest {top.replace('%', ' %')}")
    plot.x_ticks(_layer_ticks(layers))
    return plot


def position_plot(result: dict) -> Plot:
    key, name = measure(result)
    rows, layers = result["positions"], result["layers"]
    means = [sum(row[key]) / len(row[key]) for row in rows]
    plot = Plot(
        f"{name.capitalize()} by position in the window",
        f"first token {number(means[0])}; last positions {number(means[-1])} (averages over layers)",
        "position in the window (tokens, logarithmic)",
        f"{name} per token",
    )
    order = sorted(range(len(layers)), key=lambda index: layers[index][key])
    shown = {"b": order[-1], "c": order[0]} if len(layers) > 1 else {}
    plot.y_axis(max([*means, *(row[key][index] for row in rows for index in shown.values())]), number)
    plot.x_scale = log_scale(1, rows[-1]["last"] + 1 if len(rows) > 1 else 2)
    places = [((row["first"] + 1) * (row["last"] + 1)) ** 0.5 for row in rows]
    plot.line(list(zip(places, means, strict=True)), "a", "mean of all layers")
    for series, index in shown.items():
        which = "busiest" if series == "b" else "quietest"
        points = [(place, row[key][index]) for place, row in zip(places, rows, strict=True)]
        plot.line(points, series, f"{which} layer ({layers[index]['label']})", dots=False)
    last = rows[-1]["last"] + 1
    ticks = [1, 2, 4, 8, *(4**power for power in range(2, 12))]
    plot.x_ticks([(tick, f"{tick - 1 if tick < 8 else tick:,}") for tick in ticks if tick <= last])
    return plot


def count_plot(result: dict) -> Plot:
    key, name = measure(result)
    rows = result["vocabulary"]["by_count"]
    labels = [_short(row["first"]) for row in rows]
    plot = Plot(
        f"{name.capitalize()} by how often a token occurs in this text",
        "; ".join(f"seen {row['first']} to {row['last']} times: {number(row[key])}" for row in rows),
        "occurrences of the token, from",
        f"{name} per token",
    )
    plot.y_axis(max(row[key] for row in rows), number)
    tips = [
        f"{row['items']:,} vocabulary items seen {row['first']:,} to {row['last']:,} times: {number(row[key])} {name}"
        for row in rows
    ]
    plot.bars([row[key] for row in rows], tips)
    plot.x_ticks(list(enumerate(labels)))
    return plot


def hottest_plot(result: dict) -> Plot | None:
    layers = result["layers"]
    if not result["sparse"] or mean_share(layers, "hottest_share", "1%") is None:
        return None
    shares = [float(key[:-1]) for key in layers[0]["hottest_share"]]
    known = (mean_share(layers, "hottest_share", f"{s:g}%") for s in shares)
    means = [100 * share for share in known if share is not None]
    plot = Plot(
        "Share of all firings that the most active neurons have",
        "; ".join(f"hottest {s:g} %: {mean:.0f} % of firings" for s, mean in zip(shares, means, strict=True)),
        "hottest neurons (% of a layer)",
        "share of firings (%)",
    )
    plot.y_axis(100, number)
    plot.x_scale = lambda x: x / 100
    plot.line([(0, 0), *zip(shares, means, strict=True), (100, 100)], "a", "mean of all layers")
    plot.line([(0, 0), (100, 100)], "d", "if all fired equally often", dots=False)
    plot.x_ticks([(tick, f"{tick}") for tick in (0, 25, 50, 75, 100)])
    return plot


def run_plot(result: dict) -> Plot | None:
    layers = result["layers"]
    known = [run for run in RUN_LENGTHS if all(layer["distinct"][run]["runs"] for layer in layers)]
    if not result["sparse"] or not known:
        return None

    def mean(run, key):
        return sum(layer["distinct"][run][key] for layer in layers) / len(layers)

    seen, strangers = [[(int(run), mean(run, key)) for run in known] for key in ("neurons", "if_independent")]
    plot = Plot(
        "Distinct neurons that neighbouring tokens use together",
        "; ".join(f"{run} tokens: {number(value)}" for run, value in seen),
        "neighbouring tokens (logarithmic)",
        "distinct neurons of a layer",
    )
    one = (1, result["l0"])
    plot.y_axis(max(value for _, value in [one, *strangers]), number)
    plot.x_scale = log_scale(1, int(known[-1]))
    plot.line([one, *seen], "a", "neighbours")
    plot.line([one, *strangers], "b", "unrelated tokens", dots=False)
    plot.x_ticks([(run, str(run)) for run in (1, 4, 16, 64, 128) if run <= int(known[-1])])
    return plot


def savings_plot(savings: dict, which: str) -> Plot:
    rows = [row[which] for row in savings["layers"]]
    tokens, how = savings["tokens"][which], "measured" if savings["measured"] else "predicted, not measured"
    total = savings["total"][which]
    plot = Plot(
        f"{which.capitalize()}, {tokens:,} token{'s' if tokens > 1 else ''}: time of each block (sparse: {how})",
        f"all layers: {milliseconds(total['dense_ms'])} dense, {milliseconds(total['sparse_ms'])} sparse ({how})",
        "layer",
        "milliseconds",
    )
    plot.y_axis(max(row[key] for row in rows for key in ("dense_ms", "sparse_ms")), lambda value: f"{value:.3g}")
    for place, (series, key) in enumerate((("d", "dense_ms"), ("a", "sparse_ms"))):
        name = key.removesuffix("_ms")
        tips = [f"layer {index}: {milliseconds(row[key])} {name}" for index, row in enumerate(rows)]
        plot.bars([row[key] for row in rows], tips, series, (place, 2))
        plot.legend.append((series, name))
    plot.x_ticks([(index, str(index)) for index in range(len(rows))])
    return plot


def negative_plot(result: dict) -> Plot:
    shares = [layer["negative_share"] for layer in result["layers"]]
    texts = [f"layer {index}: {percent(share)}" for index, share in enumerate(shares)]
    plot = Plot("What comes from negative gates", "; ".join(texts), "layer", "share of the block's output energy (%)")
    plot.y_axis(max(1, *(100 * share for share in shares)), number)
    plot.bars([100 * share for share in shares], texts)
    plot.x_ticks([(index, str(index)) for index in range(len(shares))])
    return plot


def oracle_plot(conversion: dict) -> Plot | None:
    known = [row for row in conversion["oracle"] if row["loss"] is not None]
    if not known:
        return None
    plot = Plot(
        "Loss with each token's strongest neurons alone, untrained",
        f"dense: {conversion['loss']:.3g}; "
        + "; ".join(f"{percent(row['density'])} of the neurons: {increase(row['increase'])}" for row in known),
        "neurons kept (%, logarithmic)",
        "loss (nats per token)",
    )
    relu, dense = conversion["relu"]["loss"], conversion["loss"]
    plot.y_axis(max([dense, relu or 0, *(row["loss"] for row in known)]), number)
    low = min(row["density"] for row in known)
    plot.x_scale = log_scale(100 * low, 100)
    plot.line([*((100 * row["density"], row["loss"]) for row in known), (100, dense)], "a", "strongest neurons")
    if relu is not None:
        plot.line([(100 * low, relu), (100, relu)], "b", "all neurons, ReLU", dots=False)
    plot.line([(100 * low, dense), (100, dense)], "d", "dense", dots=False)
    plot.x_ticks([(100 * density, f"{100 * density:g}") for density in [*(row["density"] for row in known), 1.0]])
    return plot


def _layer_ticks(layers: list[dict]) -> list[tuple[int, str]]:
    """The first block of each of the model's layers; what else it is called would not fit."""
    numbers = [layer["layer"] for layer in layers]
    return [(numbers.index(number), str(number)) for number in dict.fromkeys(numbers)]


def _short(count: int) -> str:
    return f"{count // 1000}k" if count >= 1000 else str(count)

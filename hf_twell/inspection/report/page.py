"""An inspection as one HTML page that needs no network: light and dark, on a phone, and on paper."""

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from hf_twell.inspection.report import figures
from hf_twell.inspection.report.findings import (
    changes,
    conversion_sentence,
    findings,
    headline,
    increase,
    layer_count,
    measure,
    milliseconds,
    number,
    percent,
    savings_sentence,
)
from hf_twell.inspection.report.plots import Plot

# Inline code and styles, and nothing from elsewhere, whatever a text or a model's name holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_FOLDER = Path(__file__).parent
_DENSE = (
    '<p class="note">Where every neuron fires for every token, L0 cannot tell tokens apart. This page compares them by '
    "effective neurons instead: as many equally strong ones would carry a token as unevenly.</p>"
)


def render(result: dict) -> str:
    """The page for what `hf_twell.inspection.inspecting.inspect_text` returned, with `savings` where they are known."""
    sections = [_layers(result), _places(result), _passage(result)]
    if result.get("conversion"):
        sections.append(_conversion(result))
    if result.get("savings"):
        sections.append(_savings(result["savings"]))
    title = f"{Path(result['model']).name}: its active neurons"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{(_FOLDER / 'page.css').read_text()}</style></head><body>"
        f"{_head(result)}<main>{''.join(sections)}{_about(result)}</main>"
        f"<script>{(_FOLDER / 'page.js').read_text()}</script></body></html>\n"
    )


def _head(result) -> str:
    layers, (key, name) = result["layers"], measure(result)
    mean = sum(layer[key] for layer in layers) / len(layers)
    about = f"{result['class']}, {layer_count(result)} layers"
    tiles = [
        (percent(result["density"]), "density: share of neurons that fire for a token"),
        (percent(result["unions"]["64"]), "union of 64: share that fires for at least one of 64 neighbours"),
        (number(mean), f"{name} per token, mean of layers"),
        (percent(result["dead"]), "dead: never fired on this text"),
        (f"{result['tokens']:,}", "tokens read"),
    ]
    if result.get("savings") and result["savings"]["relu"]:
        savings = result["savings"]
        kind = "measured" if savings["measured"] else "predicted"
        tiles += [
            (f"{savings['total'][w]['speedup']:.2f}x", f"FFN speed-up in {w}, {kind}") for w in ("decode", "prefill")
        ]
    cells = "".join(f"<li><b>{escape(value)}</b>{escape(text)}</li>" for value, text in tiles)
    warnings = list(result["warnings"])
    if result["partial"]:
        warnings.insert(0, f"Partial: interrupted after {result['tokens']:,} tokens. All figures are for these.")
    items = "".join(
        f"<li><h3>{escape(found['title'])}</h3><p>{escape(found['text']).replace(' %', '&nbsp;%')}</p></li>"
        for found in findings(result)
    )
    return (
        f'<header><p class="model">{escape(result["model"])} · {escape(about)}, '
        f"activation {escape(str(result['activation']))}</p><h1>{escape(headline(result))}</h1>"
        + "".join(f'<p class="warning" role="note">{escape(warning)}</p>' for warning in warnings)
        + f'<ul class="tiles">{cells}</ul>{"" if result["sparse"] else _DENSE}</header>'
        + f'<h2>What stands out</h2><ul class="findings">{items}</ul>'
    )


def _layers(result) -> str:
    plots = [figures.layer_plot(result), figures.hottest_plot(result), figures.run_plot(result)]
    plots.append(figures.magnitude_plot(result))
    names = ("p10", "p50", "p90", "p99", "max")
    counts, kinds = [], []
    for layer in result["layers"]:
        counts.append([_row_head(layer["label"]), _value(layer["l0"]), _value(layer["density"], percent)])
        counts[-1] += [_value(layer["unions"][run], percent) for run in figures.RUN_LENGTHS]
        counts[-1] += [_value(layer["l0_quantiles"][name]) for name in names]
        counts[-1] += [_value(layer["dead_neurons"]), _value(layer["always_on_neurons"])]
        kinds.append([_row_head(layer["label"]), _value(layer["hottest_share"]["10%"], percent)])
        kinds[-1] += [_value(layer["effective_neurons"])]
        kinds[-1] += [_value(layer["magnitude_share"][top], percent) for top in ("1%", "5%", "10%")]
    count_headings = ["layer", "mean L0", "density", *(f"union of {run} tokens" for run in figures.RUN_LENGTHS)]
    count_headings += [*(f"L0: {name}" for name in names), "dead", "always on"]
    kind_headings = ["layer", "hottest 10 % have", "effective neurons"]
    kind_headings += ["top 1 % carry", "top 5 % carry", "top 10 % carry"]
    return (
        "<section><h2>Layer by layer</h2>"
        + _figures("layers", plots)
        + _table("How many neurons fire", count_headings, counts)
        + '<p class="note">L0: neurons whose h is not zero, for one token; p50 is the median over tokens. Union of 64 '
        "tokens: neurons active for at least one of 64 neighbouring tokens, by which the time of many tokens at once "
        "goes. Dead: never active on this text. Always on: active for every token.</p>"
        + _table("Which neurons fire, and how strongly", kind_headings, kinds)
        + '<p class="note">Hottest: share of all firings that the tenth of neurons firing most often has. Effective '
        "neurons: (sum |h|)² / sum h², as many equally strong ones would carry a token as unevenly. Top 1 %: share of "
        "a token's sum of |h| in its strongest neurons, from an even sample of "
        f"{result['layers'][0]['magnitude_sample']:,} tokens.</p></section>"
    )


def _places(result) -> str:
    (key, name), vocabulary = measure(result), result["vocabulary"]
    tables = []
    for which in ("quietest", "busiest"):
        rows = [
            [_row_head(_visible(item["text"]), "code"), _value(item["count"]), _value(item[key])]
            for item in vocabulary[which]
        ]
        tables.append(_table(f"The {which} tokens", ["token", "times seen", name], rows))
    return (
        "<section><h2>Position by position, token by token</h2>"
        f"<p>Each window of {result['context']:,} tokens starts afresh, as a prompt does. {vocabulary['seen']:,} "
        f"vocabulary items occur; listed are those seen at least {vocabulary['listed_from']} times, because a rarer "
        "one's mean is chance. Figures are means over layers.</p>"
        + _figures("places", [figures.position_plot(result), figures.count_plot(result)])
        + f'<div class="pair">{"".join(tables)}</div></section>'
    )


def _passage(result) -> str:
    (key, name), passage = measure(result), result["passage"]
    layers = passage[key]
    mean = [round(sum(values) / len(layers), 1) for values in zip(*layers, strict=True)]
    most = max(*mean, 1e-9)
    tokens = "".join(
        f'<span style="--v:{value / most:.3f}" title="{value:,} {name}">{escape(text)}</span>'
        for text, value in zip(passage["text"], mean, strict=True)
    )
    options = '<option value="0">mean of all layers</option>' + "".join(
        f'<option value="{index}">layer {escape(layer["label"])}</option>'
        for index, layer in enumerate(result["layers"], start=1)
    )
    top = sorted(range(len(mean)), key=mean.__getitem__, reverse=True)[:5]
    spoken = ", ".join(f"“{_visible(passage['text'][index])}” ({number(mean[index])})" for index in top)
    return (
        "<section><h2>A passage</h2>"
        f"<p>How a window begins, each token shaded by its {name}. Busiest: {escape(spoken)}.</p>"
        f'<p><label class="layer" hidden>Shade by <select>{options}</select></label> '
        f'<span class="note">0<i class="scale"></i><span class="scale-top">{most:,.1f}</span> {name}</span></p>'
        f'<p class="passage" data-name="{name}" data-values="{escape(json.dumps([mean, *layers]))}">{tokens}</p>'
        "</section>"
    )


def _conversion(result) -> str:
    cost = result["conversion"]
    rows = [[_row_head(name), _value(row["loss"]), _value(row["increase"], increase)] for name, row in changes(cost)]
    return (
        f"<section><h2>What a conversion would cost</h2><p>{escape(conversion_sentence(result))}</p>"
        + _figures("conversion", [figures.negative_plot(result), figures.oracle_plot(cost)])
        + _table("Loss of the untrained model", ["neurons", "loss (nats per token)", "change"], rows)
        + f'<p class="note">On the first {cost["tokens"]:,} tokens, in windows of {cost["context"]:,}; the dense loss '
        f"is {number(cost['loss'])}. The strongest neurons of a token are those of largest |h| times the norm of their "
        "column in the down projection. A gate cannot know them beforehand: so few neurons hardly cost less.</p>"
        "</section>"
    )


def _savings(savings) -> str:
    how = "measured" if savings["measured"] else "predicted"
    headings = ["layer", "density"]
    for which in ("decode", "prefill"):
        headings += [f"{which}: {what}" for what in ("path", "dense ms", f"sparse ms ({how})", "speed-up")]
    rows = []
    for index, row in enumerate(savings["layers"]):
        cells = [_row_head(index), _value(row["density"], percent)]
        for which in ("decode", "prefill"):
            times = row[which]
            cells += [_cell(times["path"]), *(_value(times[key], _milliseconds) for key in ("dense_ms", "sparse_ms"))]
            cells.append(_times(times["dense_ms"] / times["sparse_ms"]))
        rows.append(cells)
    what_if = [
        [_value(row["density"], percent), _times(row["decode"]), _times(row["prefill"])]
        for row in savings["if_density"]
    ]
    kind = "measured on synthetic activations" if savings["if_density"][0]["measured"] else "predicted, not measured"
    basis = f" Predictions rest on {savings['basis']}." if savings["basis"] and not savings["measured"] else ""
    plots = [figures.savings_plot(savings, which) for which in ("decode", "prefill")] if savings["relu"] else []
    prefill = f"prefill of {savings['tokens']['prefill']:,} tokens"
    return (
        f"<section><h2>What it would buy</h2><p>{escape(savings_sentence(savings))}</p>"
        + _figures("savings", plots)
        + _table("Time of each feed-forward block", headings, rows)
        + _table(f"Speed-up at other densities ({kind})", ["density", "decode, 1 token", prefill], what_if)
        + f'<p class="note">{escape(savings["device"])}, {savings["threads"]} thread(s), backend '
        f"{escape(savings['backend'])}. "
        "The blocks run one after another on this text's hidden states; medians; single calls, their overhead included."
        f"{escape(basis)}</p></section>"
    )


def _about(result) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rows = {
        "text": ", ".join(result["files"]),
        "tokens": f"{result['tokens']:,}, in windows of {result['context']:,}",
        "model": f"{result['model']} ({result['class']}), {result['dtype']} on {result['device']}",
        "versions": versions,
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows.items())
    return f'<section><h2>How this was made</h2><dl class="about">{items}</dl></section>'


def _figures(name: str, plots: Sequence[Plot | None]) -> str:
    drawn = [plot.svg(f"{name}-{index}") for index, plot in enumerate(plots) if plot is not None]
    return f'<div class="figures">{"".join(drawn)}</div>' if drawn else ""


def _table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="sortable">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value: object) -> str:
    return f"<td>{escape(str(value))}</td>"


def _row_head(value: object, tag: str = "span") -> str:
    return f'<th scope="row"><{tag}>{escape(str(value))}</{tag}></th>'


def _value(value: float | None, show: Callable[[float], str] = number) -> str:
    """A cell that is sorted by its figure."""
    return "<td data-v=''>n/a</td>" if value is None else f'<td data-v="{value}">{escape(show(value))}</td>'


def _milliseconds(value: float) -> str:
    return milliseconds(value).removesuffix(" ms")


def _times(value: float) -> str:
    return _value(value, lambda value: f"{value:.2f}x")


def _visible(text: str) -> str:
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "(empty)"

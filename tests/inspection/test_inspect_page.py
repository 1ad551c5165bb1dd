"""The page of `hf-twell inspect` in a real browser: it loads alone, without a complaint, and does what it offers."""

import copy
import json
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_twell
from hf_twell.inspection.inspecting import inspect_text
from hf_twell.inspection.report.findings import findings, headline, percent
from hf_twell.inspection.report.page import render
from hf_twell.inspection.savings import ffn_savings
from tests.browser import Browser, find_chromium
from tests.paths import DEMO, HELDOUT, ROOT

EVIL = '</script><script>window.evil = 1</script><img src="https://example.com/x.png" onerror="window.evil=2">&"\''


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    """The demo model on real text, dense and with ReLU."""
    found = {}
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    for kind in ("dense", "sparse"):
        model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
        if kind == "sparse":
            hf_twell.unpatch(hf_twell.sparsify(model))
        found[kind] = inspect_text(model, tokenizer, [HELDOUT], max_tokens=8000)
        found[kind]["savings"] = ffn_savings(model, torch.arange(3, 131)[None], found[kind]["layers"])
    return found


@pytest.fixture(scope="module")
def browser():
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium here; Debian: apt install chromium")
    with Browser(executable) as opened:
        yield opened


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page for a result, and afterwards asserts that it asked for nothing and complained of nothing."""
    browser.requests.clear()
    browser.complaints.clear()
    page = tmp_path / "page.html"

    def show(result, *, width=1100, scheme="light", media="screen"):
        page.write_text(render(result), encoding="utf-8")
        browser.resize(width, 900)
        browser.use(scheme=scheme, media=media)
        browser.open(page)
        return browser

    yield show
    browser.evaluate("0")  # events that are still under way arrive before its answer
    assert set(browser.requests) == {page.as_uri()}
    assert not browser.complaints


@pytest.mark.browser
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_every_width_and_scheme(opened, results, kind):
    paper = set()
    for scheme in ("light", "dark"):
        for width in (320, 375, 768, 1400):
            page = opened(results[kind], width=width, scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (scheme, width)
            assert page.evaluate("document.querySelector('h1').textContent") == headline(results[kind])
            paper.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(paper) == 2
    assert page.pdf().startswith(b"%PDF")
    printed = opened(results[kind], scheme="dark", media="print")
    assert printed.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.browser
def test_tables_sort(opened, results):
    page = opened(results["sparse"])
    column = "[...document.querySelectorAll('table')[0].tBodies[0].rows].map(row => row.cells[1].dataset.v)"
    button = "document.querySelectorAll('table')[0].querySelectorAll('th button')[1]"
    l0 = sorted(layer["l0"] for layer in results["sparse"]["layers"])
    page.evaluate(f"{button}.click()")
    assert [float(value) for value in page.evaluate(column)] == l0[::-1]
    assert page.evaluate(f"{button}.closest('th').getAttribute('aria-sort')") == "descending"
    page.evaluate(f"{button}.click()")
    assert [float(value) for value in page.evaluate(column)] == l0


@pytest.mark.browser
def test_the_passage_shows_one_layer(opened, results):
    page = opened(results["sparse"])
    values = results["sparse"]["passage"]["l0"][2]
    page.evaluate(
        "const s = document.querySelector('label.layer select'); s.value = '3'; s.dispatchEvent(new Event('change'))"
    )
    shades = page.evaluate("[...document.querySelectorAll('.passage span')].map(s => s.style.getPropertyValue('--v'))")
    assert [float(shade) for shade in shades] == pytest.approx([v / max(values) for v in values], abs=1e-3)
    assert page.evaluate("document.querySelector('.passage').textContent") == "".join(
        results["sparse"]["passage"]["text"]
    )


@pytest.mark.browser
def test_plots_have_text_alternatives(opened, results):
    page = opened(results["sparse"])
    labelled = "[...document.querySelectorAll('svg.plot')].map(plot => plot.getAttribute('aria-labelledby').split(' ')"
    texts = page.evaluate(f"{labelled}.map(id => document.getElementById(id).textContent))")
    assert len(texts) == 8
    assert all(title and description for title, description in texts)
    # What is drawn lies inside its picture.
    overflow = """[...document.querySelectorAll('svg.plot')].flatMap(plot => {
      const frame = plot.getBoundingClientRect();
      const boxes = [...plot.querySelectorAll('rect, circle, text, path')].map(mark => mark.getBoundingClientRect());
      return boxes.filter(box => box.left < frame.left - 1 || box.right > frame.right + 1
        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
    }).length"""
    assert page.evaluate(overflow) == 0


@pytest.mark.browser
def test_hostile_text_stays_text(opened, results):
    result = copy.deepcopy(results["sparse"])
    result["model"] = result["files"][0] = result["class"] = EVIL
    result["warnings"] = [EVIL]
    result["passage"]["text"][:3] = [EVIL, "\n", "\u202e"]
    result["vocabulary"]["busiest"][0]["text"] = EVIL
    page = opened(result)
    assert page.evaluate("typeof window.evil") == "undefined"
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert EVIL in page.evaluate("document.querySelector('.passage').textContent")


@pytest.mark.browser
def test_many_layers_and_few_tokens(opened, results):
    deep = copy.deepcopy(results["sparse"])
    deep["layers"] = deep["layers"] * 12
    deep["savings"]["layers"] = deep["savings"]["layers"] * 12
    for row in deep["positions"]:
        row["l0"], row["effective_neurons"] = row["l0"] * 12, row["effective_neurons"] * 12
    for key in ("l0", "effective_neurons"):
        deep["passage"][key] = deep["passage"][key] * 12
    assert "48 layers" in opened(deep).evaluate("document.querySelector('.model').textContent")


@pytest.mark.browser
def test_a_complaint_is_noticed(browser, tmp_path):
    """The checks above can fail: a page that asks for a picture and throws is caught at both."""
    page = tmp_path / "bad.html"
    page.write_text("<img src='picture.png'><script>console.error('no'); throw new Error('oh')</script>")
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(page)
    browser.evaluate("0")
    assert len(set(browser.requests)) == 2
    assert len(browser.complaints) >= 2


def tables(page: str) -> dict[str, list[dict[str, float | None]]]:
    """{caption: rows of {heading: the figure that is sorted by}}"""
    found = {}
    for caption, head, body in re.findall(r"<caption>(.*?)</caption><thead>(.*?)</thead><tbody>(.*?)</tbody>", page):
        headings = re.findall(r'<th scope="col">(.*?)</th>', head)[1:]
        rows = [re.findall(r"<td(?: data-v=[\"'](.*?)[\"'])?>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]
        rows = [[float(value) if value else None for value in row] for row in rows]
        found[caption] = [dict(zip(headings, row[-len(headings) :], strict=True)) for row in rows]
    return found


def test_every_column_holds_its_figure(results):
    result = copy.deepcopy(results["sparse"])
    for index, layer in enumerate(result["layers"]):
        layer["dead_neurons"], layer["always_on_neurons"] = 60 + index, 7 + index
    result["dead"] = sum(layer["dead_neurons"] for layer in result["layers"]) / (4 * 1024)
    savings = result["savings"] | {"relu": True, "measured": False, "backend": "cpu"}
    result["savings"] = savings
    for index, row in enumerate(savings["layers"]):
        row["decode"] = {"path": "sparse", "dense_ms": 4.0 + index, "sparse_ms": 1.0}
        row["prefill"] = {"path": "sparse", "dense_ms": 30.0, "sparse_ms": 20.0 + index}
    savings["if_density"] = [{"density": 0.1, "measured": False, "decode": 5.0, "prefill": 3.0}]
    savings["total"]["decode"]["speedup"], savings["total"]["prefill"]["speedup"] = 4.25, 1.5
    page = render(result)
    shown = tables(page)
    for layer, some, kinds in zip(
        result["layers"], shown["How many neurons fire"], shown["Which neurons fire, and how strongly"], strict=True
    ):
        quantiles = {f"L0: {name}": layer["l0_quantiles"][name] for name in ("p10", "p50", "p90", "p99", "max")}
        assert some == {
            **{"mean L0": layer["l0"], "density": layer["density"]},
            **{f"union of {run} tokens": layer["unions"][run] for run in ("16", "64", "128")},
            **quantiles,
            **{"dead": layer["dead_neurons"], "always on": layer["always_on_neurons"]},
        }
        assert kinds == {
            "hottest 10 % have": layer["hottest_share"]["10%"],
            "effective neurons": layer["effective_neurons"],
            **{f"top {n} % carry": layer["magnitude_share"][f"{n}%"] for n in (1, 5, 10)},
        }
    for which in ("quietest", "busiest"):
        items = [[item["count"], item["l0"]] for item in result["vocabulary"][which]]
        assert [list(row.values()) for row in shown[f"The {which} tokens"]] == items
    for index, row in enumerate(shown["Time of each feed-forward block"]):
        assert (row["decode: dense ms"], row["decode: sparse ms (predicted)"]) == (4 + index, 1)
        assert (row["prefill: dense ms"], row["prefill: sparse ms (predicted)"]) == (30, 20 + index)
        assert (row["decode: speed-up"], row["prefill: speed-up"]) == (4 + index, 30 / (20 + index))
    (row,) = shown["Speed-up at other densities (predicted, not measured)"]
    assert [row["decode, 1 token"], *row.values()] == [5, 5, 3]

    tiles = dict(reversed(tile) for tile in re.findall(r"<li><b>(.*?)</b>(.*?)</li>", page))
    assert tiles == {
        "density: share of neurons that fire for a token": percent(result["density"]),
        "union of 64: share that fires for at least one of 64 neighbours": percent(result["unions"]["64"]),
        "active neurons per token, mean of layers": f"{result['l0']:,.0f}",
        "dead: never fired on this text": percent(result["dead"]),
        "tokens read": f"{result['tokens']:,}",
        "FFN speed-up in decode, predicted": "4.25x",
        "FFN speed-up in prefill, predicted": "1.50x",
    }
    l0 = [layer["l0"] for layer in result["layers"]]
    assert f"busiest layer ({l0.index(max(l0))})" in page
    assert f"quietest layer ({l0.index(min(l0))})" in page
    whiskers = re.findall(r'class="whisker" d="M[\d.]+ ([\d.]+)V([\d.]+)', page)
    assert len(whiskers) == 4
    assert all(float(low) > float(high) for low, high in whiskers), "pixels from the top"


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_very_little_text(kind, tmp_path):
    """One token, one window: every part that cannot be known is left out or says so."""
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    if kind == "sparse":
        hf_twell.unpatch(hf_twell.sparsify(model))
    path = tmp_path / "one.txt"
    path.write_text("a")
    result = inspect_text(model, AutoTokenizer.from_pretrained(DEMO / "model"), [path])
    result["savings"] = None
    assert result["tokens"] == 2
    assert "n/a" in render(result)
    assert [found["title"] for found in findings(result)]


def test_one_layer(results):
    for kind in ("dense", "sparse"):
        result = copy.deepcopy(results[kind])
        del result["layers"][1:]
        for row in (*result["positions"], result["passage"]):
            row["l0"], row["effective_neurons"] = row["l0"][:1], row["effective_neurons"][:1]
        assert "<h1>" in render({**result, "savings": None})


def test_silent_layers_have_no_shares(results):
    """A layer in which nothing fires has no hottest and no strongest neurons, and does not lower the others' means."""
    result = {**copy.deepcopy(results["sparse"]), "savings": None}
    result["layers"] = [copy.deepcopy(result["layers"][3]) for _ in range(4)]
    said = [found["text"] for found in findings(result) if "tenth" in found["text"] or "strongest" in found["text"]]
    assert len(said) == 2
    for silent in (result["layers"][:2], result["layers"]):
        for layer in silent:
            layer["magnitude_sample"] = 0
            for kind in ("hottest_share", "magnitude_share"):
                layer[kind] = dict.fromkeys(layer[kind])
        rest = said if silent is not result["layers"] else []
        assert [found["text"] for found in findings(result) if found["text"] in said] == rest
        assert ("strongest 10 % carry" in render(result)) == bool(rest)
    assert not any("carry" in found["text"] for found in findings(result))


def test_percent():
    shown = {0: "0 %", 0.00049: "0.049 %", 0.0123: "1.2 %", 0.1: "10 %", 0.996: "99.6 %", 0.99999: "99.9 %", 1: "100 %"}
    assert {value: percent(value) for value in shown} == shown


def test_rendering_needs_no_torch(results, tmp_path):
    """The card generator reads the same JSON; so may anything else, without loading PyTorch."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps(results["sparse"]))
    code = (
        "import json, sys; from hf_twell.cli.inspect import summary\n"
        "from hf_twell.inspection.report.page import render\n"
        f"result = json.load(open({str(path)!r})); render(result); summary(result)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

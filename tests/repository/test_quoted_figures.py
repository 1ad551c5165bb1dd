"""README.md and docs/ have no figure that is not a row's, and no row is quoted that names no commit."""

import json

import pytest
import torch

from hf_twell.bench.environment import environment
from tests import quoting
from tests.quoted_figures import GIVEN, quotes
from tests.quoting import ROOT, constant, differing, places, read, row, speedup, unfounded

PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
QUOTES = quotes()


@pytest.mark.parametrize("page", dict.fromkeys([*PAGES, *QUOTES]))
def test_what_is_quoted_is_as_the_rows(page):
    assert not differing(read(page), QUOTES.get(page, []))


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_is_a_rows(page):
    text, given = read(page), GIVEN.get(page, ())
    assert not unfounded(text, QUOTES.get(page, []), given), "a row of these (tests/quoted_figures.py), or no figures"
    assert all(passage in text for passage in given)


@pytest.mark.parametrize(
    ("new", "figures"),
    [
        ("A block is 1.9 times as fast.", 1),
        ("It takes 12 µs, or 7.5 ms in all.", 2),
        ("Memory falls by 40 %, to 3 GiB, and energy to 2.5 mJ.", 3),
        ("It is 2x, \u00d73 or 4\u00d7 as fast.", 3),
        ("Between 20 and 30 tokens/s; 40 tokens a second.", 3),
        ("The loss is 3.14.", 1),
        ("Attention 1.53 takes 20-30 percent, 5 hours and 540 TFLOP/s.", 4),
        ("| 2 | 31 | 9 |", 3),
        ("It differs by 2e-5, or 1.5e-3; it draws 680 W and takes 2.5 J.", 4),
        ("Four fifths of the excess stay, five minutes pass, and a third is lost.", 3),
        ("It is twice as fast at half the memory; two and a half times.", 3),
        ("One model is sent twice, in two ways, by a second command.", 0),
    ],
)
@pytest.mark.parametrize("page", ["README.md", "docs/serving.md"])
def test_a_new_figure_needs_a_row(page, new, figures):
    assert len(unfounded(f"{read(page)} {new}", QUOTES.get(page, []), GIVEN[page])) == figures


@pytest.mark.parametrize("page", PAGES)
def test_a_figure_that_changes_is_found(page):
    """Each one, in its last digit."""
    text = read(page)
    for quote in QUOTES.get(page, []):
        for group in range(1, 1 + len(quote.values)):
            end = places(quote, text)[0].end(group)
            last = text[end - 1]
            altered = f"{text[: end - 1]}{(int(last) + 1) % 10 if last.isdigit() else 's'}{text[end:]}"
            assert len(places(quote, altered)) < len(places(quote, text)), quote.text


def test_a_row_without_a_commit_is_not_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr(quoting, "ROOT", tmp_path)
    rows = [
        {"a": 1, "commit": None},
        {"a": 2, "commit": "1234567"},
        {"a": 3, "commit": None, "committed_with": "1234567"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert [row("rows.jsonl", a=a)["a"] for a in (2, 3)] == [2, 3]
    with pytest.raises(AssertionError, match="names no commit"):
        row("rows.jsonl", a=1)


def test_ratios_are_divided_anew(tmp_path, monkeypatch):
    """A row's own are rounded: 1.4249 to 1.425, which rounds to 1.43."""
    monkeypatch.setattr(quoting, "ROOT", tmp_path)
    times = {"eager_ms": 5.15619, "compiled_ms": 4.49846, "sparse_ms": 3.15699}
    (tmp_path / "rows.jsonl").write_text(json.dumps(times | {"commit": "1234567", "speedup": 1.425}))
    one = row("rows.jsonl")
    assert not [key for key in one if "speedup" in key]
    assert f"{speedup(one):.2f}" == "1.42"


def test_a_limit_is_read_from_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(quoting, "ROOT", tmp_path)
    (tmp_path / "limits.py").write_text("import nowhere\nMOST, LEAST = 2**20, 0.5\nNEAR = 3\n")
    assert [constant("limits.py", name) for name in ("MOST", "LEAST", "NEAR")] == [2**20, 0.5, 3]
    with pytest.raises(KeyError, match="assigns nothing to FAR"):
        constant("limits.py", "FAR")


def test_a_copy_without_git_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("HF_TWELL_COMMIT", "1234567")
    assert environment(torch.device("cpu"))["commit"] == "1234567"

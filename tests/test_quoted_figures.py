"""README.md and docs/ have no figure that is not a row's, and no row is quoted that names no commit."""

import json

import pytest
import torch

from hf_twell.bench.environment import environment
from tests import quoting
from tests.quoted_figures import GIVEN, quotes
from tests.quoting import ROOT, differing, places, read, row, unfounded

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
            altered = f"{text[: end - 1]}{(int(text[end - 1]) + 1) % 10}{text[end:]}"
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


def test_a_copy_without_git_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("HF_TWELL_COMMIT", "1234567")
    assert environment(torch.device("cpu"))["commit"] == "1234567"

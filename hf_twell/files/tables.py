"""Tables of figures: in Markdown for cards and pages, in columns for a terminal."""

from collections.abc import Iterable, Mapping, Sequence

RUNS = ("16", "64", "128")  # neighbouring tokens whose union is measured


def markdown_table(headers: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; None is an empty cell."""
    cells = [["" if value is None else str(value).replace("|", "\\|") for value in row] for row in [headers, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(headers), *lines[1:]]) + "\n"


def text_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text; columns of figures are right-aligned."""
    cells = [[_cell(value) for value in row] for row in [headers, *rows]]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [any(cell[:1].isdigit() for cell in column[1:]) for column in columns]

    def line(row):
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])])


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def unions_head(runs: Iterable[str] = RUNS) -> str:
    """Heads a column of `unions_cell`."""
    return f"union of {' / '.join(runs)} tokens"


def unions_cell(unions: Mapping[str, float | None] | None, runs: Iterable[str] = RUNS) -> str:
    """The share of neurons active in at least one of so many neighbouring tokens; n/a where it is not known."""
    shares = [(unions or {}).get(run) for run in runs]
    told = " / ".join("n/a" if share is None else f"{100 * share:.1f}" for share in shares)
    return "n/a" if not any(share is not None for share in shares) else f"{told} %"


UNIONS = unions_head()


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

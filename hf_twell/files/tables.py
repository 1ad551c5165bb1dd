"""Tables of figures: in Markdown for cards and pages, in columns for a terminal."""

from collections.abc import Sequence


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


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

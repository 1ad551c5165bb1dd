"""SVG plots that need nothing else: one colour scheme for light and dark, a title, units, and a text alternative."""

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 14, 46


class Plot:
    """Axes with marks. x and y are in data units; `x_scale`, `y_scale` map them to 0..1.

    Args:
        title: of the figure, shown above the plot.
        text: what the plot says, for those who do not see it.
        x_label, y_label: with units.

    A `series` is a class of page.css.
    """

    def __init__(self, title: str, text: str, x_label: str, y_label: str) -> None:
        self.title, self.text, self.x_label, self.y_label = title, text, x_label, y_label
        self.marks: list[str] = []
        self.x_scale: Callable[[float], float] = lambda x: x
        self.y_scale: Callable[[float], float] = lambda y: y
        self.legend: list[tuple[str, str]] = []

    def x(self, value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * self.x_scale(value), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self.y_scale(value), 1)

    def y_axis(self, top: float, label: Callable[[float], str]) -> None:
        """Gridlines from 0 to a round number at or above `top`."""
        step = _nice_step(top)
        count = max(1, math.ceil(top / step - 1e-9))
        self.y_scale = lambda value: value / (count * step)
        for index in range(count + 1):
            at = self.y(index * step)
            self.marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
            self.marks.append(_text(LEFT - 6, at + 4, label(index * step), "end"))

    def x_ticks(self, ticks: Sequence[tuple[float, str]]) -> None:
        """At most about ten labels, evenly thinned."""
        every = max(1, math.ceil(len(ticks) / 10))
        for value, label in ticks[::every]:
            self.marks.append(_text(self.x(value), HEIGHT - BOTTOM + 16, label, "middle"))

    def bars(
        self, values: Sequence[float], tips: Sequence[str], series: str = "a", place: tuple[int, int] = (0, 1)
    ) -> None:
        """A bar for each category; `place` = (index, count) puts several series side by side."""
        slots = len(values)
        self.x_scale = lambda x: (x + 0.5) / slots
        width = (WIDTH - LEFT - RIGHT) / slots * (0.8 if slots < 60 else 1) / place[1]
        for index, (value, tip) in enumerate(zip(values, tips, strict=True)):
            left = self.x(index) + width * (place[0] - place[1] / 2)
            height = max(0.5, self.y(0) - self.y(value))
            self.marks.append(
                f'<rect class="fill-{series}" x="{left:.1f}" y="{self.y(0) - height:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}"><title>{escape(tip)}</title></rect>'
            )

    def whiskers(self, lows: Sequence[float], highs: Sequence[float], name: str) -> None:
        self.legend.append(("whisker", name))
        for index, (low, high) in enumerate(zip(lows, highs, strict=True)):
            x, top, bottom = self.x(index), self.y(high), self.y(low)
            self.marks.append(f'<path class="whisker" d="M{x} {bottom}V{top}M{x - 4} {top}h8M{x - 4} {bottom}h8"/>')

    def line(self, points: Sequence[tuple[float, float]], series: str, name: str, dots: bool = True) -> None:
        path = "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
        self.marks.append(f'<path class="line line-{series}" d="M{path}"/>')
        for x, y in points if dots else ():
            self.marks.append(
                f'<circle class="fill-{series}" cx="{self.x(x)}" cy="{self.y(y)}" r="3">'
                f"<title>{escape(f'{name}: {y:.3g}')}</title></circle>"
            )
        self.legend.append((series, name))

    def svg(self, name: str) -> str:
        """The figure; `name` is its id in the page."""
        axis_x, axis_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
        labels = _text(axis_x, HEIGHT - 8, self.x_label, "middle", "label")
        turned = f'<text class="label" transform="translate(13 {axis_y}) rotate(-90)" text-anchor="middle">'
        keys = "".join(
            '<li><svg class="key" viewBox="0 0 24 10" aria-hidden="true">'
            f'<path class="line line-{series}" d="M0 5H24"/></svg>{escape(text)}</li>'
            for series, text in self.legend
        )
        return (
            f'<figure id="{name}"><figcaption>{escape(self.title)}</figcaption>'
            + (f'<ul class="legend">{keys}</ul>' if keys else "")
            + f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-t {name}-d">'
            f'<title id="{name}-t">{escape(self.title)}</title><desc id="{name}-d">{escape(self.text)}</desc>'
            f'{"".join(self.marks)}<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>{labels}'
            f"{turned}{escape(self.y_label)}</text></svg></figure>"
        )


def log_scale(low: float, high: float) -> Callable[[float], float]:
    """Both above 0; a margin keeps the end points off the frame."""
    span = max(1e-9, math.log(high) - math.log(low))
    return lambda value: 0.03 + 0.94 * (math.log(value) - math.log(low)) / span


def _nice_step(top: float) -> float:
    """1, 2 or 5 times a power of ten, for four to six steps."""
    raw = max(top, 1e-12) / 5
    power = 10 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)


def _text(x: float, y: float, content: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'

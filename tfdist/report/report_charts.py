"""Charts of the page of `tfdist report`, as SVG that follows the colors of the page. Needs `matplotlib`."""

import dataclasses
import html
import io
import re
from collections.abc import Sequence
from typing import Any

from tfdist.report.html_markup import Markup, element
from tfdist.report.report_style import LINES
from tfdist.report.telemetry_series import Points

INSTALL = "pip install 'tfdist[report]'"

_INCHES = (4.8, 2.6)
_STYLES = ("-", "--", "-.", ":")
_MOST_NAMED = 8  # With more lines there is no legend.
# matplotlib gets a color of its own for each name, which is replaced in its output.
_COLORS = (*LINES, "text", "soft", "line", "bad")
_STAND_INS = {name: f"#0{number:x}ab{number:02x}" for number, name in enumerate(_COLORS, 1)}


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
      label: Its name.
      segments: Its parts, between which it is interrupted.
      is_marked: Whether its points are marked, since there are few.
    """

    label: str
    segments: Sequence[Points]
    is_marked: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
      name: Name for the identifiers in its SVG, unique in the page.
      title: Its title.
      description: Its content in a sentence, for screen readers.
      x_label, y_label: Names of the axes.
      curves: Its lines.
      marks: Places of vertical lines, at failures.
      is_logarithmic: Whether the y-axis is logarithmic.
      from_zero: Whether the y-axis begins at 0.
    """

    name: str
    title: str
    description: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    marks: Sequence[float] = ()
    is_logarithmic: bool = False
    from_zero: bool = True


def can_draw() -> bool:
    """Returns whether `matplotlib` works here."""
    try:
        import matplotlib.backends.backend_svg  # noqa: F401 (tried)
    except Exception:  # Errors of many classes: a wrong MPLBACKEND, no folder for its cache, another numpy.
        return False
    return True


def drawn(chart: Chart) -> Markup:
    """Returns a figure with the SVG of a chart."""
    caption = element("figcaption", chart.title)
    return element("figure", caption, Markup(_inline(_svg(chart), chart)), class_="chart")


def _svg(chart: Chart) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": chart.name, "font.size": 10.0})
        figure = Figure(figsize=_INCHES, layout="constrained")
        FigureCanvasSVG(figure)
        _draw(figure.add_subplot(), chart)
        figure.patch.set_visible(False)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _draw(axes: Any, chart: Chart) -> None:
    text, soft, line = (_STAND_INS[name] for name in ("text", "soft", "line"))
    is_crowded = len(chart.curves) > _MOST_NAMED
    for number, curve in enumerate(chart.curves):
        color = _STAND_INS[LINES[number % len(LINES)]]
        style = _STYLES[number // len(LINES) % len(_STYLES)] if is_crowded else _STYLES[number % len(_STYLES)]
        for place, segment in enumerate(curve.segments):
            marker = "o" if curve.is_marked or len(segment) < 3 else None
            label = curve.label if place == 0 else None
            x, y = [each[0] for each in segment], [each[1] for each in segment]
            axes.plot(x, y, color=color, linestyle=style, marker=marker, markersize=4, linewidth=1.6, label=label)
    for mark in chart.marks:
        axes.axvline(mark, color=_STAND_INS["bad"], linewidth=1, linestyle=(0, (2, 2)))
    if chart.is_logarithmic:
        axes.set_yscale("log")
    elif chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.patch.set_visible(False)
    axes.set_xlabel(chart.x_label, color=soft)
    axes.set_ylabel(chart.y_label, color=soft)
    axes.tick_params(which="both", colors=soft)
    axes.grid(True, color=line, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_edgecolor(line)
    if 1 < len(chart.curves) <= _MOST_NAMED:
        axes.figure.legend(frameon=False, labelcolor=text, fontsize=9, ncols=4, loc="outside upper center")


def _inline(svg: str, chart: Chart) -> str:
    """Returns an SVG for a page: with the page's colors and unique identifiers, without a size of its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(?<=<g) id="[^"]*"', "", svg)
    svg = re.sub(r'\bid="([^"]*)"', rf'id="{chart.name}-\1"', svg)
    svg = re.sub(r"url\(#", f"url(#{chart.name}-", svg)
    svg = re.sub(r'xlink:href="#', f'href="#{chart.name}-', svg)
    box = re.search(r'viewBox="[\d. -]*"', svg)
    label = element("title", chart.description)
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{html.escape(chart.description)}">{label}'
    svg = re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)
    for name, color in _STAND_INS.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg

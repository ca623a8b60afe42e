"""Pictures: data in, `Axes` out; nothing here measures, trains or computes a result.

Every picture is an opaque white card, so it reads the same on a light and a dark page, and tells its parts apart by
line style, hatch or text as well as by colour. The palette is that of Okabe and Ito ("Color Universal Design", 2008),
chosen for colour-blind readers. No pyplot: a `Figure` is drawn by the Agg canvas and forgotten with its last reference.
"""

import base64
import io
import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from PIL import Image

DPI = 100  # dots of the page per inch of the figure; the PNG has twice as many in each direction
INK = "#1a1a1a"
FAINT = "#d9d9d9"

# category: (colour, hatch), from the bottom of a stack to its top
MEMORY_STYLE: dict[str, tuple[str, str]] = {
    "parameters": ("#0072B2", ""),
    "buffers": ("#7f7f7f", "..."),
    "gradients": ("#D55E00", "///"),
    "optimizer_state": ("#009E73", "\\\\\\"),
    "inputs": ("#56B4E9", "--"),
    "activations": ("#E69F00", ""),
    "temporaries": ("#CC79A7", "xxx"),
}

# colour, dashes, marker of the first, second, ... line
LINE_STYLE: tuple[tuple[str, object, str], ...] = (
    ("#0072B2", "-", "o"),
    ("#D55E00", (0, (5, 2)), "s"),
    ("#009E73", (0, (1.5, 1.5)), "^"),
    ("#CC79A7", (0, (6, 2, 1.5, 2)), "D"),
    ("#1a1a1a", (0, (3, 1, 1, 1, 1, 1)), "v"),
    ("#E69F00", (0, (8, 3)), "P"),
    ("#56B4E9", (0, (2, 4)), "X"),
)

TITLE_SIZE, LABEL_SIZE, TICK_SIZE = 12, 11, 10


class Picture:
    """A figure with the sentence that says in words what it shows; as the value of a cell it is drawn as a PNG.

    `figure` is a matplotlib `Figure`, or an `Axes` of it; `alt`, at least 20 characters, is for readers who cannot see
    it. The PNG has twice the page's resolution and no date or version in it: the same figure gives the same bytes.
    """

    def __init__(self, figure: Figure | Axes, alt: str) -> None:
        figure = figure.figure if isinstance(figure, Axes) else figure
        if not isinstance(figure, Figure):
            raise TypeError(f"figure must be a matplotlib Figure or Axes, got {type(figure).__name__}")
        if not isinstance(alt, str) or len(alt.strip()) < 20:
            raise ValueError(f"alt must say in a sentence (20 characters or more) what the figure shows, got {alt!r}")
        self.figure = figure
        self.alt = " ".join(alt.split())

    def png(self) -> bytes:
        """Draw the figure and return it as a PNG at twice the page's resolution."""
        drawn, packed = io.BytesIO(), io.BytesIO()
        # The layout moves a little until it has been worked out once; only then do all drawings have the same bytes.
        self.figure.draw_without_rendering()
        FigureCanvasAgg(self.figure).print_figure(drawn, format="png", dpi=2 * DPI, facecolor="white")
        # A palette of 256 colours makes the file a third as large, and notebooks are kept under version control.
        with Image.open(drawn) as image:
            image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(packed, format="PNG", optimize=True)
        return packed.getvalue()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict, dict]:
        width, height = (round(DPI * inches) for inches in self.figure.get_size_inches())
        data = {"image/png": base64.b64encode(self.png()).decode("ascii"), "text/plain": self.alt}
        return data, {"image/png": {"alt": self.alt, "width": width, "height": height}}

    def __repr__(self) -> str:
        return self.alt


def live_png(figure: Figure) -> bytes:
    """Draw a figure that is about to be drawn again: like `Picture.png`, but in a hurry and not as small."""
    canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    canvas.print_figure(buffer, format="png", dpi=2 * DPI, facecolor="white", pil_kwargs={"compress_level": 1})
    return buffer.getvalue()


def new_axes(
    rows: int = 1, columns: int = 1, *, width: float = 7.6, height: float = 3.6
) -> tuple[Figure, Axes | list[Axes]]:
    """Return a white figure and its axes in the house style: one `Axes`, or a flat list of them, row by row.

    `width` and `height` are the whole figure's, in inches of 100 pixels.
    """
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.04)
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, number) for number in range(1, rows * columns + 1)]
    for one in axes:
        one.set_facecolor("white")
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color("#666666")
        one.tick_params(labelsize=TICK_SIZE, colors=INK)
        one.set_axisbelow(True)
    return figure, axes[0] if len(axes) == 1 else axes


def plot_memory_timeline(
    timeline: object, axes: Axes | None = None, *, title: str, budget_bytes: int | None = None
) -> Axes:
    """Draw the bytes alive after each allocation and release, stacked by category.

    `timeline` is `MemoryMeter.timeline`: `live_bytes`, one number per event; `by_category`, for each category as many;
    `marks`, pairs (event index, label), drawn as labelled lines. Categories that never hold a byte are left out.
    """
    axes = _axes(axes, height=4.2)
    events = len(timeline.live_bytes)
    x = np.arange(events + 1)
    unit, unit_name = _unit(max([*timeline.live_bytes, budget_bytes or 0, 1]))
    bottom = np.zeros(events + 1)
    for category in _in_order(timeline.by_category):
        values = np.asarray(timeline.by_category[category], dtype=float) / unit
        if not values.any():
            continue
        top = bottom + np.append(values, values[-1:])
        colour, hatch = _memory_style(category)
        axes.fill_between(
            x,
            bottom,
            top,
            step="post",
            facecolor=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.0,
            label=_words(category),
        )
        axes.step(x, top, where="post", color="white", linewidth=0.8)
        bottom = top
    axes.step(x, bottom, where="post", color=INK, linewidth=1.2)
    axes.set_xlim(0, max(events, 1))
    top = max(bottom.max(initial=0), (budget_bytes or 0) / unit)
    axes.set_ylim(0, 1.12 * top if top else 1)
    if budget_bytes is not None:
        _budget_line(axes.axhline, budget_bytes, unit, unit_name)
    rows = _draw_marks(axes, timeline.marks, events)
    axes.set_ylabel(f"bytes alive [{unit_name}]")
    axes.set_xlabel("allocations and releases, in the order they happen")
    _legend_beside(axes)
    return _finish(axes, title, pad=8 + 14 * rows)


def plot_peak_bars(
    at_peak_by_label: Mapping[str, Mapping[str, int]],
    axes: Axes | None = None,
    *,
    title: str,
    budget_bytes: int | None = None,
    legend: str = "beside",
) -> Axes:
    """Draw one horizontal bar a label: the bytes alive at the peak, stacked by category, with the sum at its end.

    `at_peak_by_label` maps a label to `MemoryMeter.at_peak`. `budget_bytes` is drawn as a line across the bars.
    `legend` is "beside" the bars, or "below" them for a narrow picture.
    """
    axes = _axes(axes, height=1.7 + 0.5 * len(at_peak_by_label))
    totals = [sum(parts.values()) for parts in at_peak_by_label.values()]
    unit, unit_name = _unit(max([*totals, budget_bytes or 0, 1]))
    places = np.arange(len(totals))
    left = np.zeros(len(totals))
    for category in _in_order({key: None for parts in at_peak_by_label.values() for key in parts}):
        widths = np.array([parts.get(category, 0) / unit for parts in at_peak_by_label.values()])
        if not widths.any():
            continue
        colour, hatch = _memory_style(category)
        axes.barh(
            places,
            widths,
            left=left,
            height=0.62,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.8,
            label=_words(category),
        )
        left += widths
    furthest = max(left.max(initial=0), (budget_bytes or 0) / unit)
    for place, end in zip(places, left, strict=True):
        if end == 0:
            continue  # a label without a number, for what has none yet
        axes.annotate(
            f"{end:.1f}",
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=TICK_SIZE,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    if budget_bytes is not None:
        _budget_line(axes.axvline, budget_bytes, unit, unit_name)
    axes.set_yticks(places, list(at_peak_by_label))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * furthest if furthest else 1)
    axes.set_xlabel(f"bytes alive at the peak [{unit_name}]")
    if legend == "below":
        _legend_below(axes)
    else:
        _legend_beside(axes)
    return _finish(axes, title)


def plot_peak_by_size(
    peaks: Mapping[int, int],
    axes: Axes | None = None,
    *,
    title: str,
    budget_bytes: int | None = None,
    whole: int | None = None,
    chosen: int | None = None,
) -> Axes:
    """Draw the peak of an update against its micro-batch size; what is above the budget is a cross instead of a dot.

    `peaks` maps a size in samples to bytes. `whole` is the size of the whole batch: its peak, taken in one pass, is a
    diamond off the line, since no gradients wait during that pass. `chosen` gets a ring and its size in words.
    """
    axes = _axes(axes)
    unit, unit_name = _unit(max([*peaks.values(), budget_bytes or 0, 1]))
    sizes = sorted(size for size in peaks if size != whole)
    axes.plot(sizes, [peaks[size] / unit for size in sizes], color="#0072B2", linewidth=1.4, zorder=1)
    for label, marker, colour, inside in (
        ("fits", "o", "#0072B2", True),
        ("does not fit", "X", "#D55E00", False),
    ):
        some = [size for size in sizes if (budget_bytes is None or peaks[size] <= budget_bytes) == inside]
        if some:
            values = [peaks[size] / unit for size in some]
            axes.plot(some, values, linestyle="none", marker=marker, markersize=7, color=colour, label=label)
    if whole in peaks:
        over = budget_bytes is not None and peaks[whole] > budget_bytes
        label = f"all {whole} in one pass{', does not fit' if over else ''}"
        axes.plot(whole, peaks[whole] / unit, "D", markersize=8, color="#D55E00" if over else "#0072B2", label=label)
    if chosen in peaks:
        ring = {"markersize": 15, "markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 1.8}
        axes.plot(chosen, peaks[chosen] / unit, "o", label=f"chosen: {chosen}", **ring)
    if budget_bytes is not None:
        _budget_line(axes.axhline, budget_bytes, unit, unit_name)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.12 * max([*peaks.values(), budget_bytes or 1]) / unit)
    axes.xaxis.set_major_locator(_whole_numbers(axes))
    axes.set_xlabel("micro-batch size [samples]")
    axes.set_ylabel(f"peak [{unit_name}]")
    _legend_beside(axes)
    return _finish(axes, title, grid=True)


def plot_peak_and_time(
    points: Mapping[str, tuple[int, float]],
    axes: Axes | None = None,
    *,
    title: str,
    budget_bytes: int | None = None,
    stack: Sequence[str] = (),
) -> Axes:
    """Draw settings of one update as points: the bytes of its peak across, its time upwards, in times the first one's.

    `points` maps a label to (peak in bytes, seconds). Each point has a letter, which the legend explains; those of
    `stack` are diamonds, joined in that order. `budget_bytes` is a line: what is to its left fits.
    """
    axes = _axes(axes, height=4.6)
    unit, unit_name = _unit(max([*(peak for peak, _ in points.values()), budget_bytes or 0, 1]))
    first = next(iter(points.values()))[1]
    places = {label: (peak / unit, seconds / first) for label, (peak, seconds) in points.items()}
    if stack:
        across, up = zip(*(places[label] for label in stack), strict=True)
        axes.plot(across, up, color="#D55E00", linewidth=1.4, linestyle=(0, (4, 2)), zorder=1)
    for number, (label, (x, y)) in enumerate(places.items()):
        letter = chr(ord("A") + number)
        joined = label in stack
        axes.plot(
            x,
            y,
            linestyle="none",
            marker="D" if joined else "o",
            markersize=8,
            color="#D55E00" if joined else "#0072B2",
            label=f"{letter}  {label}",
        )
        axes.annotate(
            letter,
            (x, y),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=TICK_SIZE,
            fontweight="bold",
            color=INK,
        )
    if budget_bytes is not None:
        _budget_line(axes.axvline, budget_bytes, unit, unit_name)
    axes.set_xlim(0, 1.1 * max([x for x, _ in places.values()] + [(budget_bytes or 0) / unit]))
    axes.set_ylim(0, 1.15 * max(y for _, y in places.values()))
    axes.set_xlabel(f"bytes alive at the peak [{unit_name}]")
    axes.set_ylabel("time of an update [times the first]")
    handles, labels = axes.get_legend_handles_labels()
    legend = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "frameon": False, "borderaxespad": 0}
    axes.legend(handles, labels, fontsize=TICK_SIZE, **legend)
    return _finish(axes, title, grid=True)


def plot_loss_curves(
    curves: Mapping[str, Sequence[float]],
    axes: Axes | None = None,
    *,
    title: str,
    x_label: str = "update",
    y_label: str = "loss",
    log_y: bool = False,
) -> Axes:
    """Draw losses over updates, one line a label, the first broad and each later one thinner.

    Curves that lie on one another stay visible that way. `curves` maps a label to its losses, the first at update 1.
    """
    axes = _axes(axes)
    widths = [6.0 if len(curves) > 1 else 2.0, *np.linspace(2.4, 1.6, max(len(curves) - 1, 0))][: len(curves)]
    for (label, losses), width, (colour, dashes, _) in zip(
        curves.items(), widths, _line_styles(len(curves)), strict=True
    ):
        axes.plot(
            np.arange(1, len(losses) + 1),
            losses,
            color=colour,
            linestyle=dashes,
            linewidth=width,
            label=label,
            alpha=0.45 if width > 5 else 1.0,
        )
    if log_y:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(_whole_numbers(axes))
    return _finish_lines(axes, title, x_label, y_label)


def plot_difference(
    curves: Mapping[str, Sequence[float]],
    axes: Axes | None = None,
    *,
    title: str,
    tolerance: float | None = None,
    x_label: str = "update",
    y_label: str = "difference",
) -> Axes:
    """Draw how far two runs are apart over updates, on a logarithmic axis, one line a label.

    `curves` maps a label to differences (absolute values are drawn), the first at update 1. Zero has no place on the
    axis: a difference of exactly 0 is a gap. `tolerance` is drawn as a line across.
    """
    axes = _axes(axes)
    for (label, values), (colour, dashes, marker) in zip(curves.items(), _line_styles(len(curves)), strict=True):
        sizes = np.abs(np.asarray(values, dtype=float))
        sizes[sizes == 0] = np.nan
        # Markers too: between two gaps a line has no length.
        axes.plot(
            np.arange(1, len(sizes) + 1),
            sizes,
            color=colour,
            linestyle=dashes,
            linewidth=1.2,
            marker=marker,
            markersize=3.5,
            label=label,
        )
    axes.set_yscale("log")
    if tolerance is not None:
        axes.axhline(tolerance, color=INK, linewidth=1.2, linestyle=(0, (2, 2)))
        axes.annotate(
            f"tolerance {tolerance:g}".replace("e-0", "e-"),
            (0, tolerance),
            xycoords=("axes fraction", "data"),
            xytext=(4, -4),
            textcoords="offset points",
            fontsize=TICK_SIZE,
            color=INK,
            va="top",
        )
    axes.xaxis.set_major_locator(_whole_numbers(axes))
    return _finish_lines(axes, title, x_label, y_label)


def plot_lines(
    x: Sequence[float],
    ys: Mapping[str, Sequence[float]],
    axes: Axes | None = None,
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> Axes:
    """Draw one line with markers a label over common values of `x`; both labels say their unit.

    `ys` maps a label to as many numbers as `x` has. A logarithmic x axis is to base 2 and shows the values themselves.
    """
    axes = _axes(axes)
    for (label, values), (colour, dashes, marker) in zip(ys.items(), _line_styles(len(ys)), strict=True):
        axes.plot(x, values, color=colour, linestyle=dashes, marker=marker, markersize=6, linewidth=1.8, label=label)
    if log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(x), [f"{value:g}" for value in x])
        axes.minorticks_off()
    if log_y:
        axes.set_yscale("log")
    return _finish_lines(axes, title, x_label, y_label)


def plot_error_by_size(
    errors: Mapping[int, float],
    axes: Axes | None = None,
    *,
    title: str,
    tolerance: float,
    chosen: int | None = None,
    x_label: str = "micro-batch size [samples]",
) -> Axes:
    """Draw relative errors against a size on a logarithmic axis from 1e-18 up, with the tolerance as a line across.

    `errors` maps a size to a relative error. An error of exactly 0 has no place there: it is drawn at the foot, as a
    triangle. `chosen` gets a ring.
    """
    axes = _axes(axes)
    foot = 1e-18
    sizes = sorted(errors)
    equal = [size for size in sizes if errors[size] == 0]
    apart = [size for size in sizes if errors[size] != 0]
    axes.plot(apart, [errors[size] for size in apart], color="#0072B2", marker="o", markersize=3.5, linewidth=1)
    axes.plot(equal, [foot] * len(equal), "^", color="#009E73", markersize=7, label="exactly 0" if equal else None)
    if chosen in errors:
        ring = {"markersize": 14, "markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 1.8}
        axes.plot(chosen, errors[chosen] or foot, "o", label=f"chosen: {chosen}", **ring)
    axes.axhline(tolerance, color=INK, linewidth=1.2, linestyle=(0, (2, 2)), label=f"tolerance {tolerance:.0e}")
    axes.set_yscale("log")
    axes.set_ylim(foot / 4, 1e3)
    axes.set_xlim(0, max(sizes) + 1)
    return _finish_lines(axes, title, x_label, "relative error")


def plot_found_gradients(found: Sequence[float], axes: Axes | None = None, *, title: str) -> Axes:
    """Draw what each update finds in `.grad` as a bar; 1 is right, and what is not 1 is hatched and has its number."""
    axes = _axes(axes)
    wrong = [abs(value - 1) > 1e-9 for value in found]
    places = range(1, len(found) + 1)
    colours = ["#D55E00" if one else "#56B4E9" for one in wrong]
    hatches = ["///" if one else "" for one in wrong]
    axes.bar(places, found, width=0.8, color=colours, hatch=hatches, edgecolor="white", linewidth=0.8)
    for place, value, one in zip(places, found, wrong, strict=True):
        if one:
            axes.text(place, value + 0.04, f"{value:.3g}", ha="center", fontsize=TICK_SIZE, color=INK)
    axes.axhline(1, color=INK, linewidth=1.2, linestyle=(0, (2, 2)))
    axes.set_ylim(0, 2.2)
    axes.set_xlim(0.4, max(len(found), 1) + 0.6)
    if found:
        axes.xaxis.set_major_locator(_whole_numbers(axes))
    else:
        axes.set_xticks([])
    axes.set_xlabel("update")
    axes.set_ylabel("gradient")
    return _finish(axes, title)


def plot_bar_pairs(
    labels: Sequence[str],
    values: Mapping[str, Sequence[float]],
    axes: Axes | None = None,
    *,
    title: str,
    y_label: str,
) -> Axes:
    """Draw one bar a rule beside one another for each label, with its number above; nan is a gap that says nan.

    `values` maps a rule to as many numbers as there are labels.
    """
    axes = _axes(axes)
    width = 0.8 / len(values)
    highest = max([value for row in values.values() for value in row if math.isfinite(value)], default=0.0) or 1.0
    for place, (rule, row) in enumerate(values.items()):
        lefts = np.arange(len(labels)) + (place - (len(values) - 1) / 2) * width
        heights = [value if math.isfinite(value) else 0.0 for value in row]
        colour, hatch = (("#0072B2", ""), ("#D55E00", "///"), ("#009E73", "..."))[place % 3]
        axes.bar(lefts, heights, 0.92 * width, color=colour, hatch=hatch, edgecolor="white", linewidth=0.8, label=rule)
        for left, value, height in zip(lefts, row, heights, strict=True):
            axes.text(left, height + 0.02 * highest, f"{value:.3g}", ha="center", fontsize=TICK_SIZE, color=INK)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 1.45 * highest)  # room for the legend
    axes.set_ylabel(y_label)
    axes.legend(fontsize=TICK_SIZE, frameon=False, loc="upper right", ncols=1)
    return _finish(axes, title)


def plot_update_parts(
    gradients: Sequence[float],
    results: Mapping[str, float],
    axes: Axes | None = None,
    *,
    title: str,
    threshold: float | None = None,
) -> Axes:
    """Draw the gradient of each micro-batch as a bar, and beside them, hatched, what was made of them.

    `gradients` are numbered from 1; an infinite one reaches the top and is marked with its sign. `results` maps a label
    to a number. `threshold` is drawn as two lines, above and below zero, with a legend.
    """
    axes = _axes(axes)
    values = [*gradients, *results.values()]
    finite = [abs(value) for value in [*values, threshold or 0] if math.isfinite(value)]
    top = 1.25 * max([*finite, 1e-12])
    places = [*range(len(gradients)), *(len(gradients) + 0.5 + i for i in range(len(results)))]
    for place, value in zip(places, values, strict=True):
        made = place >= len(gradients)
        height = math.copysign(top, value) if math.isinf(value) else value
        colour, hatch = ("#E69F00", "///") if made else ("#56B4E9", "")
        axes.bar(place, height, width=0.7, color=colour, hatch=hatch, edgecolor=INK, linewidth=1.0)
        text = ("infinite" if value > 0 else "-infinite") if math.isinf(value) else f"{value:.3g}"
        inside = math.isinf(value)
        axes.annotate(
            text,
            (place, height / 2 if inside else height),
            xytext=(0, 0 if inside else (2 if height >= 0 else -2)),
            textcoords="offset points",
            ha="center",
            va="center" if inside else ("bottom" if height >= 0 else "top"),
            rotation=90 if inside else 0,
            fontsize=TICK_SIZE,
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            zorder=3,
        )
    axes.axhline(0, color=INK, linewidth=1.0)
    for sign in () if threshold is None else (1, -1):
        axes.axhline(sign * threshold, color=INK, linewidth=1.2, linestyle=(0, (2, 2)))
    axes.set_xticks(places, [*(str(i) for i in range(1, len(gradients) + 1)), *results])
    axes.set_ylim(-top if min(values) < 0 or threshold is not None else 0, top)
    if threshold is not None:
        axes.legend(axes.get_lines()[1:2], ["largest norm"], loc="lower right", frameon=False, fontsize=TICK_SIZE)
    axes.set_xlabel("micro-batches, and what is made of them")
    axes.set_ylabel("gradient")
    return _finish(axes, title)


def plot_agreement(
    error_by_layer: Mapping[str, float], axes: Axes | None = None, *, title: str, rounding: float
) -> Axes:
    """Draw the relative error of each layer's gradient on a logarithmic axis, one row a layer.

    Errors up to `rounding` lie in a grey band. An error of exactly 0 has no place on the axis: it is an open mark at
    the left end. The axis runs from 1e-9 to 100 whatever is drawn; an error beyond it is at its end.
    """
    axes = _axes(axes, height=1.4 + 0.3 * len(error_by_layer))
    lowest, highest = 1e-9, 1e2
    axes.set_xscale("log")
    axes.axvspan(lowest, rounding, facecolor="#ececec", zorder=0)
    axes.text(
        1.4 * lowest,
        0.98,
        "rounding",
        transform=axes.get_xaxis_transform(),
        fontsize=TICK_SIZE,
        color="#444444",
        va="top",
    )
    for row, error in enumerate(error_by_layer.values()):
        inside = error <= rounding
        place = min(max(error, 1.6 * lowest), highest / 1.6)
        axes.plot([lowest, place], [row, row], color=FAINT, linewidth=1.5, zorder=1)
        axes.plot(
            place,
            row,
            marker="o" if inside else "X",
            markersize=8,
            color=LINE_STYLE[0][0] if inside else LINE_STYLE[1][0],
            markerfacecolor="white" if error == 0 else None,
        )
    axes.set_xlim(lowest, highest)
    axes.set_xticks([10.0**power for power in range(-8, 3, 2)])
    axes.minorticks_off()
    axes.set_yticks(range(len(error_by_layer)), list(error_by_layer))
    axes.set_ylim(max(len(error_by_layer), 1) - 0.4, -0.9)
    axes.set_xlabel("relative error of the gradient")
    return _finish(axes, title)


def plot_update_times(
    seconds_by_label: Mapping[str, float], axes: Axes | None = None, *, title: str, num_samples: int
) -> Axes:
    """Draw the time of one update as one horizontal bar a label, with its samples per second.

    `seconds_by_label` maps a label to seconds; `num_samples` is what one update sees.
    """
    axes = _axes(axes, height=1.3 + 0.5 * len(seconds_by_label))
    longest = 1000 * max([*seconds_by_label.values(), 1e-9])
    for row, (seconds, (colour, _, _)) in enumerate(
        zip(seconds_by_label.values(), _line_styles(len(seconds_by_label)), strict=True)
    ):
        width = 1000 * seconds
        axes.barh(row, width, height=0.5, color=colour)
        inside = width > 0.6 * longest
        axes.annotate(
            f"{_three_digits(width)} ms\n{_three_digits(num_samples / seconds)} samples/s",
            (width, row),
            xytext=(-5 if inside else 5, 0),
            textcoords="offset points",
            va="center",
            ha="right" if inside else "left",
            fontsize=TICK_SIZE,
            color="white" if inside else INK,
            fontweight="bold" if inside else "normal",
        )
    axes.set_yticks(range(len(seconds_by_label)), list(seconds_by_label))
    axes.set_ylim(max(len(seconds_by_label), 1) - 0.4, -0.6)
    axes.set_xlim(0, 1.05 * longest)
    axes.set_xlabel("time of one update [ms]")
    return _finish(axes, title)


def plot_waiting(axes: Axes, *, title: str, text: str) -> Axes:
    """Draw empty axes with a few words in their middle, for a result that is not there yet."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=LABEL_SIZE, color="#444444")
    axes.set_xticks([])
    axes.set_yticks([])
    return _finish(axes, title)


def plot_group_sizes(groups: Mapping[str, Sequence[int]], axes: Axes | None = None, *, title: str) -> Axes:
    """Draw micro-batches as blocks, joined to the groups of one update each: one row a label, the size in each group.

    `groups` maps a label to group sizes in micro-batches, in order, such as [2, 2, 1]. Groups shorter than the first
    one of their row are hatched.
    """
    axes = _axes(axes, height=1.5 + 0.55 * len(groups))
    longest = max([sum(sizes) for sizes in groups.values()] + [1])
    for row, sizes in enumerate(groups.values()):
        start = 0
        for size in sizes:
            short = size < sizes[0]
            colour = "#E69F00" if short else "#56B4E9"
            for block in range(size if longest <= 80 else 0):
                axes.barh(row, 1, left=start + block, height=0.62, color=colour, edgecolor="white", linewidth=0.8)
            axes.barh(
                row,
                size,
                left=start,
                height=0.62,
                color="none" if longest <= 80 else colour,
                edgecolor=INK,
                linewidth=1.4,
                hatch="///" if short else "",
            )
            if size / longest > 0.02:
                axes.text(
                    start + size / 2,
                    row,
                    str(size),
                    ha="center",
                    va="center",
                    fontsize=TICK_SIZE,
                    color=INK,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9},
                )
            start += size
    axes.set_yticks(range(len(groups)), list(groups))
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlim(-0.01 * longest, 1.01 * longest)
    axes.xaxis.set_major_locator(_whole_numbers(axes))
    axes.set_xlabel("micro-batches, in the order they arrive; a frame is one update")
    return _finish(axes, title)


def plot_micro_batches(micro_batch_size: int, accumulation_steps: int, axes: Axes | None = None, *, title: str) -> Axes:
    """Draw one update as blocks side by side, one a micro-batch, with one square a sample.

    The axes keep their limits, whatever is drawn: the squares are as large as all of them fit, up to a quarter of the
    height.
    """
    axes = _axes(axes, height=2.6)
    across, up = axes.figure.get_size_inches() - (0.35, 0.85)  # about the axes' own, so that squares come out square
    width, height = 48.0, 48.0 * up / across

    def side(columns: int) -> float:
        wide = accumulation_steps * (columns + 1) - 1  # blocks are one square apart
        return min(width / wide, height / math.ceil(micro_batch_size / columns), height / 4)

    def legible(columns: int) -> tuple[float, int]:
        """Of about the same size the widest; a full rectangle, unless its squares are much smaller."""
        return round(side(columns) * (0.75 if micro_batch_size % columns else 1), 1), columns

    columns = max(range(1, micro_batch_size + 1), key=legible)
    square, sample = side(columns), np.arange(micro_batch_size)
    for step in range(accumulation_steps):
        left = (step * (columns + 1) + sample % columns) * square
        colour = LINE_STYLE[0][0] if step % 2 == 0 else "#56B4E9"
        corners = np.stack([left, sample // columns * square], axis=1)[:, None]
        unit_square = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
        axes.add_collection(PolyCollection(corners + 0.86 * square * unit_square, facecolor=colour, linewidths=0))
    axes.set_xlim(-0.5, width + 0.5)
    axes.set_ylim(-0.5, height + 0.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    centres = [(step * (columns + 1) + (columns - 0.14) / 2) * square for step in range(accumulation_steps)]
    axes.set_xticks(centres, range(1, accumulation_steps + 1))
    axes.set_xlabel("micro-batches of one update; a square is one sample")
    return _finish(axes, title)


def plot_gradient(gradient: object, axes: Axes | Sequence[Axes] | None = None, *, title: str) -> Axes | list[Axes]:
    """Draw a gradient as an image: one cell an entry, blue below zero, white at zero, red above.

    `gradient` is a tensor or array, or a dict of them, drawn side by side on one scale (then a list of Axes is
    returned, and `axes` is as many). One dimension becomes one row, more than two become (first, all others). Where
    there are at most 600 entries, a minus sign marks the negative ones.
    """
    if not isinstance(gradient, Mapping):
        return plot_gradient({"": gradient}, None if axes is None else [axes], title=title)[0]
    images = {label: _as_image(values) for label, values in gradient.items()}
    own_figure = axes is None
    if own_figure:
        axes = new_axes(1, len(images), width=max(4.4, min(7.6, 3.2 * len(images))), height=3.4)[1]
        axes = axes if isinstance(axes, list) else [axes]
    limit = max([float(np.abs(image).max()) for image in images.values() if image.size] + [0.0]) or 1.0
    for one, (label, image) in zip(axes, images.items(), strict=True):
        drawn = one.imshow(image, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        if image.size <= 600 and (image < 0).any():
            rows, columns = np.nonzero(image < -0.02 * limit)
            cell_points = 72 * 0.8 * one.figure.get_figwidth() / len(images) / image.shape[1]
            one.scatter(columns, rows, marker="_", s=min(0.5 * cell_points, 7) ** 2, color=INK, linewidths=0.8)
        one.set_xticks([])
        one.set_yticks([])
        one.spines[:].set_visible(False)
        one.set_xlabel(f"{label}\n{image.shape[0]} x {image.shape[1]} entries".strip(), fontsize=LABEL_SIZE, color=INK)
    bar = axes[0].figure.colorbar(drawn, ax=list(axes), shrink=0.9, pad=0.02)
    bar.set_label("gradient", fontsize=LABEL_SIZE, color=INK)
    bar.ax.tick_params(labelsize=TICK_SIZE, colors=INK)
    bar.outline.set_visible(False)
    if own_figure:
        text = _wrapped(title, axes[0].figure.get_figwidth() - 0.5)
        axes[0].figure.suptitle(text, x=0.01, ha="left", fontsize=TITLE_SIZE, fontweight="bold", color=INK)
    else:
        _set_title(axes[0], title, room=axes[0].figure.get_figwidth() - 0.5)
    return list(axes)


# A picture that grows is drawn in two parts: a frame that stays, with the axes of the whole, and what moves in it. That
# is returned as artists, so that a live picture can take them away and draw the next ones over the frame.


def plot_gradient_frame(full_batch: object, axes: Sequence[Axes], *, title: str, limit: float) -> list[Axes]:
    """Draw the full batch's gradient into the second of two clear axes, and prepare the first for `plot_gradient_now`.

    Both show 8 x 8 entries on one fixed scale from -`limit` to `limit`: blue below zero, white at zero, red above, with
    a minus sign on negative entries.
    """
    for one in axes:
        one.set_xticks([])
        one.set_yticks([])
        one.spines[:].set_visible(True)
        one.spines[:].set_color(FAINT)
        one.set_xlabel(" ", fontsize=TICK_SIZE)  # keeps the room
    plot_gradient_now(np.zeros((8, 8)), axes[0], limit=limit, label="")
    plot_gradient_now(full_batch, axes[1], limit=limit, label="the full batch's")
    _set_title(axes[0], title, room=axes[0].figure.get_figwidth() - 0.5, pad=6)
    return list(axes)


def plot_gradient_now(gradient: object | None, axes: Axes, *, limit: float, label: str) -> list[Artist]:
    """Draw a gradient of 8 x 8 entries over its label into its frame, or the word None, and return the artists."""
    image = np.zeros((8, 8)) if gradient is None else _as_image(gradient)
    drawn: list[Artist] = [axes.imshow(image, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")]
    if gradient is None:
        drawn.append(axes.text(3.5, 3.5, "None", ha="center", va="center", fontsize=LABEL_SIZE, color=INK))
    else:
        rows, columns = np.nonzero(image < -0.04 * limit)
        drawn.append(axes.scatter(columns, rows, marker="_", s=16, color=INK, linewidths=0.8))
    return [*drawn, axes.text(3.5, 7.9, label, ha="center", va="top", fontsize=TICK_SIZE, color=INK)]


def plot_bytes_frame(timeline: object, axes: Axes, *, title: str, starts: Mapping[str, int]) -> Axes:
    """Prepare clear axes for `plot_bytes_so_far` of this timeline: limits, unit and legend are those of the whole.

    `timeline` is `MemoryMeter.timeline`. `starts` maps labels to the events at which they begin, marked below.
    """
    unit, unit_name = _unit(max([*timeline.live_bytes, 1]))
    for start in starts.values():
        axes.axvline(start, color="#444444", linewidth=0.9, linestyle=(0, (1, 2)))
    axes.set_xlim(0, max(1.02 * len(timeline.live_bytes), 1))
    axes.set_ylim(0, 1.6 * max([*timeline.live_bytes, 1]) / unit)
    axes.set_xticks(list(starts.values()), list(starts), ha="left")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_ylabel(f"alive [{unit_name}]")
    present = [category for category in _in_order(timeline.by_category) if any(timeline.by_category[category])]
    axes.legend(
        handles=[_patch_of(category) for category in reversed(present)],
        loc="upper left",
        ncols=3,
        frameon=False,
        fontsize=TICK_SIZE - 2,
        handlelength=1.3,
        columnspacing=0.7,
        labelspacing=0.2,
        borderaxespad=0.1,
    )
    return _finish(axes, title, pad=6)


def plot_bytes_so_far(timeline: object, until: int, axes: Axes) -> list[Artist]:
    """Draw the bytes alive up to event `until`, stacked by category, into their frame, and return the artists.

    The number at the end of the trace is what is alive there.
    """
    unit, _ = _unit(max([*timeline.live_bytes, 1]))
    x = np.arange(until + 1)
    bottom = np.zeros(until + 1)
    drawn: list[Artist] = []
    for category in _in_order(timeline.by_category):
        if any(timeline.by_category[category]):
            top = bottom + np.asarray(timeline.by_category[category][: until + 1], dtype=float) / unit
            colour, hatch = _memory_style(category)
            style = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.0}
            drawn.append(axes.fill_between(x, bottom, top, step="post", **style))
            bottom = top
    drawn += axes.step(x, bottom, where="post", color=INK, linewidth=1.2)
    drawn += axes.plot([until], bottom[-1:], marker="o", markersize=5, color=INK, clip_on=False)
    is_late = until > 0.8 * len(timeline.live_bytes)
    number = axes.annotate(
        f"{bottom[-1]:.0f}",
        (until, bottom[-1]),
        xytext=(-4 if is_late else 4, 4),
        textcoords="offset points",
        ha="right" if is_late else "left",
        fontsize=TICK_SIZE,
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
    )
    return [*drawn, number]


def plot_steps_frame(events: Sequence[int], values: Sequence[float], axes: Axes, *, title: str, y_label: str) -> Axes:
    """Prepare clear axes for `plot_steps_so_far` of these values: the limits are those of the whole."""
    axes.set_xlim(0, max(1.02 * events[-1], 1))
    axes.set_ylim(0, 1.15 * max([*values, 1e-12]))
    axes.set_xticks([])
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.set_ylabel(y_label)
    axes.set_xlabel("allocations and releases, in order")
    return _finish(axes, title, pad=6)


def plot_steps_so_far(events: Sequence[int], values: Sequence[float], until: int, axes: Axes) -> list[Artist]:
    """Draw a value that changes in jumps, `values[i]` from event `events[i]` on, up to place `until` of both.

    It is drawn into its frame, and the artists are returned.
    """
    line = axes.step(events[: until + 1], values[: until + 1], where="post", color=LINE_STYLE[0][0], linewidth=2)
    end = axes.plot([events[until]], [values[until]], marker="o", markersize=5, color=INK, clip_on=False)
    return [*line, *end]


def _patch_of(category: str) -> Patch:
    colour, hatch = _memory_style(category)
    return Patch(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0, label=_words(category))


def _axes(axes: Axes | None, height: float = 3.6) -> Axes:
    return new_axes(height=height)[1] if axes is None else axes


def _whole_numbers(axes: Axes) -> MaxNLocator:
    """Return a locator of ticks at whole numbers, as many as have room beside one another."""
    return MaxNLocator(nbins=max(3, min(9, int(1.7 * _room(axes)))), integer=True)


def _room(axes: Axes) -> float:
    """Return about how many inches of the figure's width are left to the axes, without the labels of their y axis."""
    columns = axes.get_subplotspec().get_gridspec().ncols if axes.get_subplotspec() else 1
    names = [label.get_text() for label in axes.get_yticklabels() if "$" not in label.get_text()]
    return axes.figure.get_figwidth() / columns - 0.8 - 0.075 * max([0, *(len(name) - 6 for name in names)])


def _as_image(values: object) -> np.ndarray:
    """Turn a tensor or array into two dimensions, without a gradient of its own."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    array = np.atleast_1d(np.asarray(values, dtype=float))
    return array.reshape(1, -1) if array.ndim == 1 else array.reshape(array.shape[0], -1)


def _unit(largest_bytes: float) -> tuple[int, str]:
    """Return the largest binary unit that `largest_bytes` has at least two of, and its name."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest_bytes >= 2 * 1024**power:
            return 1024**power, name
    return 1, "B"


def _in_order(categories: Mapping[str, object]) -> list[str]:
    """Return the categories in the order of MEMORY_STYLE, unknown ones last."""
    order = list(MEMORY_STYLE)
    return sorted(categories, key=lambda name: order.index(name) if name in order else len(order))


def _memory_style(category: str) -> tuple[str, str]:
    return MEMORY_STYLE.get(category, ("#bbbbbb", "++"))


def _words(category: str) -> str:
    return category.replace("_", " ")


def _line_styles(count: int) -> list[tuple[str, object, str]]:
    return [LINE_STYLE[number % len(LINE_STYLE)] for number in range(count)]


def _budget_line(draw: object, budget_bytes: int, unit: int, unit_name: str) -> None:
    label = f"budget {budget_bytes / unit:.4g} {unit_name}"
    draw(budget_bytes / unit, color=INK, linewidth=2, linestyle=(0, (4, 2)), label=label)


def _draw_marks(axes: Axes, marks: Sequence[tuple[int, str]], events: int) -> int:
    """Draw a line at each mark and its label above the axes, on as many rows as keep labels apart; return the rows."""
    room = axes.figure.get_figwidth() - 2.7  # inches left to the axes beside their labels and the legend
    ends: list[float] = []  # where the last label on each row ends, in inches
    for event, label in sorted(marks):
        x = room * event / max(events, 1)
        row = next((row for row, end in enumerate(ends) if x > end), len(ends))
        width = 0.078 * len(label) + 0.1
        ends[row : row + 1] = [x + width]
        axes.axvline(event, color="#444444", linewidth=0.9, linestyle=(0, (1, 2)))
        axes.annotate(
            label,
            (event, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3 + 14 * row),
            textcoords="offset points",
            fontsize=TICK_SIZE,
            color=INK,
            annotation_clip=False,
        )
    return len(ends)


def _legend_beside(axes: Axes) -> None:
    """Put the legend to the right of the axes, in the order in which a stack is drawn from the top down."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles[::-1],
            labels[::-1],
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            frameon=False,
            fontsize=TICK_SIZE,
            handlelength=2.2,
            handleheight=1.3,
            borderaxespad=0,
        )


def _legend_below(axes: Axes) -> None:
    """Put the legend under the axes, in three columns, in the order in which bars are stacked."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles,
            labels,
            loc="upper center",
            bbox_to_anchor=(0.42, -0.3),
            ncols=3,
            frameon=False,
            fontsize=TICK_SIZE - 1,
            handlelength=1.6,
            handletextpad=0.5,
            columnspacing=1.0,
            borderaxespad=0,
        )


def _three_digits(number: float) -> str:
    """Return a positive number with three digits that count, and no fraction from 100 on."""
    decimals = max(0, 2 - math.floor(math.log10(number))) if number > 0 else 0
    return f"{number:,.{decimals}f}"


def _finish_lines(axes: Axes, title: str, x_label: str, y_label: str) -> Axes:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if len(axes.get_lines()) and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=TICK_SIZE, handlelength=3.2)
    return _finish(axes, title, grid=True)


def _finish(axes: Axes, title: str, *, pad: float = 10, grid: bool = False) -> Axes:
    """Set the title and the sizes of all text."""
    axes.xaxis.label.set(size=LABEL_SIZE, color=INK)
    axes.yaxis.label.set(size=LABEL_SIZE, color=INK)
    if grid:
        axes.grid(True, color=FAINT, linewidth=0.8)
    _set_title(axes, title, pad=pad, room=_room(axes))
    return axes


def _set_title(axes: Axes, title: str, *, room: float, pad: float = 10) -> None:
    """Write the title at the left, on as many lines as `room` (inches) needs."""
    text = _wrapped(title, room)
    axes.set_title(text, loc="left", fontsize=TITLE_SIZE, fontweight="bold", color=INK, pad=pad)


def _wrapped(title: str, room: float) -> str:
    if not isinstance(title, str) or not title.strip():
        raise ValueError(f"title must state what the picture shows, got {title!r}")
    return textwrap.fill(title, max(20, math.floor(room / (0.0078 * TITLE_SIZE))))

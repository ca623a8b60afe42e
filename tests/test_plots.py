"""Tests of course_lib.plots: what is drawn, read back from the Axes, and how a picture leaves the kernel."""

import base64
import io
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

from course_lib import plots
from course_lib.plots import Picture, live_png, new_axes

MIB = 1024**2
ALT = "A line that rises from one to four."


def timeline():
    by_category = {
        "activations": [0, 2 * MIB, 4 * MIB, 0],
        "parameters": [MIB] * 4,
        "buffers": [0] * 4,
        "gradients": [0, 0, 0, MIB],
    }
    live_bytes = [sum(values) for values in zip(*by_category.values(), strict=True)]
    return SimpleNamespace(live_bytes=live_bytes, by_category=by_category, marks=[(0, "forward"), (2, "backward")])


def texts(axes):
    return [text.get_text() for text in axes.texts]


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def every_plot():
    return {
        "timeline": plots.plot_memory_timeline(timeline(), title="Peak", budget_bytes=4 * MIB),
        "bars": plots.plot_peak_bars({"64": {"parameters": MIB, "activations": 4 * MIB}}, title="Peak"),
        "trade": plots.plot_peak_and_time({"plain": (4 * MIB, 1.0), "cut": (2 * MIB, 1.5)}, title="Bytes for time"),
        "sizes": plots.plot_peak_by_size({1: MIB, 4: 4 * MIB}, title="Four fit", budget_bytes=5 * MIB),
        "loss": plots.plot_loss_curves({"full": [2.0, 1.0], "4 x 16": [2.0, 1.0]}, title="One"),
        "difference": plots.plot_difference({"SGD": [1e-16, 1e-15]}, title="Rounding", tolerance=1e-6),
        "lines": plots.plot_lines([1, 2], {"a": [1, 2]}, title="Grows", x_label="batch [samples]", y_label="bytes"),
        "groups": plots.plot_group_sizes({"flushed": [2, 2, 1]}, title="The tail"),
        "parts": plots.plot_update_parts([4.0, -2.0], {"step": 1.0}, title="Clipped", threshold=1.0),
        "blocks": plots.plot_micro_batches(16, 4, title="4 passes"),
        "gradient": plots.plot_gradient(torch.tensor([[1.0, -2.0]]), title="Gradient"),
    }


@pytest.mark.parametrize("name", every_plot())
def test_every_plot_is_a_white_card_with_a_title_at_the_left_and_deterministic(name):
    axes, again = every_plot()[name], every_plot()[name]
    title = axes.get_title(loc="left") or axes.figure.get_suptitle()
    assert title
    assert to_rgb(axes.figure.get_facecolor()) == (1, 1, 1)
    png = Picture(axes, ALT).png()
    assert png == Picture(again, ALT).png() == Picture(axes, ALT).png()
    with Image.open(io.BytesIO(png)) as image:
        assert "transparency" not in image.info
        assert not {"Software", "date", "Creation Time"} & set(image.info)
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
        assert len(image.convert("L").getcolors()) > 2


def test_peaks_by_size_mark_what_fits_what_does_not_the_whole_and_the_choice():
    peaks = {64: 20 * MIB, 1: 4 * MIB, 10: 13 * MIB, 11: 14 * MIB}
    axes = plots.plot_peak_by_size(peaks, title="Ten fit", budget_bytes=13 * MIB, whole=64, chosen=10)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["fits"].get_xydata().tolist() == [[1, 4], [10, 13]]
    assert lines["does not fit"].get_xydata().tolist() == [[11, 14]]
    assert lines["all 64 in one pass, does not fit"].get_xydata().tolist() == [[64, 20]]
    assert lines["chosen: 10"].get_xydata().tolist() == [[10, 13]]
    assert axes.get_lines()[0].get_xydata().tolist() == [[1, 4], [10, 13], [11, 14]]  # in order, without the whole
    assert "budget 13 MiB" in legend(axes)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("micro-batch size [samples]", "peak [MiB]")
    assert len({lines[label].get_marker() for label in ("fits", "does not fit")}) == 2  # not by colour alone


def test_peaks_by_size_without_a_budget_all_fit():
    axes = plots.plot_peak_by_size({1: MIB, 2: 2 * MIB}, title="Grows", whole=2)
    assert [text for text in legend(axes) if "fit" in text] == ["fits"]
    assert "all 2 in one pass" in legend(axes)


@pytest.mark.parametrize("name", sorted(set(every_plot()) - {"gradient"}))
def test_text_stays_readable(name):
    axes = every_plot()[name]
    labels = [axes.xaxis.label, axes.yaxis.label, *axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels()]
    assert min(label.get_fontsize() for label in labels if label.get_text()) >= 10


def test_picture_bundle_has_png_words_and_size():
    figure, axes = new_axes(width=5.0, height=2.0)
    axes.plot([1, 4])
    data, metadata = Picture(figure, "  A line that rises\n from one to four. ")._repr_mimebundle_()
    assert data["text/plain"] == ALT == repr(Picture(axes, ALT))
    assert metadata == {"image/png": {"alt": ALT, "width": 500, "height": 200}}
    with Image.open(io.BytesIO(base64.b64decode(data["image/png"]))) as image:
        assert image.size == (1000, 400)
    with Image.open(io.BytesIO(live_png(figure))) as image:
        assert image.size == (1000, 400)


@pytest.mark.parametrize("alt", ["", "plot", "  a plot            ", None])
def test_picture_without_words_is_refused(alt):
    with pytest.raises(ValueError, match="alt must say in a sentence"):
        Picture(new_axes()[0], alt)


def test_picture_of_something_else_is_refused():
    with pytest.raises(TypeError, match="figure must be a matplotlib Figure or Axes, got list"):
        Picture([], ALT)


def test_title_is_required_and_wrapped():
    with pytest.raises(ValueError, match="title must state what the picture shows"):
        plots.plot_group_sizes({"a": [1]}, title=" ")
    long = "The same 64 digits: 4 x 16 keeps a budget that 64 at once breaks, and it does so every time"
    wide = plots.plot_group_sizes({"a": [1]}, title=long).get_title(loc="left")
    _, (left, _) = new_axes(1, 2)
    narrow = plots.plot_group_sizes({"a": [1]}, left, title=long).get_title(loc="left")
    assert wide.replace("\n", " ") == narrow.replace("\n", " ") == long
    assert narrow.count("\n") > wide.count("\n") >= 1


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_titles_and_ticks_keep_inside_and_apart(columns):
    figure, axes = new_axes(1, columns, width=4.0 + 2 * columns)
    for one in axes if columns > 1 else [axes]:
        plots.plot_loss_curves({"full": [1.0] * 200}, one, title="The curves are one, whatever the optimizer may be")
    figure.draw_without_rendering()
    for one in figure.axes:
        boxes = [tick.get_window_extent() for tick in one.get_xticklabels() if tick.get_text()]
        inside = [box for box in boxes if box.x0 >= one.bbox.x0 - 9 and box.x1 <= one.bbox.x1 + 9]
        assert len(inside) >= 2
        assert not any(a.overlaps(b) for number, a in enumerate(inside) for b in inside[:number])


def test_title_keeps_inside_beside_long_labels():
    title = "Of 10 micro-batches with K = 4, only the groups use all and never more than 4"
    axes = plots.plot_group_sizes({"group_sizes(10, 4) of all": [4, 4, 2]}, title=title)
    bars = plots.plot_peak_bars({"group_sizes(10, 4) of all": {"parameters": 5}}, title=title)
    for one in (axes, bars):
        one.figure.draw_without_rendering()
        assert one._left_title.get_window_extent().x1 <= one.figure.bbox.x1


def test_new_axes_returns_one_or_a_flat_list():
    figure, axes = new_axes(2, 3, width=9.0, height=5.0)
    assert figure.axes == axes
    assert len(axes) == 6
    assert tuple(figure.get_size_inches()) == (9.0, 5.0)
    assert new_axes()[1].figure is not figure


def test_memory_timeline_stacks_what_is_there_in_mib():
    axes = plots.plot_memory_timeline(timeline(), title="Peak", budget_bytes=4 * MIB)
    assert axes.get_ylabel() == "bytes alive [MiB]"
    assert legend(axes) == ["budget 4 MiB", "activations", "gradients", "parameters"]
    areas = {area.get_label(): area for area in axes.collections}
    assert areas["parameters"].get_paths()[0].get_extents().y1 == 1
    assert areas["activations"].get_paths()[0].get_extents().y1 == 5
    outline = axes.get_lines()[-4].get_ydata()
    assert list(outline) == [1, 3, 5, 2, 2]


def test_memory_timeline_labels_marks_where_they_are_and_apart():
    axes = plots.plot_memory_timeline(timeline(), title="Peak")
    assert texts(axes) == ["forward", "backward"]
    assert [text.xy[0] for text in axes.texts] == [0, 2]
    crowded = timeline()
    crowded.marks = [(event, f"forward pass of micro-batch {event}") for event in range(4)]
    axes = plots.plot_memory_timeline(crowded, title="Peak")
    axes.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for number, a in enumerate(boxes) for b in boxes[:number])


@pytest.mark.parametrize(
    ("peak", "unit"), [(1000, "B"), (2 * 1024, "KiB"), (3 * MIB, "MiB"), (2 * MIB - 1, "KiB"), (5 * 1024**3, "GiB")]
)
def test_unit_follows_the_size(peak, unit):
    axes = plots.plot_peak_bars({"a": {"parameters": peak}}, title="Peak")
    assert axes.get_xlabel() == f"bytes alive at the peak [{unit}]"


def test_peak_bars_are_as_long_as_their_categories_together():
    bars = {"64 at once": {"parameters": MIB, "activations": 6 * MIB}, "4 x 16": {"parameters": MIB, "gradients": MIB}}
    axes = plots.plot_peak_bars(bars, title="Peak", budget_bytes=4 * MIB)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["64 at once", "4 x 16"]
    assert texts(axes) == ["7.0", "2.0"]
    ends = {}
    for bar in axes.patches:
        ends[round(bar.get_y())] = max(ends.get(round(bar.get_y()), 0), bar.get_x() + bar.get_width())
    assert list(ends.values()) == [7, 2]
    assert legend(axes)[-1] == "budget 4 MiB"
    assert axes.get_lines()[0].get_xdata()[0] == 4


def test_categories_differ_without_colour():
    styles = plots.MEMORY_STYLE
    assert set(styles) == {
        "parameters", "buffers", "gradients", "optimizer_state", "activations", "inputs", "temporaries"
    }  # fmt: skip
    assert len({colour for colour, _ in styles.values()}) == len(styles)
    plain = [colour for colour, hatch in styles.values() if not hatch]
    hatches = [hatch for _, hatch in styles.values() if hatch]
    assert len(set(hatches)) == len(hatches)
    grey = [np.dot(to_rgb(colour), [0.299, 0.587, 0.114]) for colour in plain]
    assert len(grey) == 2
    assert abs(grey[0] - grey[1]) > 0.2


def test_equal_loss_curves_both_stay_visible():
    axes = plots.plot_loss_curves({"full": [2.0, 1.0], "4 x 16": [2.0, 1.0]}, title="One", y_label="loss [nats]")
    below, above = axes.get_lines()
    assert list(below.get_xdata()) == [1, 2]
    assert below.get_linewidth() > 2 * above.get_linewidth()
    assert below.get_color() != above.get_color()
    assert legend(axes) == ["full", "4 x 16"]
    assert axes.get_ylabel() == "loss [nats]"


def test_lines_differ_without_colour():
    axes = plots.plot_lines([1, 2], {str(n): [n, n] for n in range(7)}, title="7", x_label="x", y_label="y")
    assert len({line.get_marker() for line in axes.get_lines()}) == 7
    assert len({str(line._unscaled_dash_pattern) for line in axes.get_lines()}) == 7


def test_difference_is_absolute_logarithmic_and_gapped_at_zero():
    axes = plots.plot_difference({"SGD": [0.0, -1e-16, 1e-12]}, title="Rounding", tolerance=1e-6)
    assert axes.get_yscale() == "log"
    np.testing.assert_array_equal(axes.get_lines()[0].get_ydata(), [np.nan, 1e-16, 1e-12])
    assert texts(axes) == ["tolerance 1e-6"]
    assert axes.get_ylim()[1] > 1e-6
    assert axes.get_lines()[0].get_marker() != "None"


def test_logarithmic_x_axis_shows_the_values():
    axes = plots.plot_lines([1, 4, 16], {"a": [1, 2, 3]}, title="Grows", x_label="batch", y_label="y", log_x=True)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4", "16"]


def test_group_sizes_hatch_the_short_group():
    axes = plots.plot_group_sizes({"flushed": [2, 2, 1], "dropped": [2, 2]}, title="The tail")
    frames = [bar for bar in axes.patches if bar.get_facecolor()[3] == 0]
    assert [bar.get_width() for bar in frames] == [2, 2, 1, 2, 2]
    assert [bool(bar.get_hatch()) for bar in frames] == [False, False, True, False, False]
    assert texts(axes) == ["2", "2", "1", "2", "2"]


def test_micro_batches_draw_one_square_a_sample_within_limits_that_stay():
    small = plots.plot_micro_batches(3, 2, title="2 passes")
    large = plots.plot_micro_batches(64, 16, title="16 passes")
    assert [len(block.get_paths()) for block in small.collections] == [3, 3]
    assert sum(len(block.get_paths()) for block in large.collections) == 1024
    for axes in (small, large):
        corners = np.concatenate([path.vertices for block in axes.collections for path in block.get_paths()])
        assert corners.min() >= 0
        assert (corners.max(axis=0) <= (axes.get_xlim()[1], axes.get_ylim()[1])).all()
    assert small.get_xlim() == large.get_xlim()
    assert small.get_ylim() == large.get_ylim()


def test_gradient_scale_is_symmetric_and_shared():
    first, second = plots.plot_gradient({"a": torch.ones(2, 3), "b": torch.full((2, 3), -4.0)}, title="Gradient")
    assert first.images[0].get_clim() == second.images[0].get_clim() == (-4, 4)
    assert len(first.collections) == 0
    assert len(second.collections[0].get_offsets()) == 6  # minus signs


@pytest.mark.parametrize(("shape", "drawn"), [((), (1, 1)), ((5,), (1, 5)), ((2, 3), (2, 3)), ((4, 3, 2, 2), (4, 12))])
def test_gradient_of_any_shape_becomes_an_image(shape, drawn):
    axes = plots.plot_gradient(torch.ones(shape, requires_grad=True), title="Gradient")
    assert axes.images[0].get_array().shape == drawn


def test_given_axes_are_drawn_into_and_data_is_left_alone():
    _, (left, right) = new_axes(1, 2)
    values = np.array([0.0, -1.0])
    assert plots.plot_difference({"a": values}, left, title="Left") is left
    assert plots.plot_gradient(values, right, title="Right") is right
    assert list(values) == [0.0, -1.0]


def test_plots_need_neither_pyplot_nor_torch():
    code = "import sys, course_lib.plots; print({'matplotlib.pyplot', 'torch', 'ipywidgets'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_update_parts_show_each_gradient_what_was_made_of_it_and_the_threshold():
    axes = plots.plot_update_parts([4.0, -2.0], {"step": 0.5, "right": 1.0}, title="Half a step", threshold=1.5)
    bars = axes.patches
    assert [bar.get_height() for bar in bars] == [4.0, -2.0, 0.5, 1.0]
    assert [bool(bar.get_hatch()) for bar in bars] == [False, False, True, True]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "step", "right"]
    assert [text.get_text() for text in axes.texts] == ["4", "-2", "0.5", "1"]
    assert [line.get_ydata()[0] for line in axes.get_lines()] == [0, 1.5, -1.5]
    assert axes.get_legend().get_texts()[0].get_text() == "largest norm"


def test_update_parts_show_an_infinite_gradient_up_to_the_edge():
    axes = plots.plot_update_parts([4.0, math.inf, -math.inf], {"step": 0.0}, title="No step")
    top = axes.get_ylim()[1]
    assert [bar.get_height() for bar in axes.patches] == [4.0, top, -top, 0.0]
    assert [text.get_text() for text in axes.texts] == ["4", "infinite", "-infinite", "0"]
    assert axes.get_legend() is None
    assert plots.plot_update_parts([1.0, 2.0], {"mean": 1.5}, title="Above zero").get_ylim()[0] == 0


def test_peak_and_time_are_points_with_letters_in_times_of_the_first():
    points = {"plain": (8 * MIB, 0.5), "4 x 16": (4 * MIB, 0.25), "+ autocast": (3 * MIB, 1.0)}
    stack = ["4 x 16", "+ autocast"]
    axes = plots.plot_peak_and_time(points, title="Bytes for time", budget_bytes=5 * MIB, stack=stack)
    joined, *drawn, budget = axes.get_lines()
    assert [line.get_xydata().tolist() for line in drawn] == [[[8.0, 1.0]], [[4.0, 0.5]], [[3.0, 2.0]]]
    assert joined.get_xydata().tolist() == [[4.0, 0.5], [3.0, 2.0]]
    assert budget.get_xdata() == [5.0, 5.0]
    assert texts(axes) == ["A", "B", "C"]
    assert legend(axes) == ["A  plain", "B  4 x 16", "C  + autocast", "budget 5 MiB"]
    assert [line.get_marker() for line in drawn] == ["o", "D", "D"]
    assert axes.get_xlabel() == "bytes alive at the peak [MiB]"
    assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0
    assert axes.get_xlim()[1] > 8


TWO_MICRO_BATCHES = SimpleNamespace(
    live_bytes=[4096, 8192, 6144, 6144],
    by_category={
        "parameters": [4096, 4096, 4096, 4096],
        "activations": [0, 4096, 0, 0],
        "gradients": [0, 0, 2048, 2048],
        "buffers": [0, 0, 0, 0],
    },
)


def test_bytes_so_far_end_where_asked_in_axes_of_the_whole():
    seen = {}
    for until in (1, 3):
        axes = new_axes()[1]
        plots.plot_bytes_frame(TWO_MICRO_BATCHES, axes, title="bytes alive", starts={"first": 0, "second": 2})
        drawn = plots.plot_bytes_so_far(TWO_MICRO_BATCHES, until, axes)
        line = next(one for one in drawn if getattr(one, "get_drawstyle", lambda: "")() == "steps-post")
        assert list(line.get_xdata()) == list(range(until + 1))
        assert list(line.get_ydata()) == [size / 1024 for size in TWO_MICRO_BATCHES.live_bytes[: until + 1]]
        assert drawn[-1].get_text() == f"{TWO_MICRO_BATCHES.live_bytes[until] / 1024:.0f}"
        seen[until] = (axes.get_xlim(), axes.get_ylim())
    assert seen[1] == seen[3]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["activations", "gradients", "parameters"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["first", "second"]


def test_what_moves_can_be_taken_away_and_leaves_its_frame():
    figure, axes = new_axes(1, 2)
    plots.plot_gradient_frame(torch.ones(8, 8), axes, title="a gradient", limit=2.0)
    before = [len(one.get_children()) for one in axes]
    for gradient in (None, torch.full((8, 8), -1.0)):
        drawn = plots.plot_gradient_now(gradient, axes[0], limit=2.0, label="now")
        assert len(axes[0].get_children()) == before[0] + len(drawn)
        for artist in drawn:
            artist.remove()
    assert [len(one.get_children()) for one in axes] == before
    assert figure.axes == axes


def test_gradient_now_is_on_the_fixed_scale_and_none_is_said():
    axes = new_axes()[1]
    image, marks, label = plots.plot_gradient_now(-torch.eye(8), axes, limit=4.0, label="after line 4")
    assert image.get_clim() == (-4.0, 4.0)
    assert image.get_array().min() == -1
    assert len(marks.get_offsets()) == 8
    assert label.get_text() == "after line 4"
    none = plots.plot_gradient_now(None, new_axes()[1], limit=4.0, label="before")
    assert "None" in [one.get_text() for one in none if hasattr(one, "get_text")]


def test_steps_so_far_jump_where_the_value_does():
    events, values = [0, 2, 2, 5], [0.0, 0.0, 1.5, 1.5]
    limits = set()
    for until in (1, 2, 3):
        axes = new_axes()[1]
        plots.plot_steps_frame(events, values, axes, title="moved", y_label="distance")
        line, end = plots.plot_steps_so_far(events, values, until, axes)
        assert list(line.get_ydata()) == values[: until + 1]
        assert (end.get_xdata()[0], end.get_ydata()[0]) == (events[until], values[until])
        limits.add((axes.get_xlim(), axes.get_ylim()))
    assert len(limits) == 1
    assert axes.get_ylim()[1] > 1.5

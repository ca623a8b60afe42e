"""The picture of the README: `python -m tests.draw_readme_picture` measures both updates and draws it anew."""

from pathlib import Path

import torch
from matplotlib.figure import Figure

from course_lib.batches import split_batch
from course_lib.datasets import load_digits
from course_lib.losses import cross_entropy_sum
from course_lib.memory import Timeline, format_bytes, measure_memory
from course_lib.models import conv_net
from course_lib.plots import Picture, new_axes, plot_memory_timeline

PICTURE = Path(__file__).parent.parent / "notebooks" / "images" / "one_update.png"
BUDGET_BYTES = 4 * 2**20


def measure_update(micro_batch_size: int) -> Timeline:
    """Measure one update of 64 digits in micro-batches of that size; the second one, when optimizer state is there."""
    batch = tuple(part.clone() for part in load_digits().first(64))
    model = conv_net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with measure_memory(model, optimizer, batch) as meter:
            for number, micro_batch in enumerate(split_batch(batch, micro_batch_size), start=1):
                meter.mark(f"{number}")
                (cross_entropy_sum(model, micro_batch) / 64).backward()
            meter.mark("step")
            optimizer.step()
            optimizer.zero_grad()
    return meter.timeline


def draw() -> Figure:
    """Draw the same update twice: as one batch of 64, and as 4 micro-batches of 16."""
    whole, pieces = measure_update(64), measure_update(16)
    figure, (left, right) = new_axes(1, 2, width=11, height=3.9)
    for axes, timeline, name in ((left, whole, "64 at once"), (right, pieces, "4 x 16")):
        peak = max(timeline.live_bytes)
        verdict = "does not fit" if peak > BUDGET_BYTES else "fits"
        plot_memory_timeline(
            timeline, axes, budget_bytes=BUDGET_BYTES, title=f"{name}: {format_bytes(peak)}, {verdict}"
        )
        axes.set_ylim(0, 1.15 * max(whole.live_bytes) / 2**20)
    if left.get_legend() is not None:
        left.get_legend().remove()
    return figure


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_bytes(Picture(draw(), alt="One update of 64 digits, whole and in four parts.").png())

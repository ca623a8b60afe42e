"""The README's picture shows what a run of today's code shows."""

import io

import numpy as np
from PIL import Image

from course_lib.plots import Picture
from tests.draw_readme_picture import BUDGET_BYTES, PICTURE, draw, measure_update


def test_the_whole_batch_breaks_the_budget_that_the_micro_batches_keep():
    whole, pieces = (max(measure_update(size).live_bytes) for size in (64, 16))
    assert pieces < BUDGET_BYTES < whole


def test_the_stored_picture_is_the_one_the_code_draws():
    drawn = Image.open(io.BytesIO(Picture(draw(), alt="One update of 64 digits, drawn anew.").png()))
    stored = Image.open(PICTURE)
    assert stored.size == drawn.size, "run python -m tests.draw_readme_picture"
    difference = np.abs(np.asarray(stored.convert("L"), dtype=float) - np.asarray(drawn.convert("L"), dtype=float))
    # Of 255. The same code gives 0; the smallest change that was tried, the budget line at 5 MiB, gives 1.5, and a cut
    # in two halves gives 5.3. What is below may be fonts that are smoothed otherwise elsewhere.
    assert difference.mean() < 0.5

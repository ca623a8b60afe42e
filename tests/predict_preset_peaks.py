"""Predict the peaks of every preset once, for the planner's panel: `python -m tests.predict_preset_peaks [name ...]`.

A prediction takes seconds, a slider must answer at once. A peak is piecewise linear and convex in the number of
samples, so a few sizes describe all of them: the ends of each straight piece, as far as the largest device goes.
Written to course_lib/explorers/predicted_peaks.json, for micro-batches of an accumulated update ("accumulated") and for
one pass ("whole").
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from course_lib.architectures import DEVICES, PRESETS, build_preset
from course_lib.explorers.planner import LARGEST_BATCH, TABLE_PATH
from course_lib.interactions import cross_sample_layers
from course_lib.memory import MemoryPredictor, MemoryReport, parse_bytes

SMALLEST_WHOLE = 8  # the panel's smallest effective batch
CLOSE = 1e-5  # of the peak: what counts as on the line


def pieces(predict: Callable[[int], MemoryReport], smallest: int, largest: int) -> dict[int, MemoryReport]:
    """Return the reports at the ends of each straight piece between two sizes, or up to what no device holds."""
    most = parse_bytes(DEVICES[-1])
    asked: dict[int, MemoryReport] = {}

    def peak(size: int) -> int:
        if size not in asked:
            asked[size] = predict(size)
        return asked[size].peak_bytes

    if peak(smallest) > most:
        return asked
    each = max(peak(smallest + 1) - peak(smallest), 1)
    largest = min(largest, smallest + 2 + (most - peak(smallest)) // each)
    ends = {smallest, largest}

    def refine(low: int, high: int) -> None:
        # A convex line that meets its chord at one place between is that chord.
        middle = low + 1 if low == smallest else (low + high) // 2
        if high - low < 2:
            return
        expected = peak(low) + (middle - low) / (high - low) * (peak(high) - peak(low))
        if abs(peak(middle) - expected) > CLOSE * peak(middle):
            half = (low + high) // 2
            ends.add(half)
            refine(low, half)
            refine(half, high)

    refine(smallest, largest)
    return {size: asked[size] for size in sorted(ends) if peak(size)}


def points(reports: dict[int, MemoryReport]) -> dict[str, dict]:
    """Keep what the panel needs: the bytes by category without the inputs, and the moment."""
    return {
        str(size): {
            "at_peak": {name: n for name, n in report.at_peak.items() if n and name != "inputs"},
            "moment": report.peak_moment,
        }
        for size, report in reports.items()
    }


def table_of(name: str) -> dict:
    """Predict one preset."""
    many = build_preset(name, num_samples=2 * LARGEST_BATCH)
    smallest = 2 if cross_sample_layers(many.model) else 1

    def whole(size: int) -> MemoryReport:
        return MemoryPredictor(*build_preset(name, num_samples=size).parts).predict(size)

    return {
        "inputs_each": sum(part[0].numel() * part.element_size() for part in many.batch),
        "accumulated": points(pieces(MemoryPredictor(*many.parts).predict, smallest, LARGEST_BATCH // 2)),
        "whole": points(pieces(whole, SMALLEST_WHOLE, LARGEST_BATCH)),
    }


def main(names: list[str]) -> None:
    """Predict the presets named, or all, and write the table."""
    table = json.loads(TABLE_PATH.read_text(encoding="utf-8")) if TABLE_PATH.exists() else {}
    for name in names or PRESETS:
        table[name] = table_of(name)
        print(name, len(table[name]["accumulated"]), len(table[name]["whole"]), flush=True)
        ordered = {one: table[one] for one in PRESETS if one in table}
        TABLE_PATH.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Bytes: measured exactly (`measured`), limited, so that a laptop runs out as a small GPU does, and `predicted`."""

from course_lib.memory.measured import (
    CATEGORIES,
    MemoryBudget,
    MemoryMeter,
    Timeline,
    format_bytes,
    measure_memory,
    memory_budget,
    parse_bytes,
)
from course_lib.memory.predicted import MemoryPredictor, MemoryReport, predict_memory

__all__ = [
    "CATEGORIES",
    "MemoryBudget",
    "MemoryMeter",
    "MemoryPredictor",
    "MemoryReport",
    "Timeline",
    "format_bytes",
    "measure_memory",
    "memory_budget",
    "parse_bytes",
    "predict_memory",
]

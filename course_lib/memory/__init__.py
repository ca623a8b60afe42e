"""Bytes: measured exactly on any machine (`measured`) and limited, so that a laptop runs out as a small GPU does."""

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

__all__ = [
    "CATEGORIES",
    "MemoryBudget",
    "MemoryMeter",
    "Timeline",
    "format_bytes",
    "measure_memory",
    "memory_budget",
    "parse_bytes",
]

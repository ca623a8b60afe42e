"""Exercises with checks that say what is wrong: `check`, `hint`, `solution`, `progress` (see `engine`)."""

from course_lib.exercises.engine import Exercise, check, exercises, hint, progress, solution

__all__ = ["Exercise", "check", "exercises", "hint", "progress", "solution"]

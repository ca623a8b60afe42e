"""Tell what is wrong with an accumulation loop, by name: `audit` for one update, `audit_loop` for a loop over an epoch.

From a terminal: `python -m course_lib.audit path/to/file.py:function`.
"""

from typing import TYPE_CHECKING, Any

from course_lib.audit.report import CODES, MEANINGS, AuditReport, Finding

if TYPE_CHECKING:
    from course_lib.audit.auditing import audit
    from course_lib.audit.loops import audit_loop

__all__ = ["CODES", "MEANINGS", "AuditReport", "Finding", "audit", "audit_loop"]


def __getattr__(name: str) -> Any:
    """Load the audits when they are asked for: the command line's own process needs no torch."""
    if name == "audit":
        from course_lib.audit.auditing import audit

        return audit
    if name == "audit_loop":
        from course_lib.audit.loops import audit_loop

        return audit_loop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Tell what is wrong with an accumulation loop, by name: `audit` for one update, `audit_loop` for a loop over an epoch.

From a terminal: `python -m course_lib.audit path/to/file.py:function`.
"""

from course_lib.audit.auditing import audit
from course_lib.audit.loops import audit_loop
from course_lib.audit.report import CODES, MEANINGS, AuditReport, Finding

__all__ = ["CODES", "MEANINGS", "AuditReport", "Finding", "audit", "audit_loop"]

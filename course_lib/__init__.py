"""Training with a large batch when memory is small: the package that the course teaches, uses and trusts."""

import os

# The profiler's own log goes to stderr, into notebook cells too. This silences it, if set before torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

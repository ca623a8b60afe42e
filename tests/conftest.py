"""What holds for every test: one torch thread, a quiet profiler, and in CI the same hypothesis examples each time."""

import os

# Before torch is imported; the notebooks' kernels inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["KINETO_LOG_LEVEL"] = "99"

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("course", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("course")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Say beside a failure what the browser showed, while the page is still open."""
    report = yield
    if report.failed and report.when != "setup":
        for page in getattr(item, "watched_pages", []):
            report.sections.append(("what the browser showed", page.seen(item.funcargs["tmp_path"])))
    return report

"""`audit`: run an update on small problems, and report what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from course_lib.accumulation import check_loss, check_model
from course_lib.audit.judging import judge
from course_lib.audit.limits import Deadline
from course_lib.audit.problems import own_problem, task_problem
from course_lib.audit.report import UPDATE_CONTRACT, AuditReport, in_order
from course_lib.audit.sessions import run_sessions
from course_lib.batches import Batch, count_samples
from course_lib.losses import Count, LossSum


def audit(
    update: Callable[..., Any],
    *,
    task: str = "samples",
    model: nn.Module | None = None,
    micro_batches: Sequence[Batch] | None = None,
    loss_sum: LossSum | None = None,
    count: Count | None = None,
    seconds: float = 60.0,
) -> AuditReport:
    """Run an update on small problems, and tell what is wrong with it, by name.

    The contract, also in every report. update(model, optimizer, micro_batches) makes one update of the parameters from
    a list of micro-batches (inputs, targets) and returns the mean loss over the group (a number, a tensor, something
    with `.loss`; None is no finding).
    task="samples": inputs float64, model output (B, C), targets (B); the mean cross-entropy over all samples is meant.
    task="tokens": model output (B, T, V), targets (B, T) with -100 where ignored; the mean over all other tokens.
    Or your own model, micro_batches, loss_sum and count (default: samples), as in `accumulate_gradients`; all are
    copied. Random layers must draw the same numbers when the micro-batches are run in order.
    Gradients are None at the first call; what a call leaves there is there at the next. Clipping the whole gradient to
    a fixed length is allowed, once, after dividing.

    Groups of 1, 2, 3 and 5 micro-batches, even and uneven, follow each other, under SGD, SGD with momentum, Adam and
    AdamW with two parameter groups, with gradients of several scales. Compared are the gradient, the parameters, the
    optimizer's state, the returned loss, the order of forward, backward, clearing and step, the activations alive, and
    what should not change: settings, training mode, data, random state.
    seconds: after so long the audit stops, with a finding. What `update` prints is swallowed; what it raises is a
    finding. Code that ends the process or blocks it needs the command line, which runs it in a process of its own.
    Raises TypeError or ValueError for arguments that cannot be right.
    """
    if not callable(update):
        raise TypeError(f"update must be a function (model, optimizer, micro_batches); got {type(update).__name__}")
    deadline = Deadline(seconds)
    own = {"model": model, "micro_batches": micro_batches, "loss_sum": loss_sum}
    if any(value is not None for value in (*own.values(), count)):
        missing = [name for name, value in own.items() if value is None]
        if missing:
            raise ValueError(f"a problem of your own needs model, micro_batches and loss_sum; missing: {missing}")
        check_model(model)
        check_loss(loss_sum, count_samples if count is None else count)
        if not isinstance(micro_batches, Sequence) or isinstance(micro_batches, str) or not len(micro_batches):
            raise TypeError(f"micro_batches must be a list, not empty; got {type(micro_batches).__name__}")
        problem = own_problem(model, micro_batches, loss_sum, count_samples if count is None else count)
    else:
        problem = task_problem(task)
    calls = run_sessions(update, problem, deadline)
    findings = in_order(judge(calls))
    return AuditReport(findings, UPDATE_CONTRACT.format(meant=problem.meant), len(calls))

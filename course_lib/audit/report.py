"""What an audit found: findings with a stable code, a sentence and its numbers, and what each code means."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# Each code with its meaning and its remedy, the one that says most about a loop first: findings are listed in this
# order. Those from `wrong-scale` on name no known mistake; they say what was seen where no other code fits.
MEANINGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ran-too-long": ("The code was stopped at the time limit.", "Look for a loop that does not end."),
        "exited": ("The code ended the program.", "Return instead of calling exit."),
        "raised": ("The code raised an error.", "Run it by hand on one group to see where."),
        "printed-too-much": ("The code printed more than anyone reads.", "Print once per update, or not at all."),
        "no-gradient": (
            "Parameters reach the step without a gradient.",
            "Call backward on a loss that depends on the parameters: no .item(), .detach() or no_grad before it.",
        ),
        "stepped-before-backward": (
            "The step comes before the gradient it should use.",
            "Call step after the last backward of the group.",
        ),
        "stepped-inside": (
            "The optimizer steps more than once per update, each time with a part of the gradient.",
            "Move step out of the loop over micro-batches. Decay and momentum advance with every call.",
        ),
        "wrong-boundary": (
            "The steps fall between other micro-batches than the groups of K.",
            "Loop over groups (group_micro_batches), or test (i + 1) % K == 0, not i % K == 0.",
        ),
        "tail-leaked": (
            "The gradient of a tail that had no step is added to the next epoch's first update.",
            "Step on the short group too, or clear the gradients at the end of the epoch.",
        ),
        "tail-dropped": (
            "The last micro-batches of an epoch, fewer than K, teach nothing.",
            "Step on the short group too, divided by its own count; or say drop_tail=True if that is meant.",
        ),
        "never-stepped": ("The optimizer never steps.", "Call optimizer.step() once, after the last backward."),
        "repeated-micro-batch": (
            "A micro-batch is used more than once while another is not.",
            "Take each micro-batch of the group once.",
        ),
        "last-only": (
            "Only the last micro-batch is used: backward runs once, after the loop.",
            "Indent backward into the loop over micro-batches.",
        ),
        "zeroed-inside": (
            "The gradient is cleared inside the group, so that earlier micro-batches are forgotten.",
            "Clear once per update, before the first backward or after the step.",
        ),
        "samples-dropped": ("Samples of the group have no part in the gradient.", "Use every micro-batch, whole."),
        "never-zeroed": (
            "The gradient of the update before is still there and is added to.",
            "Call optimizer.zero_grad() once per update.",
        ),
        "clipped-inside": (
            "The gradient is clipped micro-batch by micro-batch.",
            "Clip once, when the group is complete and divided.",
        ),
        "clipped-before-dividing": (
            "The gradient is clipped as a sum and divided afterwards, which lowers the threshold.",
            "Divide first, then clip.",
        ),
        "decayed-inside": (
            "The weights decay once per micro-batch instead of once per update.",
            "Leave the decay to the optimizer's step, or decay once, after the loop.",
        ),
        "not-divided": (
            "The sum over the group is not divided, so the gradient grows with the number of micro-batches.",
            "Divide each summed loss by the count of the whole group (or, with equal micro-batches, each mean by K).",
        ),
        "divided-twice": (
            "The gradient is divided once too often.",
            "Divide in one place: the loss, the loop or the trainer, not in two of them.",
        ),
        "tail-misweighted": (
            "The division does not look at what the group holds, so a short group counts too little.",
            "Divide by the count of this very group, not by a fixed number of steps or a nominal size.",
        ),
        "mean-of-means": (
            "Means of unequal micro-batches are averaged as if they were equal.",
            "Carry sum and count of each micro-batch, and divide once: sum of sums over sum of counts.",
        ),
        "low-precision-sum": (
            "The gradient is added up in fewer digits than the parameters have.",
            "Accumulate in the parameters' own precision, float32 at least.",
        ),
        "schedule-per-micro-batch": (
            "The learning-rate schedule advances with micro-batches, not with updates.",
            "Call scheduler.step() once after each optimizer.step().",
        ),
        "whole-batch-in-memory": (
            "The whole group passes through the model at once, so it needs the memory of the full batch.",
            "Run one micro-batch at a time.",
        ),
        "one-backward": (
            "The losses are added up and backward is called once, so all micro-batches are in memory together.",
            "Call backward after each forward pass: it frees the activations.",
        ),
        "graph-kept": (
            "Activations of an earlier pass are still alive when the next pass begins.",
            "Drop retain_graph=True, keep loss.item() instead of the loss, and evaluate under no_grad.",
        ),
        "wrong-scale": ("The gradient has the right direction and the wrong length.", "Look for a stray factor."),
        "wrong-gradient": (
            "The gradient is not that of the mean loss over the group.",
            "Compare it with the full batch, parameter by parameter (compare_gradients).",
        ),
        "wrong-parameters": (
            "The parameters end where one step of the optimizer does not lead.",
            "Let optimizer.step() make the only change.",
        ),
        "settings-changed": (
            "Something changed that an update should leave alone.",
            "Leave learning rate, training mode, data and random state as they were.",
        ),
        "wrong-loss-reported": (
            "What is returned is not the mean loss over the group.",
            "Return the sum of all item losses divided by their count, read before the step.",
        ),
    }
)
CODES = tuple(MEANINGS)


# What an audit judges by, and what is meant by each task; both stand in every report.
UPDATE_CONTRACT = (
    "update(model, optimizer, micro_batches) makes one update from a list of (inputs, targets); {meant}; gradients are "
    "None before the first call; the mean loss is returned, or None"
)
LOOP_CONTRACT = (
    "train(model, optimizer, loader, accumulation_steps) makes one epoch of updates from a loader of (inputs, "
    "targets), each from accumulation_steps micro-batches, the last from what is left; {meant}; gradients are None "
    "before the first epoch, and a second epoch follows; what is returned is not looked at"
)
MEANT: Mapping[str, str] = MappingProxyType(
    {
        "samples": (
            "inputs is float64; the model returns scores (B, C) for targets (B); the loss meant is the mean "
            "cross-entropy over all samples of the group"
        ),
        "tokens": (
            "inputs and targets are (B, T); the model returns scores (B, T, V), targets are -100 where ignored; the "
            "loss meant is the mean cross-entropy over all other tokens of the group"
        ),
        "own": "the loss meant is the sum of loss_sum over the group, divided by the sum of count",
    }
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: a stable code, a sentence that says what was seen, and the numbers behind it."""

    code: str
    sentence: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code}: {self.sentence}"


@dataclass(frozen=True)
class AuditReport:
    """What an audit saw: `findings`, the main one first, and the `contract` that they are judged by.

    checked: how many updates (of a loop: epochs) were looked at.
    """

    findings: tuple[Finding, ...]
    contract: str
    checked: int
    what: str = "updates"

    @property
    def passed(self) -> bool:
        """True when there are no findings."""
        return not self.findings

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings, the main one first."""
        return tuple(finding.code for finding in self.findings)

    def explain(self) -> str:
        """Say for each finding what was seen, what it means and how to mend it, and what it was judged by."""
        if self.passed:
            return str(self)
        parts = []
        for finding in self.findings:
            meaning, remedy = MEANINGS[finding.code]
            parts.append(f"{finding.code}\n  Seen: {finding.sentence}\n  Meaning: {meaning}\n  Remedy: {remedy}")
        return "\n".join([*parts, f"Judged by: {self.contract}"])

    def __str__(self) -> str:
        if self.passed:
            return f"Passed: {self.checked} {self.what}, no findings.\nJudged by: {self.contract}"
        number = f"{len(self.findings)} finding{'s' * (len(self.findings) > 1)}"
        lines = [f"  {finding}" for finding in self.findings]
        return "\n".join([f"Not passed: {number}.", *lines, f"Judged by: {self.contract}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rest = (html.escape(line.strip()) for line in str(self).splitlines())
        items = "".join(f"<li>{line}</li>" for line in rest[:-1])
        return f"<p><strong>{head}</strong></p><ul>{items}</ul><p>{rest[-1]}</p>"


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """Sort findings by how much they say, one of each code: the first that was seen."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.code, finding)
    return tuple(sorted(first.values(), key=lambda finding: CODES.index(finding.code)))

"""The audit: right updates and loops pass, however they are written; wrong ones are named, alone and in pairs."""

import inspect
import random
import subprocess
import sys
import threading
import time
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LRScheduler

from course_lib.accumulation import accumulate_gradients, update_parameters
from course_lib.audit import CODES, MEANINGS, AuditReport, Finding, audit, audit_loop
from course_lib.audit.__main__ import main
from course_lib.losses import class_weighted_cross_entropy, cross_entropy_sum, token_cross_entropy_sum
from course_lib.models import SmallGPT, dense_net
from tests.loops import epochs, hostile, right_updates, tokens
from tests.loops.wrong_updates import WRONG, means_without_division, share_of, total_of
from tests.rewrite_notebooks import ROOT

LOOPS = ROOT / "tests" / "loops"
RIGHT = {
    name: value
    for name, value in vars(right_updates).items()
    if callable(value) and value is not right_updates.Updater and value.__module__ == right_updates.__name__
}
# The codes of design.md, which are never renamed, and those for what fits none of them.
STABLE = {
    *("not-divided", "divided-twice", "mean-of-means", "tail-misweighted", "zeroed-inside", "never-zeroed"),
    *("stepped-inside", "never-stepped", "stepped-before-backward", "clipped-inside", "clipped-before-dividing"),
    *("decayed-inside", "last-only", "samples-dropped", "repeated-micro-batch", "whole-batch-in-memory"),
    *("one-backward", "graph-kept", "low-precision-sum", "wrong-loss-reported", "settings-changed", "no-gradient"),
    *("tail-dropped", "tail-leaked", "wrong-boundary", "schedule-per-micro-batch"),
}
FURTHER = {
    *("ran-too-long", "exited", "raised", "printed-too-much"),
    *("wrong-scale", "wrong-gradient", "wrong-parameters"),
}


@cache
def report_of(name):
    return audit(WRONG[name][0])


def assert_named(report, codes):
    """The main finding comes first, and the others are there."""
    assert report.codes[:1] == codes[:1], report.explain()
    assert set(codes) <= set(report.codes), report.explain()


# ---- right -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_update_passes_however_it_is_written(name):
    report = audit(RIGHT[name])
    assert report.passed, report.explain()


@pytest.mark.parametrize("name", tokens.RIGHT)
def test_a_right_update_over_tokens_passes(name):
    report = audit(tokens.RIGHT[name], task="tokens")
    assert report.passed, report.explain()


@pytest.mark.parametrize("name", epochs.RIGHT)
def test_a_right_loop_passes(name):
    report = audit_loop(epochs.RIGHT[name])
    assert report.passed, report.explain()


def test_there_are_at_least_twelve_right_updates_and_thirty_wrong_ones():
    assert len(RIGHT) >= 12
    assert len(WRONG) >= 30
    assert sum(len(codes) > 1 for _, codes in WRONG.values()) >= 10  # in pairs


# ---- wrong -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_update_is_named(name):
    assert_named(report_of(name), WRONG[name][1])


@pytest.mark.parametrize("name", tokens.WRONG)
def test_a_wrong_update_over_tokens_is_named(name):
    function, codes = tokens.WRONG[name]
    assert_named(audit(function, task="tokens"), codes)


@pytest.mark.parametrize("name", epochs.WRONG)
def test_a_wrong_loop_is_named(name):
    function, codes = epochs.WRONG[name]
    assert_named(audit_loop(function), codes)


def test_every_code_is_the_main_one_of_a_wrong_update_or_loop():
    everything = [*WRONG.values(), *epochs.WRONG.values(), *tokens.WRONG.values()]
    main_codes = {codes[0] for _, codes in everything}
    assert main_codes | {"ran-too-long"} == set(CODES) == STABLE | FURTHER


def test_a_dropped_tail_passes_where_it_is_meant():
    assert audit_loop(epochs.WRONG["drops"][0], drop_tail=True).passed
    assert audit_loop(epochs.WRONG["leaks"][0], drop_tail=True).codes[0] == "tail-leaked"


def test_sentences_hold_the_numbers():
    for name, phrase in (
        ("means_without_division", "5.00 times that of the mean loss with 5 micro-batches"),
        ("mean_divided_by_k_again", "0.20 times that of the mean loss with 5 micro-batches"),
        ("means_over_k", "with counts 4, 1 they weigh 0.625, 2.5 times what they should"),
        ("divided_by_a_fixed_four", "divided by 4 in every group"),
        ("zeroed_before_each_backward", "of 5 micro-batches only number 5 is in the gradient"),
        ("always_the_first", "number 1 was used 5 times"),
        ("a_step_for_each_share", "called 5 times for one update of 5 micro-batches"),
        ("never_zeroed", "counts 1.00 times in this one"),
        ("clipped_then_divided", "clipped to 1 and then divided: with 5 micro-batches the gradient has length 0.2"),
        ("each_gradient_clipped_then_added", "where gradients are large the micro-batches weigh"),
        ("decayed_for_each", "multiplied 5 times by 0.999"),
        ("one_backward_for_all", "1 backward pass for 4 micro-batches: 4.0 times the activations"),
        ("graph_retained", "3.0 times what one pass saves"),
        ("all_at_once", "saw 10 samples; the largest micro-batch has 2"),
        ("smaller_learning_rate_for_the_step", "the learning rate (from 0.05 to 0.01) for the step"),
        ("returns_the_last_loss", "the last micro-batch's mean; the mean loss over 5 micro-batches is"),
        ("returns_the_sum", "the sum of the micro-batches' means"),
        ("a_stray_factor", "1.3 times"),
        ("raises", "it raised KeyError in line"),
    ):
        assert phrase in str(report_of(name)), name
    assert "fell into groups of 1, 2, 2; they are to be 2, 2, 1" in str(
        audit_loop(epochs.WRONG["steps_on_the_first"][0])
    )
    assert "advanced 5 times in 3 updates" in str(audit_loop(epochs.WRONG["schedule_every_time"][0]))


# ---- many more, from a small grammar ---------------------------------------------------------------------------------

# Part of a loop -> what it can be -> the code of a wrong choice, None for a right one.
GRAMMAR = {
    "share": {
        "sum / total": None,
        "mean * n / total": None,
        "mean / K": "mean-of-means",
        "mean": "not-divided",
        "sum": "not-divided",
        "sum / total / K": "divided-twice",
    },
    "clear": {"before": None, "after": None, "both": None, "inside": "zeroed-inside", "never": "never-zeroed"},
    "step": {"after": None, "inside": "stepped-inside", "never": "never-stepped"},
    "backward": {"each": None, "by autograd.grad": None, "once": "one-backward", "of the last": "last-only"},
    "clip": {"none": None, "once": None, "inside": "clipped-inside"},
    "returned": {"nothing": None, "mean": None, "last": "wrong-loss-reported"},
}
LOOPS_OF_THE_GRAMMAR = st.fixed_dictionaries({part: st.sampled_from(list(of)) for part, of in GRAMMAR.items()})


def build(parts):
    """Build the loop that the grammar's choices describe."""

    def share(model, micro_batch, micro_batches):
        inputs, targets = micro_batch
        total, steps = total_of(micro_batches), len(micro_batches)
        mean = cross_entropy(model(inputs), targets)
        return {
            "sum / total": mean * len(targets) / total,
            "mean * n / total": mean * (len(targets) / total),
            "mean / K": mean / steps,
            "mean": mean,
            "sum": mean * len(targets),
            "sum / total / K": mean * len(targets) / total / steps,
        }[parts["share"]]

    def back(model, loss):
        if parts["backward"] != "by autograd.grad":
            loss.backward()
            return
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def update(model, optimizer, micro_batches):
        reported = 0.0
        if parts["clear"] in ("before", "both"):
            optimizer.zero_grad()
        losses = []
        for micro_batch in micro_batches:
            if parts["clear"] == "inside":
                optimizer.zero_grad()
            loss = share(model, micro_batch, micro_batches)
            inputs, targets = micro_batch
            with torch.no_grad():
                mean = cross_entropy(model(inputs), targets).item()
            reported = mean if parts["returned"] == "last" else reported + mean * len(targets) / total_of(micro_batches)
            if parts["backward"] in ("once", "of the last"):
                losses = [*losses, loss] if parts["backward"] == "once" else [loss]
                continue
            back(model, loss)
            if parts["clip"] == "inside":
                clip_grad_norm_(model.parameters(), 0.1)
            if parts["step"] == "inside":
                optimizer.step()
        if losses:
            sum(losses).backward()
        if parts["clip"] == "once":
            clip_grad_norm_(model.parameters(), 0.1)
        if parts["step"] == "after" or (parts["step"] == "inside" and losses):
            optimizer.step()
        if parts["clear"] in ("after", "both"):
            optimizer.zero_grad()
        return None if parts["returned"] == "nothing" else reported

    return update


def faults_of(parts):
    """Return the codes of the wrong choices, less those that the other choices make harmless."""
    codes = {GRAMMAR[part][choice] for part, choice in parts.items()} - {None}
    if parts["backward"] in ("once", "of the last"):
        codes -= {"zeroed-inside", "clipped-inside", "stepped-inside"}  # there is nothing in the loop to do it to
    return codes


@settings(max_examples=15)
@given(LOOPS_OF_THE_GRAMMAR)
def test_a_loop_of_the_grammar_passes_exactly_when_every_choice_is_right(parts):
    codes = faults_of(parts)
    report = audit(build(parts))
    assert report.passed == (not codes), f"{parts}\n{report.explain()}"
    if codes:
        assert set(report.codes) & codes, f"{parts}: {codes}\n{report.explain()}"
    if len(codes) == 1:
        assert report.codes[0] in codes, f"{parts}: {codes}\n{report.explain()}"


@settings(max_examples=10)
@given(st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.01, 2.0]), min_size=5, max_size=5))
def test_weights_pass_exactly_when_they_are_those_of_the_mean(weights):
    def update(model, optimizer, micro_batches):
        optimizer.zero_grad()
        for weight, micro_batch in zip(weights, micro_batches, strict=False):
            (weight * share_of(model, micro_batch, total_of(micro_batches))).backward()
        optimizer.step()

    assert audit(update).passed == (set(weights) == {1.0})


# ---- one's own problem -----------------------------------------------------------------------------------------------


def groups_of(sizes, *shape, classes=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, *shape, generator=generator), torch.randint(classes, (n,), generator=generator)) for n in sizes
    ]


def test_a_model_of_ones_own_is_judged_and_left_alone():
    model, group = dense_net(), groups_of([16, 16, 16, 5], 64)
    before = [parameter.clone() for parameter in model.parameters()]
    data = [tensor.clone() for pair in group for tensor in pair]

    def right(model, optimizer, micro_batches):
        return update_parameters(model, optimizer, micro_batches, cross_entropy_sum)

    assert audit(right, model=model, micro_batches=group, loss_sum=cross_entropy_sum).passed
    report = audit(means_without_division, model=model, micro_batches=group, loss_sum=cross_entropy_sum)
    assert report.codes[0] == "not-divided"
    assert "the sum of loss_sum over the group, divided by the sum of count" in report.contract
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(data, [t for pair in group for t in pair], strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_with_a_count_of_its_own_is_judged_by_that_count():
    loss_sum, count = class_weighted_cross_entropy([1.0, 3.0, 0.5])
    problem = dict(model=dense_net(num_classes=3), micro_batches=groups_of([8, 8, 3], 64, classes=3))
    problem |= dict(loss_sum=loss_sum, count=count)

    def right(model, optimizer, group):
        return update_parameters(model, optimizer, group, loss_sum, count)

    def by_samples(model, optimizer, group):
        optimizer.zero_grad()
        for micro_batch in group:
            (loss_sum(model, micro_batch) / total_of(group)).backward()
        optimizer.step()

    assert audit(right, **problem).passed
    assert not audit(by_samples, **problem).passed


def test_batchnorm_dropout_and_a_gpt_are_judged_micro_batch_by_micro_batch():
    layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    problem = dict(model=layers, micro_batches=groups_of([6, 6, 4], 8, classes=3), loss_sum=cross_entropy_sum)
    assert audit(sums, **problem).passed
    assert audit(means_without_division, **problem).codes[0] == "not-divided"
    inputs = torch.randint(20, (6, 7), generator=torch.Generator().manual_seed(0))
    gpt = SmallGPT(20, context=8, width=8, heads=2, depth=1)
    group = [(inputs[:2], inputs[:2].clone()), (inputs[2:], inputs[2:].clone())]
    group[0][1][0, 2:] = -100
    problem = dict(
        model=gpt, micro_batches=group, loss_sum=token_cross_entropy_sum, count=token_cross_entropy_sum.count
    )
    assert audit(tokens.RIGHT["the_course_itself"], **problem).passed
    assert audit(tokens.WRONG["mean_of_means"][0], **problem).codes == ("mean-of-means",)


def sums(model, optimizer, micro_batches):
    optimizer.zero_grad()
    mean = 0.0
    for micro_batch in micro_batches:
        loss = share_of(model, micro_batch, total_of(micro_batches))
        loss.backward()
        mean += loss.item()
    optimizer.step()
    return mean


# ---- what surrounds it -----------------------------------------------------------------------------------------------


def test_an_audit_leaves_the_process_as_it_was():
    def patched():
        clearing = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad
        return torch.autograd._engine_run_backward, LRScheduler.step, torch.Tensor.backward, *clearing

    before = patched()
    torch.manual_seed(3)
    random.seed(4)
    states = torch.get_rng_state(), random.getstate()
    for function in (WRONG["seeds_the_world"][0], WRONG["raises"][0], sums):
        audit(function)
    audit_loop(epochs.WRONG["fails_at_the_tail"][0])
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert patched() == before
    assert torch.is_grad_enabled()


def test_an_audit_gives_the_same_report_again_and_inside_no_grad():
    first = audit(WRONG["clipped_then_divided"][0])
    with torch.no_grad():
        again = audit(WRONG["clipped_then_divided"][0])
    assert first == again
    assert str(first) == str(again)


def test_grad_mode_and_default_dtype_that_are_left_changed_are_found_and_given_back():
    def careless(model, optimizer, micro_batches):
        loss = sums(model, optimizer, micro_batches)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return loss

    report = audit(careless)
    assert report.codes == ("settings-changed",)
    assert "gradient mode and default dtype" in str(report)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32


def endless(model, optimizer, micro_batches):
    while True:
        try:
            time.sleep(1000)
        except Exception:
            continue


def busy(model, optimizer, micro_batches):
    while True:
        pass


@pytest.mark.parametrize("update", [endless, busy])
def test_code_that_hangs_is_stopped(update):
    report = audit(update, seconds=0.5)
    assert report.codes == ("ran-too-long",)
    assert "still running after 0.5 seconds" in str(report)


def test_code_that_hangs_is_stopped_in_another_thread_too():
    reports = []
    thread = threading.Thread(target=lambda: reports.append(audit(busy, seconds=0.5)))
    thread.start()
    thread.join(60)
    assert [report.codes for report in reports] == [("ran-too-long",)]


def test_the_keyboard_interrupts_an_audit():
    def pressed(model, optimizer, micro_batches):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(pressed)
    assert audit(sums).passed


def test_what_the_code_prints_is_not_shown(capfd):
    assert audit(right_updates.talks_while_it_works).passed
    audit(WRONG["floods"][0])
    assert capfd.readouterr() == ("", "")


def test_bad_arguments_are_refused_by_name():
    for arguments, message in (
        (dict(update=5), "update must be a function"),
        (dict(update=sums, task="images"), "task must be 'samples' or 'tokens'; got 'images'"),
        (dict(update=sums, seconds=0), "seconds must be a number above 0"),
        (dict(update=sums, model=dense_net()), r"missing: \['micro_batches', 'loss_sum'\]"),
        (dict(update=sums, model=5, micro_batches=[1], loss_sum=cross_entropy_sum), "model must be"),
        (dict(update=sums, model=dense_net(), micro_batches=iter([]), loss_sum=cross_entropy_sum), "micro_batches"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            audit(**arguments)
    with pytest.raises(TypeError, match="train must be a function"):
        audit_loop("train")


# ---- the report ------------------------------------------------------------------------------------------------------


def test_a_report_says_what_it_is_judged_by():
    passed, found = audit(sums), report_of("never_zeroed_nor_divided")
    assert passed.passed
    assert str(passed).startswith("Passed: 22 updates, no findings.")
    for report in (passed, found):
        for text in (str(report), report.explain(), report._repr_html_()):
            assert "gradients are None before the first call; the mean loss is returned" in text
            assert "mean cross-entropy over all samples" in text
    assert "all other tokens" in audit(sums, task="tokens").contract
    assert "a second epoch follows" in audit_loop(epochs.RIGHT["groups_of_its_own"]).contract
    for word in ("samples", "tokens", "None", "(B, C)", "(B, T, V)", "-100"):
        assert word in inspect.getdoc(audit)
        assert word in inspect.getdoc(audit_loop)


def test_a_report_lists_and_explains_its_findings():
    report = report_of("never_zeroed_nor_divided")
    assert report.codes == ("never-zeroed", "not-divided")
    assert str(report).startswith("Not passed: 2 findings.\n  never-zeroed: the gradient of the update before")
    for finding in report.findings:
        meaning, remedy = MEANINGS[finding.code]
        for part in (finding.code, finding.sentence, meaning, remedy):
            assert part in report.explain()
        assert finding.code in report._repr_html_()
    assert repr(report) == str(report)


def test_a_report_in_a_notebook_is_text_whatever_the_code_was():
    report = AuditReport((Finding("raised", "it raised <script>"),), "contract", 1)
    assert "<script>" not in report._repr_html_()
    assert "&lt;script&gt;" in report._repr_html_()


# ---- the command line ------------------------------------------------------------------------------------------------


def run_main(capsys, *arguments):
    status = main([*arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_line_says_passed_and_found_by_its_status(capsys):
    status, out, _ = run_main(capsys, f"{LOOPS / 'right_updates.py'}:Updater")
    assert (status, out[:7]) == (0, "Passed:")
    status, out, _ = run_main(capsys, f"{LOOPS / 'epochs.py'}:leaks", "--loop")
    assert (status, out.splitlines()[0]) == (1, "tail-leaked")


def test_the_module_runs_from_a_terminal():
    command = [sys.executable, "-m", "course_lib.audit", f"{LOOPS / 'hostile.py'}:ends_the_process"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "it ended the whole process with status 0" in result.stdout
    assert result.stderr == ""


def test_code_that_blocks_and_swallows_the_interruption_is_ended(capsys, monkeypatch):
    monkeypatch.setattr("course_lib.audit.__main__.GRACE_SECONDS", 0.5)
    status, out, _ = run_main(
        capsys, f"{LOOPS / 'hostile.py'}:{hostile.blocks_and_swallows.__name__}", "--seconds", "1"
    )
    assert status == 1
    assert "still running after 1 seconds, and blocked" in out


def test_what_could_not_run_has_status_two(capsys, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("print('x' * 10**6)\nraise SystemExit(0)\n")
    for arguments, message in (
        ([f"{tmp_path}/nothing.py:update"], "there is no file"),
        (["update"], "the target must be path/to/file.py:function; got 'update'"),
        ([f"{broken}:update", "--drop-tail"], "--drop-tail belongs to --loop"),
        ([f"{broken}:update", "--seconds", "0"], "--seconds must be above 0"),
        ([f"{broken}:update"], "calls exit (0) while it is loaded"),
    ):
        status, out, err = run_main(capsys, *arguments)
        assert (status, out) == (2, "")
        assert message in err
        assert err.startswith("Could not run: ")


def test_a_file_is_loaded_with_its_folder_and_named_in_its_errors(tmp_path):
    from course_lib.audit.child import NotThere, load

    (tmp_path / "beside_audited.py").write_text("value = 7\n")
    path = tmp_path / "mine.py"
    path.write_text(
        "from beside_audited import value\nclass Trainer:\n    def __call__(self): return value\nnumber = 3\n"
    )
    before = list(sys.path), list(sys.argv)
    try:
        assert load(str(path), "Trainer")() == 7
        for name, message in (("nothing", "has no nothing"), ("number", "number in .* can't be called; it is a int")):
            with pytest.raises(NotThere, match=message):
                load(str(path), name)
    finally:
        sys.path[:], sys.argv[:] = before


def test_the_two_halves_of_the_course_are_seen_as_one_update():
    def halves(model, optimizer, micro_batches):
        loss = accumulate_gradients(model, micro_batches, cross_entropy_sum)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert audit(halves).passed

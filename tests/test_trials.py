"""Tests of course_lib.trials: what a setting gives, in numbers and in words, and every mission, solved and not."""

import math
from dataclasses import replace

import pytest
import torch

from course_lib import trials
from course_lib.accumulation import update_parameters
from course_lib.batches import split_batch
from course_lib.losses import IGNORED_LABEL
from course_lib.memory import measure_memory
from course_lib.trials import (
    LARGEST_BATCH,
    LOOPS,
    MISSIONS,
    MODELS,
    Curves,
    Evidence,
    Measured,
    Setting,
    compare,
    gather,
    largest_that_fits,
    measure,
    mission,
    predict,
    train_both,
)

SMALL = Setting(micro_batch_size=4, accumulation_steps=2)


class StopHereError(Exception):
    pass


# Settings.


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"model": "BERT"}, ValueError, "model must be one of dense, convolutional, GPT; got 'BERT'"),
        ({"optimizer": "Lion"}, ValueError, "optimizer must be one of SGD"),
        ({"loop": "left"}, ValueError, "loop must be one of right"),
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size"),
        ({"micro_batch_size": 65}, ValueError, "micro_batch_size must be at most 64; got 65"),
        ({"accumulation_steps": 65}, ValueError, "accumulation_steps must be at most 64; got 65"),
        ({"accumulation_steps": 2.0}, TypeError, "accumulation_steps"),
        ({"micro_batch_size": 64, "accumulation_steps": 9}, ValueError, r"at most 512; got 64 \* 9 = 576"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate must be above 0 and finite; got 0.0"),
        ({"learning_rate": math.inf}, ValueError, "learning_rate must be above 0 and finite; got inf"),
        ({"learning_rate": "big"}, TypeError, "learning_rate must be a number; got 'big'"),
        ({"learning_rate": True}, TypeError, "learning_rate must be a number; got True"),
        ({"budget": "8 cats"}, ValueError, "budget='8 cats' is not a size"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(wrong, error, words):
    with pytest.raises(error, match=words):
        Setting(**wrong)


def test_the_line_of_code_reproduces_the_setting():
    for setting in [Setting(), *(one.solution for one in MISSIONS)]:
        assert eval(setting.code, {"control_room": lambda **given: Setting(**given)}) == setting
    assert Setting().code == "control_room(micro_batch_size=16, accumulation_steps=4)"
    assert Setting(loop="no division").code.endswith("accumulation_steps=4, loop='no division')")


def test_names_become_tokens_with_the_next_one_as_the_target():
    inputs, targets = trials.data_of(Setting(model="GPT"))
    assert inputs.shape == targets.shape == (2048, 14)
    assert inputs[0].tolist()[:6] == [0, 19, 13, 9, 20, 8]  # smith, after the sign that begins a name
    assert targets[0].tolist() == [19, 13, 9, 20, 8, 0] + [IGNORED_LABEL] * 8
    assert int(inputs.max()) == 26


def test_each_parameter_has_a_layer():
    for model in MODELS:
        net = trials.make_model(Setting(model=model))
        assert set(trials.layer_names(net)) == {name for name, _ in net.named_parameters()}
    assert [*dict.fromkeys(trials.layer_names(trials.make_model(Setting(model="GPT"))).values())] == [
        "tokens",
        "positions",
        "block 1",
        "block 2",
        "norm",
    ]


# Memory.


@pytest.mark.parametrize("model", MODELS)
def test_what_is_predicted_is_measured_to_the_byte(model):
    for optimizer in ("SGD", "AdamW"):
        setting = Setting(model, 4, 3, optimizer=optimizer)
        report, measured = predict(setting), measure(setting)
        assert measured.at_peak == report.at_peak
        assert measured.peak_bytes == report.peak_bytes


def test_a_prediction_is_of_exactly_the_batch_and_not_of_the_data_behind_it():
    setting = Setting("dense", 4, 2)
    model = trials.make_model(setting)
    optimizer = trials.make_optimizer(setting, model)
    batch = trials.first_batch(setting)
    for _ in range(2):
        with measure_memory(model, optimizer, batch) as meter:
            update_parameters(model, optimizer, split_batch(batch, 4), trials.loss_of(setting)[0])
    assert predict(setting).at_peak == meter.at_peak
    assert meter.at_peak["inputs"] == 8 * (64 * 4 + 8)


def test_a_second_question_costs_no_second_prediction(monkeypatch):
    setting = Setting("dense", 3, 3)
    first = predict(setting)
    monkeypatch.setattr(trials, "_predictor", None)
    assert predict(replace(setting, learning_rate=0.5, budget="1 MiB", loop="zero inside")) is first


def test_out_of_memory_is_real_and_the_size_that_fits_is_the_largest_that_cuts_evenly():
    setting = Setting("GPT", 24, 2, budget="2 MiB")
    assert measure(setting).at_peak is None
    size = largest_that_fits(setting)
    assert size is not None
    assert measure(replace(setting, micro_batch_size=size, accumulation_steps=48 // size)).at_peak is not None
    larger = min(one for one in range(size + 1, 25) if 48 % one == 0)
    assert predict(setting, larger).peak_bytes > setting.budget_bytes
    assert largest_that_fits(Setting("GPT", 64, 1, budget="256 KiB")) is None


# Gradients.


@pytest.mark.parametrize("model", MODELS)
def test_the_right_loop_is_equal_to_rounding_however_it_cuts(model):
    for size, steps in ((12, 1), (4, 3), (1, 12)):
        assert compare(Setting(model, size, steps)).agree(trials.ROUNDING)


def test_each_fault_has_its_own_size():
    digits = {loop: compare(Setting("dense", 4, 4, loop=loop)) for loop in LOOPS}
    assert digits["no division"].scale == pytest.approx(4, rel=1e-4)
    assert digits["no division"].cosine == pytest.approx(1, abs=1e-6)
    assert digits["mean of means"].agree(trials.ROUNDING)  # all micro-batches hold as many
    assert digits["zero inside"].cosine < 0.9
    assert not compare(Setting("GPT", 4, 4, loop="mean of means")).agree(1e-3)  # of unequally many tokens


def test_the_comparison_is_by_layer():
    assert list(compare(SMALL).per_parameter) == ["linear 1", "linear 2", "linear 3"]
    worst = compare(replace(SMALL, loop="zero inside")).per_parameter
    assert all(error > 0.1 for error in worst.values())


# Training.


def last(curves):
    *_, end = curves
    return end


def test_two_trainings_grow_together_and_stay_together():
    steps = list(train_both(Setting(optimizer="Adam", learning_rate=0.001), num_updates=5))
    assert [len(one.full) for one in steps] == [len(one.accumulated) for one in steps] == [1, 2, 3, 4, 5]
    assert [len(steps[-1].full_seconds), len(steps[-1].accumulated_seconds)] == [5, 5]
    assert steps[-1].parted_at is None
    assert steps[-1].largest_gap < 1e-5
    assert steps[-1].full[4] < steps[-1].full[0]


def test_a_broken_loop_parts():
    for loop in ("no division", "zero inside"):
        assert last(train_both(replace(SMALL, loop=loop), num_updates=8)).parted_at is not None


def test_training_leaves_the_global_random_state_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    gather(SMALL, num_updates=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_training_that_diverges_ends_there_and_says_so():
    setting = replace(SMALL, learning_rate=1e30)
    evidence = gather(setting, num_updates=8)
    assert evidence.finished
    assert len(evidence.curves.full) < 8
    assert "The full batch diverged at update" in evidence.sentences()["curves"]


def test_the_check_is_looked_at_before_and_after_each_forward_pass():
    calls, setting = [], Setting("dense", 2, 5)
    model, micro_batches = trials.make_model(setting), split_batch(trials.first_batch(setting), 2)
    loss_sum = trials.watched_loss(setting, lambda: calls.append(1))
    trials.gradients(setting, model, micro_batches, loss_sum)  # the loss is new, and is tried out once
    calls.clear()
    trials.gradients(setting, model, micro_batches, loss_sum)
    assert len(calls) == 10


@pytest.mark.parametrize("at", [1, 5, 6, 8, 10])
def test_a_long_pass_can_be_stopped_in_every_layer_forward_and_backward(at):
    calls, model = [], trials.make_model(Setting())

    def check():
        calls.append(1)
        if len(calls) == at:
            raise StopHereError

    trials.look_in_every_layer(model, check)
    inputs, targets = trials.first_batch(SMALL)
    with pytest.raises(StopHereError):
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    assert len(calls) == at


def test_the_full_batch_is_looked_into_where_it_is_large(monkeypatch):
    seen = []
    monkeypatch.setattr(trials, "look_in_every_layer", lambda model, check: seen.append(check))
    for steps in (4, 5):
        last(train_both(Setting("dense", 16, steps), num_updates=1, check=print))
    assert seen == [print]


def test_a_check_that_raises_ends_everything_at_once():
    told, calls = [], []

    def check():
        calls.append(1)
        if told and told[-1].curves is not None:
            raise StopHereError

    with pytest.raises(StopHereError):
        gather(SMALL, num_updates=50, check=check, tell=told.append)
    assert len(told[-1].curves.full) == 1


def test_evidence_comes_piece_by_piece_and_ends_finished():
    told = []
    evidence = gather(SMALL, num_updates=2, tell=told.append)
    known = ["predicted", "comparison", "measured", "curves"]
    assert [[name for name in known if getattr(one, name) is not None] for one in told[:4]] == [
        known[:1],
        known[:2],
        known[:3],
        known,
    ]
    assert [one.finished for one in told] == [False] * 5 + [True]
    assert told[-1] == evidence
    assert not gather(SMALL, num_updates=0).finished


def test_out_of_memory_trains_the_full_batch_alone_and_says_what_would_fit():
    evidence = gather(Setting("GPT", 16, 1, budget="2 MiB"), num_updates=2)
    assert evidence.out_of_memory
    assert (len(evidence.curves.full), len(evidence.curves.accumulated)) == (2, 0)
    assert evidence.curves.parted_at is None
    short = trials.format_bytes(evidence.predicted.peak_bytes - 2 * 2**20, 2)
    assert evidence.sentences()["memory"].startswith(f"Out of memory: {short} short of the ")
    assert f"micro-batches of {evidence.fits} would fit" in evidence.sentences()["memory"]
    assert "only the full batch is trained, outside the budget" in evidence.sentences()["curves"]
    nothing = replace(evidence, fits=None).sentences()["memory"]
    assert nothing.endswith("No smaller micro-batch of this batch would fit.")


def test_curves_know_where_they_part():
    together = Curves((2.0, 1.0), (2.0, 1.009), (1.0, 1.0, 4.0), (3.0, 3.0, 9.0), 2)
    assert (together.parted_at, together.slowdown) == (None, 3.0)
    assert together.largest_gap == pytest.approx(0.009 / 1.009)
    assert Curves((2.0, 1.0), (2.0, 1.02)).parted_at == 2
    assert Curves((2.0, 1.0), (2.0,)).parted_at == 2  # one has ended
    assert Curves((2.0, 1.0), ()).parted_at is None
    assert Curves((2.0,), ()).slowdown is None


def test_words_say_what_is_seen():
    empty = Evidence(SMALL).sentences()
    assert empty == {
        "memory": "Memory: predicting.",
        "gradient": "Gradient: not compared yet.",
        "curves": "Curves: not trained yet.",
        "time": "Time: not measured yet.",
    }
    full = gather(SMALL, num_updates=2)
    words = full.sentences()
    assert words["memory"].startswith("Memory: it runs within 8.0 MiB;")
    assert words["memory"].endswith("at the peak, as predicted.")
    assert words["gradient"].startswith("Gradient: equal to rounding, relative error")
    assert words["curves"].startswith("Curves: they lie on one another, at most")
    assert words["time"].startswith("Time on this CPU: ")
    assert " in 2 passes, " in words["time"]
    parted = replace(full.curves, accumulated=(full.curves.full[0], 9.0))
    assert "learning rate is so large" in replace(full, curves=parted).sentences()["curves"]
    broken = replace(full, setting=replace(SMALL, loop="zero inside"), curves=parted)
    assert "part at update 2. The loop is broken: zero inside." in broken.sentences()["curves"]
    assert "after 2 of 2 updates" in replace(full, finished=False).sentences()["curves"]
    alone = replace(full, setting=Setting("dense", 8, 1))
    assert "one micro-batch is the full batch" in alone.sentences()["gradient"]
    off = gather(replace(SMALL, loop="no division"), num_updates=0).sentences()["gradient"]
    assert off.startswith("Gradient: not equal. It is 2.00 times the full batch's along it, cosine 1.00")


# Missions.

TRAINED = {5, 8, 10, 11}  # the others ask nothing of the curves


@pytest.mark.parametrize("number", range(1, len(MISSIONS) + 1))
def test_each_mission_is_solved_by_its_solution(number):
    one = mission(number)
    evidence = gather(one.solution, num_updates=trials.NUM_UPDATES if number in TRAINED else 0)
    assert one.verdict(evidence) == (True, "Solved.")


NEAR_MISSES = [
    (1, Setting("dense", 8, 8), "micro-batches must hold 16, they hold 8"),
    (1, Setting("dense", 16, 2), "the effective batch must be 64, it is 32"),
    (1, Setting(loop="zero inside"), "the gradient must equal the full batch's"),
    (2, Setting(), "it must run out of memory"),
    (3, Setting("dense", 8, 32), "the model must be GPT"),
    (3, Setting("GPT", 8, 16), "the effective batch must be 256, it is 128"),
    (3, Setting("GPT", 8, 32, budget="16 MiB"), "the budget must be 8 MiB or less"),
    (3, Setting("GPT", 64, 4), "it must run within the budget"),
    (4, Setting("dense", 2, 32), "32 passes can be outdone"),
    (4, Setting("dense", 1, 64, loop="no division"), "the gradient must equal the full batch's"),
    (6, Setting("convolutional", 16, 4, "AdamW", budget="1 MiB"), "16 fits, but so does 17"),
    (6, Setting("convolutional", 18, 4, "AdamW", budget="1 MiB"), "it must run within the budget"),
    (6, Setting("convolutional", 17, 1, "AdamW", budget="1 MiB"), "there must be more than one accumulation step"),
    (6, Setting("convolutional", 8, 64, "AdamW", budget="1 MiB"), "8 fits, but so does 9"),
    (6, Setting("convolutional", 17, 4, "SGD", budget="1 MiB"), "the optimizer must be AdamW"),
    (7, Setting("dense", 4, 4, loop="mean of means"), "the gradient must be off by more than 1 percent"),
    (7, Setting("GPT", 4, 4), "the loop must be mean of means"),
    (8, Setting("dense", 16, 2, "Adam", 1e-3, loop="no division"), "about 4 times too long, or more"),
    (8, Setting("dense", 16, 4, "Adam", 1e-3), "the loop must be no division"),
    (9, Setting("convolutional", 16, 4), "the peak must be above that of the whole batch in one pass"),
    (9, Setting("dense", 2, 1), "there must be more than one accumulation step"),
    (10, Setting("convolutional", 8, 8, budget="1 MiB"), "the effective batch must be at least 128"),
    (10, Setting("convolutional", 8, 16), "the budget must be 1 MiB"),
    (11, Setting(loop="no division"), "the loop must be right"),
]


@pytest.mark.parametrize(("number", "setting", "missing"), NEAR_MISSES)
def test_a_near_miss_is_told_what_is_missing(number, setting, missing):
    solved, words = mission(number).verdict(gather(setting, num_updates=0))
    assert not solved
    assert words.startswith("Not yet: ")
    assert missing in words


def trained(setting, full, accumulated, num_updates=None, **known):
    """Return finished evidence with these losses; the gradient is the setting's own."""
    curves = Curves(tuple(full), tuple(accumulated), (), (), num_updates or len(full))
    given = {"comparison": compare(setting), "measured": Measured({"parameters": 1}), "curves": curves}
    return replace(Evidence(setting, finished=True), **(given | known))


PARTED, TOGETHER = ([2.0, 1.0], [2.0, 1.5]), ([2.0, 1.0], [2.0, 1.0])
WIDE_STEP = Setting(optimizer="momentum", learning_rate=1.0)
UNDIVIDED = Setting(loop="no division")
TIGHT = Setting("convolutional", 8, 16, budget="1 MiB")


@pytest.mark.parametrize(
    ("number", "evidence", "missing"),
    [
        (5, trained(Setting(), *TOGETHER), "the curves must part"),
        (5, trained(Setting(), [2.0, 1.0], [], measured=Measured(None)), "the curves must part"),
        (8, trained(UNDIVIDED, *PARTED), "the last two losses must be within 5 percent"),
        (8, trained(UNDIVIDED, [2.0], [2.0], num_updates=2), "no training may diverge"),
        (10, trained(TIGHT, *TOGETHER), "the last loss must be below 0.5"),
        (10, trained(TIGHT, [2.0, 0.4], [2.0, 0.3]), "the curves must stay together"),
        (10, trained(TIGHT, [2.0, 0.3], [], measured=Measured(None)), "it must run within the budget"),
        (11, trained(WIDE_STEP, *TOGETHER), "the curves must part"),
        (11, trained(WIDE_STEP, [2.0, 1.0], [2.0], num_updates=3), "no training may diverge"),
    ],
)
def test_a_training_that_misses_is_told_what_is_missing(number, evidence, missing):
    solved, words = mission(number).verdict(evidence)
    assert not solved
    assert missing in words


@pytest.mark.parametrize("number", range(1, len(MISSIONS) + 1))
def test_nothing_is_solved_before_it_is_known(number):
    solved, words = mission(number).verdict(Evidence(mission(number).solution))
    assert not solved
    assert words.startswith("Waiting: ")


def test_missions_have_numbers():
    assert [int(one.title.split(".")[0]) for one in MISSIONS] == [*range(1, len(MISSIONS) + 1)]
    assert len(MISSIONS) >= 8
    with pytest.raises(ValueError, match="number must be at most 11"):
        mission(12)
    assert LARGEST_BATCH == 512

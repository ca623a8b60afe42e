"""Runs: 200 accumulated updates lie on the full batch's curve, a history does not depend on K, a file resumes a run."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from course_lib import training
from course_lib.accumulation import Update, accumulate_gradients, update_parameters
from course_lib.batches import group_micro_batches, group_sizes, split_batch
from course_lib.datasets import load_digits, shuffled_batches
from course_lib.losses import cross_entropy_sum
from course_lib.models import dense_net
from course_lib.training import History, load_training, loss_gaps, save_training, train

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.3),
    "momentum": partial(torch.optim.SGD, lr=0.03, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=2e-3),
    "AdamW": partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1),
}


class Slope(nn.Module):
    """One weight w and the loss w * x: the gradient is the mean of the inputs."""

    def __init__(self, weight: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight * inputs


def outputs_sum(model: nn.Module, micro_batch: torch.Tensor) -> torch.Tensor:
    return model(micro_batch).sum()


def inputs_of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(make_optimizer, micro_batch_size: int, num_updates: int, **options) -> History:
    digits = load_digits(torch.float64)
    model = dense_net(hidden=(32, 32), dtype=torch.float64)
    data = digits.inputs, digits.targets
    groups = (
        split_batch(batch, micro_batch_size) for batch in shuffled_batches(data, 64, seed=0, num_batches=num_updates)
    )
    return train(model, make_optimizer(model.parameters()), groups, cross_entropy_sum, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_200_updates_lie_on_the_curve_of_the_full_batch(name):
    """64 digits as 4 x 16, in float64, below the stability limit: every loss within 1e-6."""
    full_batch, accumulated = (run(OPTIMIZERS[name], size, 200) for size in (64, 16))
    assert len(accumulated) == 200
    assert max(loss_gaps(full_batch, accumulated)) < 1e-6
    assert full_batch.losses[0] > 2
    assert sum(full_batch.losses[-10:]) / 10 < 0.5  # the curve goes somewhere


def test_a_loss_that_is_not_divided_leaves_the_curve():
    """The check above can fail: four times the gradient is another run under SGD."""
    full_batch = run(OPTIMIZERS["SGD"], 64, 20)
    undivided = run(partial(torch.optim.SGD, lr=4 * 0.3), 16, 20)
    assert max(loss_gaps(full_batch, undivided)) > 1e-2


def test_the_history_does_not_depend_on_how_the_batch_is_cut():
    """L01: the logged loss is that of the whole group for every K, and one value per update (L02)."""
    histories = [run(OPTIMIZERS["momentum"], size, 5, max_grad_norm=0.5) for size in (64, 32, 24, 16, 7, 1)]
    for history in histories[1:]:
        assert len(history) == 5
        assert max(loss_gaps(histories[0], history)) < 1e-12
        for one, other in zip(histories[0].updates, history.updates, strict=True):
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-12)
            assert one.count == other.count == 64


def test_every_option_reaches_the_update():
    model, scaler = Slope(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    history = train(
        model,
        optimizer,
        [[inputs_of(4.0)], [inputs_of(3.0), inputs_of(-1.0)]],
        outputs_sum,
        lambda micro_batch: 2 * len(micro_batch),
        max_grad_norm=1.0,
        scaler=scaler,
        scheduler=scheduler,
    )
    assert [update.grad_norm for update in history.updates] == [2.0, 0.5]
    assert [update.count for update in history.updates] == [2, 4]
    assert scheduler.get_last_lr() == [0.025]
    assert scaler.state_dict()["_growth_tracker"] == 2
    assert model.weight.item() == pytest.approx(1 - 0.1 * 1.0 - 0.05 * 0.5, abs=1e-6)


def test_a_run_equals_its_updates_by_hand():
    groups = [[inputs_of(1.0, 2.0), inputs_of(3.0)], [inputs_of(4.0)]]
    models = Slope(), Slope()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    history = train(models[0], optimizers[0], iter(groups), outputs_sum)
    by_hand = [update_parameters(models[1], optimizers[1], group, outputs_sum) for group in groups]
    assert history.updates == by_hand
    assert history.losses == [update.loss for update in by_hand]
    assert models[0].weight.item() == models[1].weight.item()


def test_tails_of_epochs_are_updates_of_their_own_size():
    """B01, B02: 5 micro-batches of gradient 1, K = 4: both updates have the gradient 1, also in the second epoch."""
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        assert model.weight.grad is None
        groups = group_micro_batches([inputs_of(1.0)] * 5, 4)
        history = train(model, optimizer, groups, outputs_sum, max_grad_norm=math.inf)
        assert [update.grad_norm for update in history.updates] == [1.0, 1.0]
        assert [update.count for update in history.updates] == group_sizes(5, 4) == [4, 1]
        assert model.weight.item() == pytest.approx(1 - 0.2 * (epoch + 1))
    tail_by_four = 1.0 / 4
    assert tail_by_four == 0.25


def test_an_error_in_a_run_comes_through_and_leaves_a_whole_number_of_updates():
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="nan in micro-batch 2 of 2"):
        train(model, optimizer, [[inputs_of(1.0)], [inputs_of(1.0), inputs_of(math.nan)]], outputs_sum)
    assert model.weight.item() == pytest.approx(0.9)
    assert model.weight.grad is None


def test_groups_without_items_stay_in_the_history():
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = train(model, optimizer, [[inputs_of()], [inputs_of(2.0)]], outputs_sum)
    assert history.updates[0].skipped
    assert math.isnan(history.losses[0])
    assert history.losses[1] == 2.0


@pytest.mark.parametrize("training", [True, False])
def test_the_training_mode_is_left_as_it_is(training):
    model = dense_net(hidden=(8,), dtype=torch.float64).train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, [[load_digits(torch.float64).first(4)]], cross_entropy_sum)
    assert all(module.training == training for module in model.modules())


def test_no_groups_give_an_empty_history():
    model = Slope()
    history = train(model, torch.optim.SGD(model.parameters(), lr=0.1), [], outputs_sum)
    assert len(history) == 0
    assert history.losses == []
    assert repr(history) == "History of 0 updates"


def test_histories_show_where_they_start_and_end():
    updates = [Update(loss, 4, None, skipped=False) for loss in (2.25, 1.0, 0.5)]
    assert repr(History(updates)) == "History of 3 updates: loss 2.250 to 0.500"
    assert History().updates is not History().updates


def test_gaps_are_absolute_and_need_runs_of_one_length():
    runs = [History([Update(loss, 4, None, skipped=False) for loss in losses]) for losses in ((2.0, 1.0), (1.5, 3.0))]
    assert loss_gaps(*runs) == [0.5, 2.0]
    with pytest.raises(ValueError, match="candidate has 1 updates, reference 2"):
        loss_gaps(runs[0], History(runs[1].updates[:1]))


# A run in a file.


def noisy_net() -> nn.Sequential:
    """A net with everything that has a state of its own: parameters, running statistics, random masks."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 10))


def warm_up(optimizer: torch.optim.Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, start_factor=0.1, total_iters=3), LinearLR(optimizer, 1.0, 0.0, total_iters=9)]
    return SequentialLR(optimizer, parts, milestones=[3])


RUNS = {
    "AdamW, warm-up, scaler, average": (partial(torch.optim.AdamW, lr=1e-2), warm_up, True),
    "momentum, StepLR": (partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(StepLR, step_size=2), False),
    "Adam, OneCycleLR": (partial(torch.optim.Adam, lr=1e-2), partial(OneCycleLR, max_lr=0.1, total_steps=13), False),
    "RMSprop, LambdaLR": (partial(torch.optim.RMSprop, lr=1e-3), partial(LambdaLR, lr_lambda=lambda u: 0.9**u), False),
    "SGD alone": (partial(torch.optim.SGD, lr=0.1), None, False),
}


def parts_of(name: str, seed: int = 0) -> dict[str, Any]:
    """Build the parts of a run, as the arguments of save_training and load_training."""
    make_optimizer, make_scheduler, scaled = RUNS[name]
    torch.manual_seed(seed)
    model = noisy_net()
    parts: dict[str, Any] = {"model": model, "optimizer": make_optimizer(model.parameters())}
    if make_scheduler:
        parts["scheduler"] = make_scheduler(parts["optimizer"])
    if scaled:
        parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        parts["extras"] = {"average": average}
    return parts


def groups_of_digits() -> Iterator[list]:
    """12 groups from a data set of 100, so that each epoch ends with a short one."""
    digits = load_digits().first(100)
    return (split_batch(batch, 8) for batch in shuffled_batches(digits, 24, seed=3, num_batches=12))


def go_on(parts: dict[str, Any], groups: Iterator[list]) -> list[Update]:
    """Make an update for each group, the moving average after each."""
    options = {name: part for name, part in parts.items() if name in ("scaler", "scheduler")}
    updates = []
    for group in groups:
        updates += train(parts["model"], parts["optimizer"], [group], cross_entropy_sum, **options).updates
        for average in parts.get("extras", {}).values():
            average.update_parameters(parts["model"])
    return updates


def states_of(parts: dict[str, Any]) -> dict[str, Any]:
    """Copy everything that a run changes, torch's random state included."""
    holders = {**parts, **parts.get("extras", {})}
    holders.pop("extras", None)
    states = {name: copy.deepcopy(holder.state_dict()) for name, holder in holders.items()}
    return {**states, "random": torch.get_rng_state()}


def assert_same(one: Any, other: Any) -> None:
    """Compare bit for bit, in any nesting. `torch.testing` compares NaN with NaN, and types."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def stored(one: dict[str, Any]) -> dict[str, Any]:
    """Take out what assert_close can't compare: None, texts and counters, which are compared by ==."""

    def walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(inner, f"{place}/{key}")
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                yield from walk(inner, f"{place}/{number}")
        else:
            yield place, value

    return dict(walk(one, ""))


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = stored(one), stored(other)
    assert list(first) == list(second)
    for place, value in first.items():
        if isinstance(value, torch.Tensor):
            assert_same(value, second[place])
        else:
            assert value == second[place], place


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("interrupted_after", [0, 1, 5, 11])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, name, interrupted_after):
    """Dropout, running statistics, momentum, schedule, scaler and average all go on where they were."""
    whole = parts_of(name)
    losses = [update.loss for update in go_on(whole, groups_of_digits())]

    first = parts_of(name)
    before = go_on(first, islice(groups_of_digits(), interrupted_after))
    save_training(tmp_path / "run.pt", **first, updates_done=len(before))

    resumed = parts_of(name, seed=1)  # other parameters, another random state
    torch.rand(17)
    done = load_training(tmp_path / "run.pt", **resumed)
    after = go_on(resumed, islice(groups_of_digits(), done, None))

    assert done == interrupted_after
    assert [update.loss for update in before + after] == losses
    assert_same_state(states_of(whole), states_of(resumed))


def test_saving_changes_nothing_in_the_run_that_goes_on(tmp_path):
    whole, saved = parts_of("AdamW, warm-up, scaler, average"), parts_of("AdamW, warm-up, scaler, average")
    torch.manual_seed(5)
    go_on(whole, groups_of_digits())
    torch.manual_seed(5)
    for number, group in enumerate(groups_of_digits(), start=1):
        go_on(saved, [group])
        save_training(tmp_path / "run.pt", **saved, updates_done=number)
    assert_same_state(states_of(whole), states_of(saved))
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_a_skipped_update_counts_as_a_place_in_the_data(tmp_path):
    """The second of three groups overflows: its step is skipped, the resumed run takes the third."""

    def parts() -> dict[str, Any]:
        model = Slope()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        return {"model": model, "optimizer": optimizer, "scheduler": StepLR(optimizer, 1), "scaler": scaler}

    groups = [[inputs_of(1.0)], [inputs_of(1.0), inputs_of(math.inf)], [inputs_of(3.0)]]

    def run_all(parts: dict[str, Any], groups: list) -> list[bool]:
        model, optimizer, *_ = parts.values()
        options = {name: parts[name] for name in ("scheduler", "scaler")}
        return [update.skipped for update in train(model, optimizer, groups, outputs_sum, **options).updates]

    whole, first, resumed = parts(), parts(), parts()
    assert run_all(whole, groups) == [False, True, False]
    save_training(tmp_path / "run.pt", **first, updates_done=len(run_all(first, groups[:2])))
    done = load_training(tmp_path / "run.pt", **resumed)
    assert done == 2
    assert resumed["scaler"].get_scale() == 2.0
    assert resumed["scheduler"].last_epoch == 1  # the schedule has seen one step
    run_all(resumed, groups[done:])
    assert_same_state(states_of(whole), states_of(resumed))


@pytest.mark.parametrize("forgotten", ["model", "optimizer", "scheduler", "scaler", "average", "random"])
def test_each_part_of_the_state_matters(tmp_path, forgotten):
    """The check of equality can fail: with any one part left as it was built, the resumed run is another one."""
    name = "AdamW, warm-up, scaler, average"
    whole = parts_of(name)
    go_on(whole, groups_of_digits())
    first = parts_of(name)
    save_training(tmp_path / "run.pt", **first, updates_done=len(go_on(first, islice(groups_of_digits(), 5))))
    resumed = parts_of(name, seed=1)
    holders = {**resumed, **resumed["extras"]}
    fresh = copy.deepcopy(holders[forgotten].state_dict()) if forgotten in holders else torch.get_rng_state()
    done = load_training(tmp_path / "run.pt", **resumed)
    holders[forgotten].load_state_dict(fresh) if forgotten in holders else torch.set_rng_state(fresh)
    go_on(resumed, islice(groups_of_digits(), done, None))
    with pytest.raises(AssertionError):
        assert_same_state(states_of(whole), states_of(resumed))


def test_two_optimizers_go_into_one_file(tmp_path):
    """As in adversarial training: the second model and its optimizer are extras."""

    def both(seed: int) -> dict[str, Any]:
        first = parts_of("SGD alone", seed)
        other = parts_of("momentum, StepLR", seed + 1)
        return {**first, "extras": {"critic": other["model"], "its optimizer": other["optimizer"]}}

    first, resumed = both(0), both(7)
    critic, optimizer = first["extras"].values()
    train(critic, optimizer, islice(groups_of_digits(), 2), cross_entropy_sum)
    save_training(tmp_path / "run.pt", **first, updates_done=2)
    assert load_training(tmp_path / "run.pt", **resumed) == 2
    assert_same_state(states_of(first), states_of(resumed))


def test_a_schedule_that_waits_for_a_metric_can_be_kept(tmp_path):
    """update_parameters can't step it; a run that does so itself can still be saved."""
    parts, resumed = ({**parts_of("SGD alone", seed), "scheduler": None} for seed in (0, 1))
    for one in (parts, resumed):
        one["scheduler"] = ReduceLROnPlateau(one["optimizer"], patience=0)
    for metric in (1.0, 2.0):
        parts["scheduler"].step(metric)
    save_training(tmp_path / "run.pt", **parts, updates_done=2)
    load_training(tmp_path / "run.pt", **resumed)
    assert resumed["scheduler"].best == 1.0
    assert resumed["optimizer"].param_groups[0]["lr"] == pytest.approx(0.01)


# Only between two updates.


def half_a_group(parts: dict[str, Any]) -> None:
    group = next(groups_of_digits())
    accumulate_gradients(parts["model"], group[:1], cross_entropy_sum, scaler=parts.get("scaler"))


def test_no_saving_and_no_loading_in_the_middle_of_a_group(tmp_path):
    parts = parts_of("AdamW, warm-up, scaler, average")
    save_training(tmp_path / "run.pt", **parts, updates_done=0)
    kept = (tmp_path / "run.pt").read_bytes()
    half_a_group(parts)
    gradients = {name: parameter.grad.clone() for name, parameter in parts["model"].named_parameters()}
    before = states_of(parts)
    for call in (partial(save_training, updates_done=1), load_training):
        with pytest.raises(ValueError, match=r"model has a gradient in 1\.weight: the group is not finished"):
            call(tmp_path / "run.pt", **parts)
    assert_same_state(states_of(parts), before)
    assert_same(gradients, {name: parameter.grad for name, parameter in parts["model"].named_parameters()})
    assert (tmp_path / "run.pt").read_bytes() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    parts["optimizer"].zero_grad()
    save_training(tmp_path / "run.pt", **parts, updates_done=1)


def test_gradients_of_zeros_are_gradients(tmp_path):
    """An optimizer passes over None and takes a step (decay, momentum) at zero: the resumed run would differ."""
    parts = parts_of("SGD alone")
    half_a_group(parts)
    parts["optimizer"].zero_grad(set_to_none=False)
    with pytest.raises(ValueError, match="when its gradients are None"):
        save_training(tmp_path / "run.pt", **parts, updates_done=0)


def test_gradients_of_what_only_an_optimizer_or_an_extra_holds_are_seen_too(tmp_path):
    parts = parts_of("SGD alone")
    loose = nn.Parameter(torch.ones(2))
    parts["optimizer"].add_param_group({"params": [loose]})
    loose.grad = torch.ones(2)
    with pytest.raises(ValueError, match="optimizer has a gradient in parameter 6"):
        save_training(tmp_path / "run.pt", **parts, updates_done=0)
    loose.grad = None
    critic = nn.Linear(2, 1)
    critic.bias.grad = torch.ones(1)
    with pytest.raises(ValueError, match=r"extras\['critic'\] has a gradient in bias"):
        save_training(tmp_path / "run.pt", **parts, extras={"critic": critic}, updates_done=0)


# A whole file or none.


class NoSpace(Exception):
    pass


@pytest.mark.parametrize("error", [NoSpace, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["save", "fsync", "replace"])
def test_an_interrupt_while_saving_leaves_the_old_file(tmp_path, monkeypatch, where, error):
    parts = parts_of("momentum, StepLR")
    save_training(tmp_path / "run.pt", **parts, updates_done=3)

    def fail(*arguments: Any) -> None:
        if where == "save":
            arguments[1].write(b"half a fi")
        raise error

    monkeypatch.setattr(*{"save": (torch, "save"), "fsync": (os, "fsync"), "replace": (os, "replace")}[where], fail)
    with pytest.raises(error):
        save_training(tmp_path / "run.pt", **parts, updates_done=4)
    monkeypatch.undo()
    assert load_training(tmp_path / "run.pt", **parts) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_the_file_is_on_the_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: calls.append(name) or real(*a))
    save_training(tmp_path / "run.pt", **parts_of("SGD alone"), updates_done=0)
    assert calls == ["fsync", "replace"]


def test_a_state_that_could_not_be_read_again_is_not_written(tmp_path):
    class Holder:
        """Holds an object of a class of its own, which a file without code can't bring back."""

        def state_dict(self) -> dict[str, Any]:
            return {"cut": Path("x")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("never read")

    with pytest.raises(ValueError, match="can't be read as tensors and plain values"):
        save_training(tmp_path / "run.pt", **parts_of("SGD alone"), extras={"holder": Holder()}, updates_done=0)
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "latest.pt").symlink_to(tmp_path / "store" / "run.pt")
    parts = parts_of("SGD alone")
    save_training(tmp_path / "latest.pt", **parts, updates_done=4)
    assert (tmp_path / "latest.pt").is_symlink()
    assert load_training(str(tmp_path / "store" / "run.pt"), **parts) == 4


# All or nothing.

FULL = "AdamW, warm-up, scaler, average"


def without(name: str, parts: dict[str, Any]) -> dict[str, Any]:
    return {key: part for key, part in parts.items() if key != name}


def with_model(model: nn.Module) -> dict[str, Any]:
    """The parts of FULL, built around another model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = AveragedModel(noisy_net(), multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": warm_up(optimizer),
        "scaler": scaler,
        "extras": {"average": average},
    }


def with_other(name: str, make: Any) -> dict[str, Any]:
    parts = parts_of(FULL, seed=1)
    parts[name] = make(parts)
    if name == "optimizer":
        parts["scheduler"] = warm_up(parts["optimizer"])
    return parts


def narrow_net() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10))


def two_groups(parts: dict[str, Any]) -> torch.optim.Optimizer:
    first, *others = parts["model"].parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=1e-2)


def reversed_order(parts: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parts["model"].parameters())[::-1], lr=1e-2)


MISMATCHES = {
    "no scheduler": (lambda: without("scheduler", parts_of(FULL, 1)), "was saved with scheduler; it must be given"),
    "no scaler": (lambda: without("scaler", parts_of(FULL, 1)), "was saved with scaler; it must be given"),
    "no average": (
        lambda: without("extras", parts_of(FULL, 1)),
        r"was saved with extras\['average'\]; it must be given",
    ),
    "an average more": (
        lambda: with_other("extras", lambda parts: {**parts["extras"], "slow": AveragedModel(noisy_net())}),
        r"extras\['slow'\] was given, but .* was saved without it",
    ),
    "another width": (
        lambda: with_model(narrow_net()),
        r"model is not as it was saved\. 1\.weight: saved 'float32 \[16, 64\]', given 'float32 \[8, 64\]'",
    ),
    "another precision": (
        lambda: with_model(noisy_net().double()),
        r"1\.weight: saved 'float32 \[16, 64\]', given 'float64 \[16, 64\]'",
    ),
    "a layer less": (lambda: with_model(noisy_net()[:3]), r"4\.weight: saved 'float32 \[10, 16\]', given none"),
    "another optimizer": (
        lambda: with_other("optimizer", lambda parts: torch.optim.SGD(parts["model"].parameters(), lr=0.1)),
        "optimizer is not as it was saved. class: saved 'AdamW', given 'SGD'",
    ),
    "other groups": (lambda: with_other("optimizer", two_groups), "group 0, parameter 1: saved .* given none"),
    "another order": (
        lambda: with_other("optimizer", reversed_order),
        r"group 0, parameter 0: saved '1\.weight \[16, 64\]', given '4\.bias \[10\]'",
    ),
    "another schedule": (
        lambda: with_other("scheduler", lambda parts: StepLR(parts["optimizer"], 2)),
        "scheduler is not as it was saved. class: saved 'SequentialLR', given 'StepLR'",
    ),
    "a scaler that is off": (
        lambda: with_other("scaler", lambda _: torch.amp.GradScaler("cpu", enabled=False)),
        "scaler is not as it was saved. enabled: saved 'True', given 'False'",
    ),
    "an average of something else": (
        lambda: with_other("extras", lambda _: {"average": AveragedModel(narrow_net())}),
        r"extras\['average'\] is not as it was saved\. module\.1\.weight",
    ),
}


@pytest.fixture
def saved_run(tmp_path) -> Path:
    parts = parts_of(FULL)
    go_on(parts, islice(groups_of_digits(), 4))
    save_training(tmp_path / "run.pt", **parts, updates_done=4)
    return tmp_path / "run.pt"


@pytest.mark.parametrize("name", MISMATCHES)
def test_what_does_not_fit_is_named_and_changes_nothing(saved_run, name):
    make, message = MISMATCHES[name]
    parts = make()
    before = states_of(parts)
    with pytest.raises(ValueError, match=message):
        load_training(saved_run, **parts)
    assert_same_state(states_of(parts), before)


def test_a_scheduler_the_file_does_not_have_is_named(tmp_path):
    parts = parts_of("momentum, StepLR")
    save_training(tmp_path / "run.pt", **without("scheduler", parts), updates_done=0)
    with pytest.raises(ValueError, match=r"scheduler was given, but .* was saved without it"):
        load_training(tmp_path / "run.pt", **parts)


class Stubborn(nn.Linear):
    """Takes half of its state over, then fails, or says that it has taken all of it."""

    def __init__(self, error: type[BaseException] | None):
        super().__init__(2, 1)
        self.error, self.failed = error, False

    def load_state_dict(self, state: dict[str, Any], **options: Any) -> Any:
        if self.failed:
            return super().load_state_dict(state, **options)
        self.failed = True
        torch.rand(3)  # a part that initialises something draws random numbers
        with torch.no_grad():
            self.weight.copy_(state["weight"])
        if self.error:
            raise self.error("no more")
        return None


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (RuntimeError, ValueError, r"extras\['head'\] refused the state in .*: no more"),
        (KeyboardInterrupt, KeyboardInterrupt, "no more"),
        (None, ValueError, r"extras\['head'\] did not take over the state"),
    ],
)
def test_a_part_that_fails_takes_all_the_others_back_with_it(tmp_path, error, raised, message):
    """The last part fails after all the others have taken their new state."""
    first, second = parts_of(FULL), parts_of(FULL, seed=1)
    go_on(first, islice(groups_of_digits(), 4))
    go_on(second, islice(groups_of_digits(), 2))
    first["extras"]["head"], second["extras"]["head"] = nn.Linear(2, 1), Stubborn(error)
    save_training(tmp_path / "run.pt", **first, updates_done=4)
    before = states_of(second)
    with pytest.raises(raised, match=message):
        load_training(tmp_path / "run.pt", **second)
    assert_same_state(states_of(second), before)
    assert_same_state(second["optimizer"].state_dict(), before["optimizer"])


def test_a_part_that_changes_what_it_was_given_is_noticed(tmp_path):
    """It is given a copy: otherwise it would be compared with itself."""

    class Counter:
        def __init__(self):
            self.count = {"n": 1}

        def state_dict(self) -> dict[str, int]:
            return self.count

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state
            self.count["n"] += 1

    parts = parts_of("SGD alone")
    save_training(tmp_path / "run.pt", **parts, extras={"counter": Counter()}, updates_done=0)
    with pytest.raises(ValueError, match=r"extras\['counter'\] did not take over the state"):
        load_training(tmp_path / "run.pt", **parts, extras={"counter": Counter()})


def test_a_file_that_was_cut_short_or_is_another_changes_nothing(saved_run, tmp_path):
    content = saved_run.read_bytes()
    parts = parts_of(FULL, seed=1)
    before = states_of(parts)
    for length in (0, 10, len(content) // 2, len(content) - 1):
        saved_run.write_bytes(content[:length])
        with pytest.raises(ValueError, match="can't be read"):
            load_training(saved_run, **parts)
    for other in (parts["model"].state_dict(), {"format": "course_lib.training 1"}):  # the second lacks the rest
        torch.save(other, saved_run)
        with pytest.raises(ValueError, match="was not written by save_training"):
            load_training(saved_run, **parts)
    with pytest.raises(FileNotFoundError):
        load_training(tmp_path / "none.pt", **parts)
    assert_same_state(states_of(parts), before)


def test_a_file_with_a_changed_byte_is_refused_and_changes_nothing(saved_run):
    content = bytearray(saved_run.read_bytes())
    parts = parts_of(FULL, seed=1)
    values = next(iter(torch.load(saved_run, weights_only=True)["states"]["model"].values())).numpy().tobytes()
    before = states_of(parts)
    content[content.index(values)] ^= 1  # in a number of a tensor, where no reader stumbles over it
    saved_run.write_bytes(content)
    with pytest.raises(ValueError, match=r"can't be read.* has changed since it was written"):
        load_training(saved_run, **parts)
    assert_same_state(states_of(parts), before)


def test_a_file_cannot_run_code(tmp_path):
    class Attack:
        def __reduce__(self) -> tuple:
            return (os.mkdir, (str(tmp_path / "was here"),))

    torch.save({"format": "course_lib.training 1", "states": Attack()}, tmp_path / "run.pt")
    with pytest.raises(ValueError, match="weights_only=True"):
        load_training(tmp_path / "run.pt", **parts_of("SGD alone"))
    assert not (tmp_path / "was here").exists()


def test_a_run_of_another_device_is_refused(saved_run, monkeypatch):
    """The random state of a GPU can't be given to a CPU. The file's side is tested on a fake device."""
    states = {"cpu": torch.get_rng_state(), "cuda:0": torch.get_rng_state()}
    monkeypatch.setattr(training, "_random_states", lambda model: states)
    with pytest.raises(ValueError, match="random state was saved for cpu; given is cpu, cuda:0"):
        load_training(saved_run, **parts_of(FULL, seed=1))


# Bad arguments.


def foreign_scheduler(parts: dict[str, Any]) -> Any:
    return StepLR(torch.optim.SGD(noisy_net().parameters(), lr=0.1), 1)


WRONG = {
    "model": (lambda _: "net", TypeError, "model must be a torch.nn.Module; got str"),
    "optimizer": (lambda _: None, TypeError, "optimizer must have state_dict and load_state_dict; got NoneType"),
    "optimizer of another model": (
        lambda _: torch.optim.SGD(noisy_net().parameters(), lr=0.1),
        ValueError,
        "optimizer holds none of model's parameters",
    ),
    "optimizer that is none": (lambda _: nn.Linear(1, 1), TypeError, "must be a torch.optim.Optimizer; got Linear"),
    "optimizer's class": (lambda _: torch.optim.SGD, TypeError, "optimizer must have state_dict .* got type"),
    "scheduler": (lambda _: 0.1, TypeError, "scheduler must have state_dict and load_state_dict; got float"),
    "scheduler of another optimizer": (foreign_scheduler, ValueError, "scheduler belongs to another optimizer"),
    "scaler": (lambda _: 4.0, TypeError, "scaler must be a torch.amp.GradScaler, or None; got float"),
    "extras": (lambda _: [nn.Linear(1, 1)], TypeError, "extras must be a dict .* got list"),
    "extras without a state": (lambda _: {"seed": 3}, TypeError, r"extras\['seed'\] must have state_dict"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parts_are_named_by_both(tmp_path, name):
    make, error, message = WRONG[name]
    parts = parts_of("SGD alone")
    save_training(tmp_path / "run.pt", **parts, updates_done=0)
    parts[name.partition(" ")[0].partition("'")[0]] = make(parts)
    for call in (partial(save_training, updates_done=1), load_training):
        with pytest.raises(error, match=message):
            call(tmp_path / "run.pt", **parts)


@pytest.mark.parametrize(("given", "error"), [(-1, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)])
def test_updates_done_is_a_whole_number(tmp_path, given, error):
    with pytest.raises(error, match="updates_done must be"):
        save_training(tmp_path / "run.pt", **parts_of("SGD alone"), updates_done=given)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_file_and_must_exist(tmp_path):
    parts = parts_of("SGD alone")
    with pytest.raises(ValueError, match=r"path must name a file; .* is a folder"):
        save_training(tmp_path, **parts, updates_done=0)
    with pytest.raises(FileNotFoundError, match=r"the folder of path does not exist: .*missing"):
        save_training(tmp_path / "missing" / "run.pt", **parts, updates_done=0)

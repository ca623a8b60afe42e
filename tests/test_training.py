"""Runs: 200 accumulated updates lie on the full batch's curve, and a history does not depend on K."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from course_lib.accumulation import Update, update_parameters
from course_lib.batches import group_micro_batches, group_sizes, split_batch
from course_lib.datasets import load_digits, shuffled_batches
from course_lib.losses import cross_entropy_sum
from course_lib.models import dense_net
from course_lib.training import History, loss_gaps, train

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

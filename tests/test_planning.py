"""Plans: the exact boundary in few predictions, balanced steps, honest refusals, and the bytes that really happen."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib import planning
from course_lib.accumulation import update_parameters
from course_lib.architectures import build_preset
from course_lib.batches import batch_size, concatenate_batches, split_batch
from course_lib.datasets import load_digits
from course_lib.losses import cross_entropy_sum, token_cross_entropy_sum
from course_lib.memory import format_bytes, measure_memory, memory_budget, predict_memory
from course_lib.models import Block, SmallGPT, conv_net, dense_net
from course_lib.planning import BatchPlan, BudgetTooSmall, balanced_sizes, plan_batch, plan_from_predictions

MIB = 2**20


@dataclass(frozen=True)
class Report:
    """What a prediction says, as far as a plan reads it."""

    micro_batch_size: int
    at_peak: dict[str, int]
    scratch_bytes: int | None = None
    peak_moment: str = "the loss"
    assumptions: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())

    @property
    def needed_bytes(self) -> int:
        return self.peak_bytes + (self.scratch_bytes or 0)


@dataclass
class Device:
    """A made-up model: its peak is the largest of some moments, and the sizes that were asked for are kept.

    A moment is (bytes for each sample, bytes that stand, whether gradients are alive in a single pass too).
    """

    effective: int
    moments: tuple[tuple[int, int, bool], ...] = ((10, 0, False),)
    parameters: int = 100
    gradients: int = 10
    rounding: int = 1
    scratch: int | None = None
    asked: list[int] = field(default_factory=list)

    def __call__(self, size: int) -> Report:
        self.asked.append(size)
        return self.report(size)

    def report(self, size: int) -> Report:
        return max((self._at(size, *moment) for moment in self.moments), key=lambda report: report.peak_bytes)

    def _at(self, size: int, each: int, standing: int, always: bool) -> Report:
        parts = dict.fromkeys(("buffers", "optimizer_state", "inputs"), 0)
        parts |= {"parameters": self.parameters, "temporaries": standing}
        parts["gradients"] = self.gradients if size < self.effective or always else 0
        parts["activations"] = -(-size * each // self.rounding) * self.rounding
        return Report(size, parts, self.scratch)

    def need(self, size: int) -> int:
        return self.report(size).needed_bytes

    def plan(self, budget: int, **settings) -> BatchPlan:
        return plan_from_predictions(self, self.effective, budget=budget, **settings)


# Balanced steps


@pytest.mark.parametrize(
    ("samples", "steps", "sizes"),
    [(9, 3, [3, 3, 3]), (10, 3, [4, 3, 3]), (64, 4, [16] * 4), (5, 3, [2, 2, 1]), (7, 7, [1] * 7), (7, 1, [7])],
)
def test_steps_differ_by_one_sample_at_most(samples, steps, sizes):
    assert balanced_sizes(samples, steps) == sizes


def test_more_steps_than_samples_are_refused():
    with pytest.raises(ValueError, match="accumulation_steps must be at most 3, one sample a step; got 4"):
        balanced_sizes(3, 4)
    with pytest.raises(TypeError, match="effective_batch_size"):
        balanced_sizes(3.5, 1)


def test_nine_samples_in_at_most_fours_are_three_threes():
    device = Device(9)
    plan = device.plan(device.need(4))
    assert (plan.largest_micro_batch_size, plan.micro_batch_size, plan.accumulation_steps) == (4, 3, 3)
    assert plan.micro_batch_sizes == [3, 3, 3]
    assert plan.peak_bytes == device.need(3)
    assert plan.largest_peak_bytes == device.need(4)


def test_no_micro_batch_has_one_sample_where_another_cut_takes_as_few_steps():
    for effective in range(2, 60):
        device = Device(effective)
        for largest in range(2, effective // 2 + 1):
            plan = device.plan(device.need(largest))
            assert sum(plan.micro_batch_sizes) == effective
            assert max(plan.micro_batch_sizes) <= largest
            assert len(plan.micro_batch_sizes) == -(-effective // largest)
            # 2 k + 1 samples in at most twos: one is left over whatever is done.
            assert min(plan.micro_batch_sizes) > 1 or (largest == 2 and effective % 2)


# The boundary


def random_device(rng: random.Random, effective: int, rounding: int = 1) -> Device:
    scale = 10 ** rng.randint(1, 7)
    moments = [
        (rng.randint(1, 3 * scale) + rounding - 1, rng.randint(0, 10 ** rng.randint(1, 9)), rng.random() < 0.3)
        for _ in range(rng.randint(1, 5))
    ]
    moments.append((0, rng.randint(0, 10**9), True))  # the optimizer's step
    size = rng.randint(10**3, 10**9)
    return Device(effective, tuple(moments), parameters=size, gradients=size, rounding=rounding)


def check_boundary(device: Device, budget: int) -> BatchPlan:
    plan = device.plan(budget)
    half = -(-device.effective // 2)
    if device.need(device.effective) <= budget:
        assert plan.largest_micro_batch_size == device.effective
        assert plan.next_micro_batch_size is None
    else:
        assert device.need(plan.largest_micro_batch_size) <= budget < device.need(plan.next_micro_batch_size)
        usual = plan.largest_micro_batch_size + 1
        assert plan.next_micro_batch_size == (usual if usual <= half else device.effective)
    assert len(device.asked) == len(set(device.asked)) == plan.num_predictions
    return plan


def test_the_largest_size_that_fits_is_found_for_every_size_and_every_budget():
    for effective in range(1, 40):
        for gradients in (0, 30, 1000):
            device = Device(effective, ((10, 0, False), (3, 60, False), (0, 25, True)), gradients=gradients)
            needs = sorted({device.need(size) for size in range(1, effective + 1)})
            for budget in (need + shift for need in needs for shift in (0, 5)):
                if budget >= min(device.need(1), device.need(effective)):
                    check_boundary(Device(effective, device.moments, gradients=gradients), budget)


@pytest.mark.parametrize("rounding", [1, 512], ids=["exact", "in blocks of 512 bytes"])
def test_twelve_predictions_are_enough_for_peaks_of_several_moments(rounding):
    rng, most = random.Random(rounding), 0
    for _ in range(2000):
        effective = rng.choice([rng.randint(1, 64), rng.randint(64, 1024), rng.randint(1024, 50_000)])
        device = random_device(rng, effective, rounding)
        budget = device.need(rng.randint(1, -(-effective // 2))) + rng.randint(0, 1000)
        most = max(most, check_boundary(device, budget).num_predictions)
    assert most <= 12


def test_a_peak_that_climbs_in_stairs_is_searched_by_halving_and_the_end_is_exact():
    rng = random.Random(0)
    for _ in range(300):
        device = Device(rng.randint(2, 5000), ((10, 0, False),), rounding=rng.choice([97, 1000, 20_000]))
        plan = check_boundary(device, device.need(rng.randint(1, -(-device.effective // 2))))
        assert plan.num_predictions <= 30


def test_four_predictions_are_enough_for_a_straight_line():
    device = Device(100_000, ((7919, 0, False),))
    plan = device.plan(device.need(16_384) + 100)
    assert plan.largest_micro_batch_size == 16_384
    assert plan.num_predictions <= 5  # the whole, the smallest, the largest, the next, and the balanced size


def test_a_size_between_the_half_and_the_whole_is_no_candidate():
    device = Device(10)
    plan = device.plan(device.need(8))
    assert (plan.largest_micro_batch_size, plan.next_micro_batch_size) == (5, 10)
    assert device.need(10) > device.need(8)


def test_a_batch_of_one_sample_is_one_pass():
    device = Device(1)
    plan = device.plan(device.need(1))
    assert (plan.micro_batch_sizes, plan.num_predictions, plan.warnings) == ([1], 1, ())


def test_kernel_scratch_needs_room_too():
    device = Device(64, scratch=25)
    plan = device.plan(device.need(8))
    assert plan.largest_micro_batch_size == 8
    assert plan.peak_bytes == device.report(8).peak_bytes + 25
    assert "kernel scratch" in str(plan)


# Where one pass needs less than two


def test_a_batch_that_fits_whole_is_not_split_though_halves_would_need_more():
    device = Device(64, gradients=10_000)
    budget = device.need(64)
    assert device.need(1) > budget
    plan = device.plan(budget)
    assert plan.micro_batch_sizes == [64]
    assert (plan.next_micro_batch_size, plan.next_peak_bytes) == (None, None)
    assert sorted(device.asked) == [1, 32, 64]


# Refusals


def test_a_budget_under_the_floor_is_refused_with_the_floor_by_category():
    device = Device(64, parameters=700, gradients=300)
    with pytest.raises(BudgetTooSmall) as caught:
        device.plan(device.need(1) - 1)
    error = caught.value
    assert isinstance(error, ValueError)
    assert (error.budget_bytes, error.floor_bytes) == (1009, 1010)
    assert error.floor_at_peak["parameters"] == 700
    assert (error.changes, error.smallest_change) == ((), None)
    assert "budget 1009 B is 1 B too small for any micro-batch: even with micro-batches of one sample" in str(error)
    assert "(parameters 700 B, gradients 300 B, activations 10 B)" in str(error)


@pytest.mark.parametrize(("budget", "kind"), [("much", ValueError), (0, ValueError), (1.5, TypeError)])
def test_a_budget_that_is_no_size_is_refused(budget, kind):
    with pytest.raises(kind, match="budget="):
        Device(4).plan(budget)


# Words


def test_a_plan_prints_what_to_set_the_boundary_and_the_floor():
    device = Device(64, ((MIB, 0, False),), parameters=3 * MIB, gradients=3 * MIB)
    plan = device.plan("20 MiB")
    assert str(plan) == "\n".join(
        [
            "micro-batch size           13",
            "accumulation steps          5  64 = 4 x 13 + 1 x 12",
            "-----------------------------",
            "parameters            3.0 MiB",
            "gradients             3.0 MiB",
            "activations          13.0 MiB",
            "predicted peak       19.0 MiB  the loss",
            "budget               20.0 MiB",
            "-----------------------------",
            "micro-batches of 1    7.0 MiB  the floor",
            "micro-batches of 14  20.0 MiB  the largest that fits",
            "micro-batches of 15  21.0 MiB  too much by 1.0 MiB",
        ]
    )
    assert repr(plan) == "BatchPlan(64 = 4 x 13 + 1 x 12, peak 19.0 MiB of 20.0 MiB, 5 predictions)"


# Real models: what a plan says is what happens


def digits(num_samples: int):
    """Digits in tensors of their own: a slice of the data set would keep all of it, and count as all of it."""
    return tuple(part.clone() for part in load_digits().first(num_samples))


def dense_case():
    model = dense_net(hidden=(64,))
    return model, digits(96), cross_entropy_sum, torch.optim.SGD(model.parameters(), lr=0.1)


def conv_case():
    model = conv_net(channels=8, depth=2)
    return model, digits(48), cross_entropy_sum, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def gpt_case():
    model = SmallGPT(27, context=16, width=32, heads=2, depth=2)
    tokens = torch.randint(27, (40, 16), generator=torch.Generator().manual_seed(0))
    return model, (tokens, tokens), token_cross_entropy_sum, torch.optim.AdamW(model.parameters())


CASES = {"dense": dense_case, "convolutions": conv_case, "GPT": gpt_case}


def two_updates(model, micro_batches, loss_sum, optimizer):
    count = getattr(loss_sum, "count", batch_size)
    for _ in range(2):
        update_parameters(model, optimizer, micro_batches, loss_sum, count)


def budget_for(size: int, model, batch, loss_sum, optimizer) -> int:
    return predict_memory(model, batch, loss_sum, optimizer, micro_batch_size=size).peak_bytes


def runs_within(budget: int, case, size: int) -> bool:
    """Say whether two updates in micro-batches of `size` stay within the budget, by running them."""
    model, batch, loss_sum, optimizer = case()
    try:
        with memory_budget(budget, model, optimizer, batch):
            two_updates(model, split_batch(batch, size), loss_sum, optimizer)
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.parametrize("name", CASES)
def test_the_largest_size_runs_within_the_budget_and_one_more_does_not(name):
    case = CASES[name]
    model, batch, loss_sum, optimizer = case()
    floor = budget_for(1, model, batch, loss_sum, optimizer)
    whole = budget_for(batch_size(batch), model, batch, loss_sum, optimizer)
    for part in (0.05, 0.3):
        budget = floor + int(part * (whole - floor))
        plan = plan_batch(model, batch, loss_sum, optimizer, budget=budget)
        assert 1 <= plan.largest_micro_batch_size < batch_size(batch) // 2
        assert runs_within(budget, case, plan.largest_micro_batch_size)
        assert not runs_within(budget, case, plan.largest_micro_batch_size + 1)
        assert plan.num_predictions <= 12


@pytest.mark.parametrize("name", CASES)
def test_the_planned_micro_batches_reach_the_predicted_peak_to_the_byte(name):
    model, batch, loss_sum, optimizer = CASES[name]()
    budget = budget_for(8, model, batch, loss_sum, optimizer)
    plan = plan_batch(model, batch, loss_sum, optimizer, budget=budget)
    assert (plan.largest_micro_batch_size, plan.effective_batch_size) == (8, batch_size(batch))
    micro_batches = plan.split(batch)
    assert [batch_size(micro_batch) for micro_batch in micro_batches] == plan.micro_batch_sizes
    two_updates(model, micro_batches, loss_sum, optimizer)
    with measure_memory(model, optimizer, batch) as meter:
        two_updates(model, micro_batches, loss_sum, optimizer)
    assert meter.peak_bytes == plan.peak_bytes
    assert {name: size for name, size in meter.at_peak.items() if size} == {
        name: size for name, size in plan.at_peak.items() if size
    }


def test_a_single_larger_micro_batch_needs_no_more_than_several_would():
    model, batch, loss_sum, optimizer = conv_case()
    batch = digits(50)
    plan = plan_batch(model, batch, loss_sum, optimizer, budget=budget_for(8, model, batch, loss_sum, optimizer))
    assert plan.sentence == "50 = 1 x 8 + 6 x 7"
    two_updates(model, plan.split(batch), loss_sum, optimizer)
    with measure_memory(model, optimizer, batch) as meter:
        two_updates(model, plan.split(batch), loss_sum, optimizer)
    # It is the first: no gradients wait while it passes. The prediction has two of its size.
    assert budget_for(7, model, batch, loss_sum, optimizer) <= meter.peak_bytes <= plan.peak_bytes


def test_the_effective_batch_is_all_there_in_order_and_of_the_same_structure():
    model, (inputs, targets), _, optimizer = dense_case()
    batch = {"images": inputs, "labels": [targets]}

    def loss_sum(model, micro_batch):
        return cross_entropy_sum(model, (micro_batch["images"], micro_batch["labels"][0]))

    budget = budget_for(7, model, batch, loss_sum, optimizer)
    plan = plan_batch(model, batch, loss_sum, optimizer, budget=budget)
    assert plan.sentence == "96 = 12 x 7 + 2 x 6"
    assert [batch_size(micro_batch) for micro_batch in plan.split(batch)] == plan.micro_batch_sizes
    joined = concatenate_batches(plan.split(batch))
    assert torch.equal(joined["images"], inputs)
    assert torch.equal(joined["labels"][0], targets)
    with pytest.raises(ValueError, match="batch must have 96 samples, as planned; it has 95"):
        plan.split(inputs[:95])


def test_a_plan_leaves_model_optimizer_and_random_state_as_they_were():
    model, batch, loss_sum, optimizer = gpt_case()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    plan_batch(model, batch, loss_sum, optimizer, budget="1 MiB")
    with pytest.raises(BudgetTooSmall):
        plan_batch(model, batch, loss_sum, optimizer, budget="100 KiB")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {type(module).__module__ for module in model.modules()} <= {"course_lib.models", *_TORCH_MODULES}
    assert all(type(block) is type(model.blocks[0]) is Block for block in model.blocks)


_TORCH_MODULES = (
    {type(module).__module__ for module in dense_net().modules()}
    | {nn.Embedding.__module__}
    | {
        nn.LayerNorm.__module__,
        nn.Dropout.__module__,
    }
)


def test_an_interrupt_during_a_plan_leaves_the_blocks_as_they_were():
    model, batch, _, optimizer = gpt_case()
    passes = []

    def interrupted(model, micro_batch):
        passes.append(1)
        if len(passes) > 6 and type(model.blocks[0]) is not Block:  # inside the prediction with checkpoints
            raise KeyboardInterrupt
        return token_cross_entropy_sum(model, micro_batch)

    with pytest.raises(KeyboardInterrupt):
        plan_batch(model, batch, interrupted, optimizer, budget="100 KiB")
    assert all(type(block) is Block for block in model.blocks)


def test_progress_is_told_before_each_prediction():
    told = []
    parts = dense_case()
    plan = plan_batch(*parts, budget=budget_for(5, *parts), progress=lambda done, size: told.append((done, size)))
    assert plan.num_predictions > 3
    assert [done for done, _ in told] == list(range(plan.num_predictions))
    assert {size for _, size in told} == set(plan.reports)
    with pytest.raises(TypeError, match="progress must be a function"):
        plan_batch(*parts, budget="4 MiB", progress=True)


def test_a_plan_for_another_device_follows_its_rules():
    on_cpu, on_cuda = (plan_batch(*dense_case(), budget="4 MiB", device=device) for device in ("cpu", "cuda"))
    assert {report.device for report in on_cuda.reports.values()} == {"cuda"}
    assert (on_cpu.peak_bytes % 512 > 0, on_cuda.peak_bytes % 512) == (True, 0)  # sizes are rounded up there


def test_a_model_of_many_parameters_is_better_not_split():
    model = dense_net(hidden=(512, 512))
    batch, optimizer = digits(8), torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_batch(model, batch, cross_entropy_sum, optimizer, budget="64 MiB")
    one, two = plan.reports[8].peak_bytes, plan.reports[4].peak_bytes
    assert (plan.accumulation_steps, plan.next_micro_batch_size) == (1, None)
    assert two > one
    assert plan.warnings == (
        f"two micro-batches would need more than one: {format_bytes(two)} against {format_bytes(one)}, "
        "since the first one's gradients stay alive",
    )
    assert "note: two micro-batches would need more" in str(plan)
    # And it happens.
    peaks = {}
    for size in (8, 4):
        with measure_memory(model, optimizer, batch) as meter:
            update_parameters(model, optimizer, split_batch(batch, size), cross_entropy_sum)
        peaks[size] = meter.peak_bytes
    assert (peaks[8], peaks[4]) == (one, two)


def normalised_net() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))


def test_samples_that_meet_in_a_loss_or_in_an_unknown_layer_are_found_on_request():
    class Centred(nn.Module):
        def forward(self, features):
            return features - features.mean(dim=0)

    def spread_sum(model, micro_batch):
        inputs, targets = micro_batch
        scores = model(inputs)
        return cross_entropy_sum(nn.Identity(), (scores, targets)) + 100 * len(scores) * scores.var()

    batch = digits(64)
    for middle, loss_sum, words in (
        (nn.ReLU(), cross_entropy_sum, []),
        (Centred(), cross_entropy_sum, ["layer 2 (Centred) looks across samples"]),
        (nn.ReLU(), spread_sum, ["the loss spread_sum is not a sum over samples"]),
    ):
        torch.manual_seed(0)  # what is below about 1e-5 of the loss is taken for rounding, as find_interactions says
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), middle, nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        budget = budget_for(8, model, batch, loss_sum, optimizer)
        plan = plan_batch(model, batch, loss_sum, optimizer, budget=budget, find_interactions=True)
        assert [warning.partition(":")[0] for warning in plan.warnings] == words
        assert plan_batch(model, batch, loss_sum, optimizer, budget=budget).warnings == ()
        assert plan_batch(model, batch, loss_sum, optimizer, budget="1 GiB", find_interactions=True).warnings == ()
    with pytest.raises(ValueError, match="find_interactions runs the model; batch must hold data"):
        plan_batch(*build_preset("U-Net").parts, budget="8 GiB", find_interactions=True)


def test_batch_norm_is_warned_of_and_never_planned_for_one_sample():
    model, batch = normalised_net(), digits(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = budget_for(8, model, batch, cross_entropy_sum, optimizer)
    plan = plan_batch(model, batch, cross_entropy_sum, optimizer, budget=budget)
    assert (plan.micro_batch_size, plan.floor_micro_batch_size) == (8, 2)
    assert plan.warnings == (
        "BatchNorm would see 8 samples at a time, not 64: the update is not that of the whole batch",
    )
    with pytest.raises(BudgetTooSmall, match="even with micro-batches of 2 the peak"):
        plan_batch(model, batch, cross_entropy_sum, optimizer, budget=plan.floor_bytes - 1)
    assert plan_batch(model, batch, cross_entropy_sum, optimizer, budget="1 GiB").warnings == ()  # one pass
    frozen = plan_batch(model.eval(), batch, cross_entropy_sum, optimizer, budget=budget)
    assert (frozen.warnings, frozen.floor_micro_batch_size) == ((), 1)


def test_a_plan_says_that_an_lstm_takes_more_than_was_predicted():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 10)

        def forward(self, sequences):
            return self.head(self.body(sequences)[0][:, -1])

    model, batch = Reader(), (torch.randn(32, 20, 32), torch.randint(10, (32,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_batch(model, batch, cross_entropy_sum, optimizer, budget="2 MiB")
    assert [warning.partition(":")[0] for warning in plan.warnings] == ["LSTM (body)"]
    assert "note: LSTM (body): its kernel takes scratch memory that is not in the peak" in str(plan)


def test_the_smallest_change_that_helps_is_named_and_does_help():
    case = gpt_case()
    model, batch, loss_sum, _ = case
    floor = budget_for(1, *case)
    with pytest.raises(BudgetTooSmall) as caught:
        plan_batch(*case, budget=int(0.65 * floor))
    error = caught.value
    assert [change.name for change in error.changes] == [
        "checkpoint the repeated blocks",
        "sequences of 8 instead of 16",
        "plain SGD, which keeps no state",
    ]
    assert error.smallest_change is error.changes[2]
    assert "The smallest change that helps: plain SGD, which keeps no state" in str(error)
    leaner = torch.optim.SGD(model.parameters(), lr=0.1)
    two_updates(model, split_batch(batch, 1), loss_sum, leaner)
    with measure_memory(model, leaner, batch) as meter:
        two_updates(model, split_batch(batch, 1), loss_sum, leaner)
    assert meter.peak_bytes == error.smallest_change.peak_bytes <= int(0.65 * floor)


class RecomputedBlock(Block):
    """A block as one would write it to save memory."""

    def forward(self, stream):
        return checkpoint(super().forward, stream, use_reentrant=False)


def test_checkpointing_as_a_change_has_the_bytes_of_a_model_written_that_way():
    case = gpt_case()
    model, batch, loss_sum, optimizer = case
    floor = budget_for(1, *case)
    with pytest.raises(BudgetTooSmall) as caught:
        plan_batch(*case, budget=floor - 1)
    change = caught.value.smallest_change
    assert change.name == "checkpoint the repeated blocks"
    for block in model.blocks:
        block.__class__ = RecomputedBlock
    two_updates(model, split_batch(batch, 1), loss_sum, optimizer)
    with measure_memory(model, optimizer, batch) as meter:
        two_updates(model, split_batch(batch, 1), loss_sum, optimizer)
    assert meter.peak_bytes == change.peak_bytes < floor


def test_changes_that_a_model_does_not_take_are_left_out_without_a_word(caplog, capfd):
    model, batch = dense_net(hidden=(64,)), digits(8)  # 4 x 4 pixels do not fit its first layer
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(BudgetTooSmall) as caught:
        plan_batch(model, batch, cross_entropy_sum, optimizer, budget=4096)
    assert [change.name for change in caught.value.changes] == ["plain SGD, which keeps no state"]
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_where_no_change_is_enough_alone_all_together_are_tried():
    with pytest.raises(BudgetTooSmall) as caught:
        plan_batch(*gpt_case(), budget=4096)
    error = caught.value
    assert error.smallest_change is None
    assert error.changes[-1].name == "all of these together"
    assert error.changes[-1].peak_bytes < min(change.peak_bytes for change in error.changes[:-1])
    assert "None of these is enough:" in str(error)


def test_sequences_are_halved_with_their_targets_where_they_have_one_length():
    tokens, labels = torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    shorter, how = planning._shorter_inputs({"tokens": tokens, "targets": tokens, "labels": labels})
    assert {name: tuple(part.shape) for name, part in shorter.items()} == {
        "tokens": (2, 8),
        "targets": (2, 8),
        "labels": (2,),
    }
    assert how == "sequences of 8 instead of 16"
    assert planning._shorter_inputs((tokens, tokens[:, :5])) == (None, "")


def test_images_are_made_smaller_with_their_targets_and_other_batches_left_alone():
    images, maps, labels = torch.zeros(2, 3, 8, 6), torch.zeros(2, 8, 6), torch.zeros(2)
    shorter, how = planning._shorter_inputs((images, maps))
    assert [tuple(part.shape) for part in shorter] == [(2, 3, 4, 3), (2, 4, 3)]
    assert how == "images of 4 x 3 instead of 8 x 6"
    assert [tuple(part.shape) for part in planning._shorter_inputs((images, labels))[0]] == [(2, 3, 4, 3), (2,)]
    assert planning._shorter_inputs((torch.zeros(2, 64), labels)) == (None, "")  # 64 features are no sequence
    assert planning._shorter_inputs((images, torch.zeros(2, 5, 5))) == (None, "")


def test_a_preset_is_planned_without_its_bytes():
    plan = plan_batch(*build_preset("U-Net").parts, budget="8 GiB")
    assert plan.micro_batch_sizes == [8, 8]
    assert plan.largest_peak_bytes <= 8 * 2**30 < plan.next_peak_bytes
    assert plan.num_predictions <= 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": (torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))}, "0 samples"),
        ({"optimizer": torch.optim.SGD(dense_net().parameters(), lr=0.1)}, "optimizer"),
        ({"loss_sum": lambda model, micro_batch: model(micro_batch[0])}, "loss"),
    ],
)
def test_what_cannot_be_predicted_cannot_be_planned(change, message):
    parts = dict(zip(("model", "batch", "loss_sum", "optimizer"), dense_case(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        plan_batch(*parts.values(), budget="1 GiB")

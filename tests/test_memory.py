"""Bytes measured and limited: the count against PyTorch's allocator trace, the categories against hand derivations."""

import copy
import gc
import re
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.utils.memory import find_executable_batch_size, should_reduce_batch_size
from lightning.pytorch.utilities.memory import is_cuda_out_of_memory, is_oom_error
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from course_lib.memory import CATEGORIES, format_bytes, measure_memory, memory_budget, parse_bytes
from course_lib.memory import measured as memory

# ---------------------------------------------------------------------------------------------------------------------
# Models and updates


class Attention(nn.Module):
    """A causal attention layer between an embedding and a head: tokens (B, T) to scores (B, T, vocab_size)."""

    def __init__(self, vocab_size):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab_size, 32), nn.LayerNorm(32)
        self.mix, self.head = nn.Linear(32, 96), nn.Linear(32, vocab_size)

    def forward(self, tokens):
        stream = self.embed(tokens)
        parts = self.mix(self.norm(stream)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(stream + mixed)


def build(kind):
    """Return (model, batch) of 8 samples; the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "dense":
            model = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
            return model, (torch.randn(8, 48), torch.randint(10, (8,)))
        if kind.startswith("attention"):
            # With many scores the peak is in the loss; with few it is inside the attention kernel.
            vocab_size = 4 if kind == "attention, few scores" else 256
            return Attention(vocab_size), (torch.randint(vocab_size, (8, 24)), torch.randint(vocab_size, (8, 24)))
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 10))
        return model, (torch.randn(8, 1, 8, 8), torch.randint(10, (8,)))


def update(model, optimizer, batch, accumulation_steps=1, *, set_to_none=True):
    for inputs, targets in zip(*(part.chunk(accumulation_steps) for part in batch), strict=True):
        scores = model(inputs)
        loss = functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum") / targets.numel()
        (loss / accumulation_steps).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)


def profiled_peak(run, resident_bytes, folder: Path):
    """The oracle: what PyTorch's CPU allocator says."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        run()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return resident_bytes + memory._allocator_peak_of_trace(folder / "trace.json")


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_of(model, optimizer):
    """Everything an update may change, copied."""
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def assert_same_state(left, right):
    flat_left, flat_right = (list(memory._tensors_in(list(side))) for side in (left, right))
    assert len(flat_left) == len(flat_right)
    assert all(torch.equal(a, b) for a, b in zip(flat_left, flat_right, strict=True))
    assert str(left[1]["param_groups"]) == str(right[1]["param_groups"])


def installed_hooks(model):
    """Everything a block may leave behind, counted."""
    return (
        len(_global_optimizer_pre_hooks),
        len(_global_optimizer_post_hooks),
        sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()),
        len(_get_current_dispatch_mode_stack()),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Sizes as text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1, 1),
        (4096, 4096),
        (np.int64(4096), 4096),
        ("64 MiB", 64 * 2**20),
        ("64mib", 64 * 2**20),
        (" 1.5 GiB ", 3 * 2**29),
        ("2 KiB", 2048),
        ("3 KB", 3000),
        ("0.5 MB", 500_000),
        (".5 GB", 500_000_000),
        ("7 B", 7),
    ],
)
def test_a_size_is_read_from_a_number_or_text(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["64 apples", "", "MiB", "nan", "nan MiB", "inf MiB", "-1 MiB", "64 iB", "64", "1 2 B"]
)
def test_text_that_is_no_size_is_refused_by_name(text):
    with pytest.raises(ValueError, match=rf"limit={re.escape(repr(text))} .*accepted"):
        memory_budget(text)


@pytest.mark.parametrize("size", [0, -5, "0 MiB", "0.2 B"])
def test_a_size_below_one_byte_is_refused_by_name(size):
    with pytest.raises(ValueError, match=r"limit=.* less than one byte"):
        memory_budget(size)


@pytest.mark.parametrize("size", [True, False, None, 1.5, float("nan"), [64], torch.ones(2)])
def test_a_size_of_another_type_is_refused_by_name(size):
    with pytest.raises(TypeError, match=r"limit=[\s\S]*accepted"):
        memory_budget(size)


def test_bytes_are_written_in_the_largest_fitting_unit():
    sizes = (0, 1023, 1024, 2**20 - 1, 64 * 2**20, 3 * 2**40)
    assert [format_bytes(size) for size in sizes] == ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "64.0 MiB", "3072.0 GiB"]
    assert format_bytes(12 * 2**20, 2) == "12.00 MiB"


# ---------------------------------------------------------------------------------------------------------------------
# The count against the allocator


@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
@pytest.mark.parametrize("kind", ["dense", "attention"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_peak_equals_the_allocator_trace(kind, make, accumulation_steps, tmp_path):
    model, batch = build(kind)
    optimizer = make(model.parameters(), lr=1e-3)
    update(model, optimizer, batch, accumulation_steps)
    with measure_memory(model, optimizer, batch) as meter:
        update(model, optimizer, batch, accumulation_steps)
    resident = num_bytes([*model.parameters(), *batch, *memory._tensors_in(list(optimizer.state.values()))])
    expected = profiled_peak(lambda: update(model, optimizer, batch, accumulation_steps), resident, tmp_path)
    assert abs(meter.peak_bytes - expected) <= 64


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("kind", ["convolution", "attention, few scores"])
def test_where_kernels_take_scratch_it_is_what_the_allocator_says_more(kind, accumulation_steps, tmp_path):
    model, batch = build(kind)
    optimizer = torch.optim.SGD(model.parameters())
    update(model, optimizer, batch)
    with measure_memory(model, optimizer, batch, scratch=True) as meter:
        update(model, optimizer, batch, accumulation_steps)
    resident = num_bytes([*model.parameters(), *batch])
    expected = profiled_peak(lambda: update(model, optimizer, batch, accumulation_steps), resident, tmp_path)
    assert meter.scratch_bytes > 500
    assert meter.peak_bytes <= expected <= meter.peak_bytes + meter.scratch_bytes + 64


def test_scratch_is_none_unless_asked_for_and_next_to_nothing_in_a_dense_layer():
    layer, inputs = nn.Linear(64, 64), torch.ones(8, 64)
    with measure_memory(layer, inputs) as plain:
        layer(inputs).exp().sum().backward()
    with measure_memory(layer, inputs, scratch=True) as profiled:
        layer.zero_grad()  # memory from before the trace, given back in it: not scratch
        layer(inputs).exp().sum().backward()
    assert plain.scratch_bytes is None
    assert profiled.scratch_bytes <= 64


def test_the_trace_adapter_reads_what_this_version_of_torch_writes(tmp_path):
    before = torch.empty(5_000_000)

    def run():
        nonlocal before
        before = None  # given back in the trace, but not taken in it
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(100)
        del second, third

    assert profiled_peak(run, 0, tmp_path) == 1500 * 4


def test_what_an_earlier_trace_saw_taken_is_no_gain_when_a_later_one_sees_it_given_back(tmp_path):
    kept = []
    profiled_peak(lambda: kept.append(torch.empty(1000)), 0, tmp_path)

    def run():
        kept.clear()
        torch.empty(500)

    assert profiled_peak(run, 0, tmp_path) == 500 * 4


def test_profiling_writes_nothing_to_stderr_and_keeps_back_nothing_else(capfd):
    before = torch.empty(100_000)
    with measure_memory(scratch=True):
        del before
        memory.os.write(2, b"[W CPUAllocator.cpp:245] Memory block of unknown size\nsomeone else's words\n")
    assert capfd.readouterr() == ("", "someone else's words\n")


def test_scratch_is_refused_while_a_profiler_runs():
    with measure_memory(scratch=True) as outer:
        with pytest.raises(RuntimeError, match="already running"), measure_memory(scratch=True):
            pass
        torch.ones(100)
    assert outer.peak_bytes == 400


# ---------------------------------------------------------------------------------------------------------------------
# Categories


def test_categories_of_a_dense_layer_derived_by_hand():
    layer, inputs = nn.Linear(3, 2, bias=False), torch.ones(5, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    with measure_memory(layer, optimizer, inputs) as meter:
        meter.mark("start")
        loss = layer(inputs).exp().sum()  # exp keeps its result: 5 x 2 numbers
        meter.mark("forward")
        loss.backward()
        meter.mark("backward")
        optimizer.step()
        meter.mark("step")
        optimizer.zero_grad()
        meter.mark("end")
    expected = {
        #           parameters, gradients, optimizer state, activations, inputs, temporaries (the loss)
        "start": (24, 0, 0, 0, 60, 0),
        "forward": (24, 0, 0, 40, 60, 4),
        "backward": (24, 24, 0, 0, 60, 4),
        "step": (24, 24, 24, 0, 60, 4),
        "end": (24, 0, 24, 0, 60, 4),
    }
    columns = ("parameters", "gradients", "optimizer_state", "activations", "inputs", "temporaries")
    found = {label: tuple(meter.timeline.by_category[c][i] for c in columns) for i, label in meter.timeline.marks}
    assert found == expected
    assert set(meter.timeline.by_category["buffers"]) == {0}


@pytest.mark.parametrize("kind", ["dense", "attention", "convolution"])
def test_parts_sum_to_the_peak_and_to_every_entry_of_the_timeline(kind):
    model, batch = build(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    with measure_memory(model, optimizer, batch) as meter:
        update(model, optimizer, batch, 2)
    timeline = meter.timeline
    assert tuple(meter.at_peak) == tuple(timeline.by_category) == CATEGORIES
    assert sum(meter.at_peak.values()) == meter.peak_bytes == max(timeline.live_bytes)
    assert [sum(parts) for parts in zip(*timeline.by_category.values(), strict=True)] == timeline.live_bytes
    assert min(map(min, timeline.by_category.values())) >= 0
    assert timeline.live_bytes[0] == num_bytes([*model.parameters(), *batch])
    state = num_bytes(memory._tensors_in(list(optimizer.state.values())))
    assert timeline.live_bytes[-1] == timeline.live_bytes[0] + state


def test_buffers_and_frozen_parameters_have_no_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].requires_grad_(False)
    with measure_memory(model) as meter:
        model(torch.ones(8, 4)).sum().backward()
    assert meter.timeline.by_category["buffers"][0] == 4 * 4 + 4 * 4 + 8  # mean, variance, num_batches_tracked
    assert meter.timeline.by_category["parameters"][0] == (16 + 4 + 4 + 4) * 4
    assert meter.timeline.by_category["gradients"][-1] == (4 + 4) * 4


def test_gradients_that_exist_or_are_set_by_hand_are_gradients():
    layer = nn.Linear(10, 10, bias=False)
    layer(torch.ones(1, 10)).sum().backward()
    with measure_memory(layer) as meter:
        layer.weight.grad = None
        layer.weight.grad = torch.ones(10, 10)
    assert meter.timeline.by_category["gradients"] == [400, 0, 400]
    optimizer = torch.optim.SGD(layer.parameters())
    with measure_memory(layer) as meter:
        layer.weight.grad = None
        layer.weight.grad = torch.ones(10, 10)
        optimizer.step()
        optimizer.zero_grad()  # gone before the end of the block
    assert max(meter.timeline.by_category["gradients"][1:]) == 400


def test_the_state_of_an_optimizer_made_inside_is_optimizer_state():
    layer = nn.Linear(10, 10, bias=False)
    with measure_memory(layer) as meter:
        optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
        layer(torch.ones(1, 10)).sum().backward()
        optimizer.step()
        del optimizer
        gc.collect()
    assert max(meter.timeline.by_category["optimizer_state"]) == 400
    assert meter.timeline.by_category["optimizer_state"][-1] == 0


def test_the_fresh_gradient_added_to_an_existing_one_is_temporary():
    layer, inputs = nn.Linear(100, 100, bias=False), torch.ones(1, 100)
    with measure_memory(layer, inputs) as meter:
        layer(inputs).sum().backward()
        meter.mark("second")
        layer(inputs).sum().backward()
    assert max(meter.timeline.by_category["gradients"]) == 40_000
    assert meter.at_peak["gradients"] == 40_000
    assert 40_000 <= meter.at_peak["temporaries"] <= 41_000


def test_inputs_may_be_nested_and_a_slice_counts_its_whole_storage():
    data = torch.zeros(100, 4)
    batch = {"left": [torch.zeros(2, 3), (torch.zeros(4, dtype=torch.int64),)], "right": data[:10]}
    with measure_memory(batch) as meter:
        batch["right"].add_(1)
    assert meter.at_peak["inputs"] == meter.peak_bytes == 24 + 32 + 1600


def test_a_plain_tensor_with_a_gradient_is_measured_too():
    weight = torch.ones(50, requires_grad=True)
    with measure_memory(weight) as meter:
        (weight * 2).sum().backward()
    assert meter.timeline.by_category["inputs"][-1] == 200
    assert meter.timeline.by_category["gradients"][-1] == 200
    with measure_memory(torch.optim.SGD([weight]), weight) as meter:
        pass
    assert (meter.at_peak["parameters"], meter.at_peak["gradients"], meter.at_peak["inputs"]) == (200, 200, 0)


def test_parameters_given_one_by_one_are_parameters():
    frozen = nn.Parameter(torch.ones(50), requires_grad=False)
    with measure_memory([frozen, nn.Parameter(torch.ones(10))]) as meter:
        pass
    assert meter.at_peak["parameters"] == meter.peak_bytes == 240


def test_activations_are_what_autograd_saves_counted_once():
    inputs = torch.ones(10, 10)
    weight = nn.Parameter(torch.ones(10, 10))
    with measure_memory(weight, inputs) as meter:
        hidden = (inputs @ weight).sigmoid()  # saved by sigmoid and, twice, by the product
        product = (hidden * hidden).sum()
        meter.mark("forward")
        del hidden, product
        del inputs
    index = meter.timeline.marks[0][0]
    assert meter.timeline.by_category["activations"][index] == 400
    assert meter.timeline.by_category["temporaries"][index] == 4
    assert meter.timeline.by_category["inputs"][index] == 400  # saved too, but inputs it stays


def test_under_hooks_of_someone_else_what_backward_reads_is_activations_and_its_gradients_are_not():
    weight, one = nn.Parameter(torch.ones(100)), torch.tensor(1.0)
    with measure_memory(weight) as meter, torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        (weight * 1).exp().sigmoid().sum().backward(one)
    assert max(meter.timeline.by_category["activations"]) == 800  # the results of exp and sigmoid
    assert max(meter.timeline.by_category["temporaries"]) >= 800


def test_addresses_used_again_do_not_mix_up_categories():
    layer, inputs = nn.Linear(100, 100, bias=False), torch.ones(1, 100)
    with measure_memory(layer, inputs) as meter:
        for _ in range(20):
            layer(inputs).sum().backward()
            layer.zero_grad()
            del_me = torch.ones(100, 100)  # often where the gradient was
            del del_me
    assert set(meter.timeline.by_category["gradients"]) == {0, 40_000}
    assert 40_000 <= max(meter.timeline.by_category["temporaries"]) <= 41_000


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_checkpointing_recomputes_is_activations(use_reentrant):
    def peak_by_category(through_checkpoint):
        block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 16))
        inputs = torch.ones(32, 16, requires_grad=True)
        with measure_memory(block, inputs) as meter:
            out = checkpoint(block, inputs, use_reentrant=use_reentrant) if through_checkpoint else block(inputs)
            meter.mark("forward")
            out.sum().backward()
        activations = meter.timeline.by_category["activations"]
        return activations[meter.timeline.marks[0][0]], max(activations)

    kept, at_most = peak_by_category(through_checkpoint=False)
    kept_checkpointed, at_most_checkpointed = peak_by_category(through_checkpoint=True)
    assert kept == at_most > 16_000
    assert kept_checkpointed < 100
    assert at_most_checkpointed == at_most


# ---------------------------------------------------------------------------------------------------------------------
# What counts at all


def test_foreign_tensors_are_not_counted():
    foreign, other = torch.ones(1000), torch.ones(1000)
    from_numpy = np.ones(1000, dtype=np.float32)
    with measure_memory() as meter:
        view = foreign.view(10, 100)[2:]
        foreign.add_(1)
        torch.add(foreign, other, out=other)
        with torch.no_grad():
            view.mul_(2)
        torch.from_numpy(from_numpy).add_(1)
        list(foreign.chunk(10))
        del view, other
    assert meter.peak_bytes == 0
    assert meter.timeline.live_bytes == [0]


def test_new_tensors_are_counted_however_they_are_made():
    source = torch.ones(100)
    with measure_memory() as meter:
        made = [torch.tensor([1.0] * 100), source.clone(), source[::2].contiguous()]
        made.append(copy.deepcopy(made[1]))
        made.append(torch.empty(0).resize_(100))
        made += source.view(10, 10).max(dim=1)  # two outputs: float32 and int64
        meter.mark("made")
        del made
    assert meter.timeline.live_bytes[meter.timeline.marks[0][0]] == 4 * 400 - 200 + 400 + 10 * 4 + 10 * 8
    assert meter.timeline.live_bytes[-1] == 0


def test_the_optimizer_state_of_the_first_update_is_made_by_its_step():
    layer = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    inputs = torch.ones(1, 100)
    states, peaks = [], []
    for _ in range(3):
        with measure_memory(layer, optimizer, inputs) as meter:
            layer(inputs).sum().backward()
            states.append(meter.timeline.by_category["optimizer_state"][-1])
            optimizer.step()
            optimizer.zero_grad()
        states.append(meter.timeline.by_category["optimizer_state"][-1])
        peaks.append(meter.peak_bytes)
    assert states == [0, 80_004, 80_004, 80_004, 80_004, 80_004]  # 8 bytes a float32 parameter and a step counter
    assert peaks[1] == peaks[2]


def test_without_optimizer_state_the_forward_peak_of_the_first_update_is_too_low():
    model, batch = build("attention")
    optimizer = torch.optim.AdamW(model.parameters())
    peaks = []
    for _ in range(3):
        with measure_memory(model, optimizer, batch) as meter:
            update(model, optimizer, batch)
        peaks.append(meter.peak_bytes)
    parameters = list(model.parameters())
    assert peaks[1] - peaks[0] == 8 * sum(p.numel() for p in parameters) + 4 * len(parameters)
    assert peaks[2] == peaks[1]


# ---------------------------------------------------------------------------------------------------------------------
# The lessons


def peak_of_second_update(accumulation_steps, micro_batch_size=64, *, set_to_none=True):
    """SGD on one dense layer with a loss that keeps far more than the layer's gradient."""
    layer = nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.SGD(layer.parameters())
    inputs = torch.ones(micro_batch_size, 32)
    for _ in range(2):
        with measure_memory(layer, optimizer, inputs) as meter:
            for _ in range(accumulation_steps):
                layer(inputs).exp().exp().exp().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return meter.peak_bytes


def test_two_micro_batches_cost_one_copy_of_the_gradients_and_64_no_more():
    gradients = 32 * 32 * 4
    assert peak_of_second_update(2) - peak_of_second_update(1) == gradients
    assert peak_of_second_update(64) == peak_of_second_update(2)


def test_zeros_instead_of_none_cost_a_copy_of_the_gradients_only_without_accumulation():
    gradients = 32 * 32 * 4
    assert peak_of_second_update(1, set_to_none=False) - peak_of_second_update(1) == gradients
    assert peak_of_second_update(4, set_to_none=False) == peak_of_second_update(4)


def test_backward_on_the_sum_keeps_the_activations_of_all_micro_batches():
    layer, inputs = nn.Linear(32, 32, bias=False), torch.ones(64, 32)
    parts = inputs.chunk(4)
    with measure_memory(layer, inputs) as each:
        for part in parts:
            layer(part).exp().sum().backward()
    layer.zero_grad()
    with measure_memory(layer, inputs) as summed:
        sum(layer(part).exp().sum() for part in parts).backward()
    largest = [max(meter.timeline.by_category["activations"]) for meter in (each, summed)]
    assert largest == [16 * 32 * 4, 4 * 16 * 32 * 4]


# ---------------------------------------------------------------------------------------------------------------------
# A meter changes nothing


def test_values_and_random_state_are_those_of_an_unmeasured_update():
    results = []
    for measured in (False, True):
        model, batch = build("dense")
        model.insert(2, nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters())
        torch.manual_seed(5)
        state = torch.get_rng_state()
        if measured:
            with measure_memory(model, optimizer, batch, scratch=True), memory_budget("1 GiB", model, optimizer, batch):
                assert torch.equal(torch.get_rng_state(), state)
                update(model, optimizer, batch, 2)
        else:
            update(model, optimizer, batch, 2)
        results.append((state_of(model, optimizer), torch.get_rng_state()))
    assert_same_state(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_saved_tensor_changed_in_place_is_still_an_error():
    weight = nn.Parameter(torch.ones(3))
    with measure_memory(weight):
        hidden = (weight * 2).exp()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            hidden.sum().backward()


def test_a_graph_without_backward_is_freed_without_the_garbage_collector():
    weight = nn.Parameter(torch.ones(300))
    gc.collect()
    gc.disable()
    try:
        with measure_memory(weight) as meter:
            out = weight.exp()  # exp saves its own output
            out = out.sigmoid()
            del out
        assert meter.timeline.live_bytes[-1] == 1200
    finally:
        gc.enable()


def test_a_meter_keeps_no_model_and_no_batch_alive():
    model, batch = build("dense")
    optimizer = torch.optim.AdamW(model.parameters())
    with measure_memory(model, optimizer, list(batch)) as meter, memory_budget("1 GiB", model, list(batch)) as budget:
        update(model, optimizer, batch)
    references = [weakref.ref(thing) for thing in (model, optimizer, batch[0], model[0].weight)]
    del model, optimizer, batch
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert meter.peak_bytes == budget.peak_bytes


def test_what_happens_after_the_block_does_not_change_what_was_measured():
    batch = torch.ones(1000)
    with measure_memory(batch) as meter, memory_budget("1 MiB", batch) as budget:
        made = torch.ones(500)
    del batch, made
    torch.ones(10_000)
    assert meter.timeline.live_bytes == [4000, 6000]
    assert budget.live_bytes == 6000


def test_a_resident_tensor_may_be_freed_inside():
    batch = torch.ones(1000)
    with measure_memory(batch) as meter:
        del batch
    assert meter.timeline.live_bytes == [4000, 0]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_hooks_are_gone_after_the_block(error):
    model, batch = build("dense")
    optimizer = torch.optim.AdamW(model.parameters())
    before = installed_hooks(model)

    def run():
        with measure_memory(model, optimizer, batch), memory_budget("1 GiB", model, optimizer, batch):
            assert installed_hooks(model)[:4] == (2, 2, 6, 2)
            update(model, optimizer, batch)
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert installed_hooks(model) == before == (0, 0, 0, 0, None)


def test_a_refused_block_leaves_no_hooks():
    model, batch = build("dense")
    before = installed_hooks(model)
    with pytest.raises(torch.OutOfMemoryError), memory_budget("1 KiB", model, batch):
        raise AssertionError("the block must not run")
    assert installed_hooks(model) == before


def test_sparse_gradients_and_lazy_modules_are_measured():
    embedding, lazy = nn.Embedding(10, 4, sparse=True), nn.LazyLinear(3)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    with measure_memory(embedding, lazy, optimizer) as meter, memory_budget("1 MiB", embedding, lazy, optimizer):
        lazy(embedding(torch.tensor([1, 2]))).sum().backward()
        optimizer.step()
    assert meter.timeline.by_category["parameters"][-1] == (40 + 12 + 3) * 4


# ---------------------------------------------------------------------------------------------------------------------
# Reading a meter


def test_a_meter_can_be_read_inside_the_block():
    layer = nn.Linear(10, 10, bias=False)
    with measure_memory(layer) as meter:
        assert meter.peak_bytes == 400
        held = torch.ones(10, 10)
        assert meter.peak_bytes == 800
        assert meter.at_peak["temporaries"] == 400
        layer.weight.grad = held
        assert meter.at_peak["gradients"] == 400


def test_marks_point_at_the_state_they_were_set_in():
    with measure_memory() as meter:
        meter.mark("empty")
        held = torch.ones(10)
        meter.mark("one")
        del held
        meter.mark("freed")
    assert meter.timeline.marks == [(0, "empty"), (1, "one"), (2, "freed")]
    assert meter.timeline.live_bytes == [0, 40, 0]


def test_a_meter_prints_as_a_table_without_anything_that_changes_from_run_to_run():
    layer, inputs = nn.Linear(256, 256, bias=False), torch.ones(512, 256)
    with measure_memory(layer, inputs, scratch=True) as meter:
        layer(inputs).sum().backward()
    lines = str(meter).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["at", "the", "peak", "CPU"]
    assert lines[2].split() == ["parameters", "256.0", "KiB"]
    assert any(line.split() == ["inputs", "512.0", "KiB"] for line in lines)
    assert any(line.startswith("peak") and line.endswith(format_bytes(meter.peak_bytes)) for line in lines)
    assert lines[-1].startswith("kernel scratch")
    assert "0x" not in str(meter)


@pytest.mark.parametrize("make", [measure_memory, lambda *resident: memory_budget("1 MiB", *resident)])
def test_a_block_is_entered_once(make):
    block = make()
    with block:
        pass
    with pytest.raises(RuntimeError, match="one block"), block:
        pass


@pytest.mark.parametrize("given", [3, None, "model", [torch.ones(1), "x"], {"a": object()}])
@pytest.mark.parametrize("make", [measure_memory, lambda *resident: memory_budget("1 MiB", *resident)])
def test_resident_objects_of_another_kind_are_refused_by_name(make, given):
    with pytest.raises(TypeError, match=r"resident\[1\].*accepted are modules, optimizers, tensors"):
        make(torch.ones(1), given)


@pytest.mark.parametrize("make", [measure_memory, lambda *resident: memory_budget("1 MiB", *resident)])
def test_resident_objects_on_several_or_other_devices_are_refused(make):
    on_meta = torch.ones(1, device="meta")
    with pytest.raises(ValueError, match="are on cpu, meta; accepted are objects on one device"):
        make(torch.ones(1), on_meta)
    with pytest.raises(ValueError, match="on meta; accepted are cpu and cuda"):
        make(on_meta)


# ---------------------------------------------------------------------------------------------------------------------
# The budget


def peak_of(model, optimizer, batch, accumulation_steps=1):
    """The peak of one update of copies of these objects: the originals stay as they are."""
    model, optimizer = twins(model, optimizer)
    with measure_memory(model, optimizer, batch) as meter:
        update(model, optimizer, batch, accumulation_steps)
    return meter.peak_bytes


def twins(model, optimizer):
    twin = copy.deepcopy(model)
    twin_optimizer = type(optimizer)(twin.parameters())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, twin_optimizer


@pytest.mark.parametrize("num_updates_before", [0, 2])
@pytest.mark.parametrize("kind", ["dense", "attention", "convolution"])
def test_the_peak_fits_and_one_byte_less_does_not(kind, num_updates_before):
    model, batch = build(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_updates_before):
        update(model, optimizer, batch)
    peak = peak_of(model, optimizer, batch)
    with pytest.raises(torch.OutOfMemoryError), memory_budget(peak - 1, model, optimizer, batch):
        update(model, optimizer, batch)
    with memory_budget(peak, model, optimizer, batch) as budget:
        update(model, optimizer, batch)
    assert budget.peak_bytes == budget.limit_bytes == peak


def test_the_error_says_what_was_asked_for_what_was_free_and_the_limit():
    resident = torch.zeros(2**18)
    with pytest.raises(torch.OutOfMemoryError) as caught, memory_budget("4 MiB", resident):
        torch.zeros(3 * 2**18 + 1)
    assert len(caught.value.args) == 1
    assert caught.value.args[0].startswith(
        "Simulated CUDA device out of memory. Tried to allocate 3.00 MiB. "
        "The budget has a limit of 4.00 MiB, of which 3.00 MiB is free; 1.00 MiB is in use."
    )


def test_the_error_itself_keeps_no_tensor_alive():
    with memory_budget("4 KiB") as budget:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(100).repeat(1000)
        assert caught.value.__traceback__ is not None
        assert budget.live_bytes == 0


def test_each_output_of_an_operation_counts_against_the_limit():
    source = torch.zeros(64)
    with memory_budget(64 * 4 + 64 * 8 - 1), pytest.raises(torch.OutOfMemoryError, match="allocate 512 B"):
        source.sort()
    with memory_budget(64 * 4 + 64 * 8) as budget:
        source.sort()
    assert budget.peak_bytes == budget.limit_bytes


def test_accelerate_and_lightning_recognise_the_error_as_it_stands():
    with pytest.raises(torch.OutOfMemoryError) as caught, memory_budget("1 KiB"):
        torch.zeros(1000)
    assert should_reduce_batch_size(caught.value)
    assert is_oom_error(caught.value)
    assert is_cuda_out_of_memory(caught.value)


def test_accelerates_batch_size_finder_works_under_the_budget():
    model, batch = build("dense")
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = (part.repeat(32, *[1] * (part.ndim - 1)) for part in batch)
    update(model, optimizer, batch)
    limit = peak_of(model, optimizer, (inputs[:128], targets[:128]))
    tried = []

    @find_executable_batch_size(starting_batch_size=256)
    def train(batch_size):
        tried.append(batch_size)
        with memory_budget(limit, model, optimizer, inputs, targets):
            update(model, optimizer, (inputs[:batch_size], targets[:batch_size]))
        return batch_size

    found = train()
    assert tried[0] == 256
    assert tried[-1] == found <= 128


def test_resident_objects_larger_than_the_limit_are_refused_at_entry():
    model, batch = build("dense")
    optimizer = torch.optim.AdamW(model.parameters())
    update(model, optimizer, batch)
    before = state_of(model, optimizer)
    needed = num_bytes([*model.parameters(), *memory._tensors_in(list(optimizer.state.values()))])
    with (
        pytest.raises(torch.OutOfMemoryError, match="Simulated CUDA") as caught,
        memory_budget(needed - 1, model, optimizer),
    ):
        raise AssertionError("the block must not run")
    assert should_reduce_batch_size(caught.value)
    assert_same_state(state_of(model, optimizer), before)
    with memory_budget(needed, model, optimizer) as budget:
        assert budget.live_bytes == needed


def limit_that_fails_in(place, model, optimizer, batch):
    """Return a limit that the update passes first in its forward pass, its backward pass, or its step."""
    twin, twin_optimizer = twins(model, optimizer)
    with measure_memory(twin, twin_optimizer, batch) as meter:
        hook = twin_optimizer.register_step_pre_hook(lambda *_: meter.mark("step"))
        scores = twin(batch[0])
        meter.mark("loss")
        loss = functional.cross_entropy(scores.flatten(0, -2), batch[1].flatten(), reduction="sum") / batch[1].numel()
        meter.mark("backward")
        loss.backward()
        twin_optimizer.step()
    hook.remove()
    live, marks = meter.timeline.live_bytes, {label: index for index, label in meter.timeline.marks}
    before_place, through_place = {
        "forward": (0, max(live[: marks["loss"]])),
        "backward": (max(live[: marks["backward"]]), max(live[: marks["step"]])),
        "step": (max(live[: marks["step"]]), max(live)),
    }[place]
    assert through_place > before_place, "this case cannot fail there"
    return through_place - 1


def failing_case(place, num_updates_before):
    """Return (model, optimizer, batch, limit): wide for the step, long for the passes."""
    model, batch = build("dense")
    if place != "step":
        batch = tuple(part.repeat(64, *[1] * (part.ndim - 1)) for part in batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(num_updates_before):
        update(model, optimizer, batch)
    return model, optimizer, batch, limit_that_fails_in(place, model, optimizer, batch)


@pytest.mark.parametrize("caught_inside", [False, True])
@pytest.mark.parametrize("num_updates_before", [0, 3])
@pytest.mark.parametrize("place", ["forward", "backward", "step"])
def test_a_failure_changes_nothing_and_the_next_update_is_the_right_one(place, num_updates_before, caught_inside):
    model, optimizer, batch, limit = failing_case(place, num_updates_before)
    twin, twin_optimizer = twins(model, optimizer)
    before = state_of(model, optimizer)
    objects_before = [id(t) for t in memory._tensors_in(list(optimizer.state.values()))]
    reached = []
    model.register_forward_hook(lambda *_: reached.append("loss"))
    optimizer.register_step_pre_hook(lambda *_: reached.append("step"))

    if caught_inside:
        with memory_budget(limit, model, optimizer, batch) as budget:
            at_entry = budget.live_bytes
            with pytest.raises(torch.OutOfMemoryError):
                update(model, optimizer, batch)
            gc.collect()  # the error and its frames
            assert budget.live_bytes == at_entry
    else:
        with pytest.raises(torch.OutOfMemoryError), memory_budget(limit, model, optimizer, batch):
            update(model, optimizer, batch)

    assert reached == {"forward": [], "backward": ["loss"], "step": ["loss", "step"]}[place]
    assert all(p.grad is None for p in model.parameters())
    assert_same_state(state_of(model, optimizer), before)
    assert [id(t) for t in memory._tensors_in(list(optimizer.state.values()))] == objects_before
    with memory_budget(limit + 2**20, model, optimizer, batch):
        update(model, optimizer, batch)
    update(twin, twin_optimizer, batch)
    assert_same_state(state_of(model, optimizer), state_of(twin, twin_optimizer))


def test_after_a_failure_caught_inside_smaller_micro_batches_fit_in_the_same_block():
    model, batch = build("dense")
    batch = tuple(part.repeat(64, *[1] * (part.ndim - 1)) for part in batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limit = peak_of(model, optimizer, batch, 4)
    twin, twin_optimizer = twins(model, optimizer)
    with memory_budget(limit, model, optimizer, batch) as budget:
        failed = False
        try:
            update(model, optimizer, batch)
        except torch.OutOfMemoryError:
            failed = True
        assert failed
        update(model, optimizer, batch, 4)
    update(twin, twin_optimizer, batch, 4)
    assert_same_state(state_of(model, optimizer), state_of(twin, twin_optimizer))
    assert budget.peak_bytes == limit


@pytest.mark.parametrize("place", ["forward", "backward", "step"])
def test_a_hundred_failures_leak_nothing(place):
    model, optimizer, batch, limit = failing_case(place, 0)
    gc.collect()
    with measure_memory(model, optimizer, batch) as meter:
        for _ in range(100):
            try:
                with memory_budget(limit, model, optimizer, batch):
                    update(model, optimizer, batch)
            except torch.OutOfMemoryError:
                pass
            else:
                raise AssertionError("the update must not fit")
            meter.mark("failed")
    live = [meter.timeline.live_bytes[index] for index, _ in meter.timeline.marks]
    assert live == [meter.timeline.live_bytes[0]] * 100
    assert not optimizer.state


def test_gradients_from_before_stay_the_same_objects_and_new_ones_go():
    model, batch = build("dense")
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    kept = model[0].weight.grad

    def run():
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        assert model[2].weight.grad is not None
        torch.zeros(2**20)

    with pytest.raises(torch.OutOfMemoryError), memory_budget("300 KiB", model, batch):
        run()
    assert model[0].weight.grad is kept
    assert [p.grad for p in model.parameters() if p is not model[0].weight] == [None] * 5


def test_the_state_of_completed_steps_stays():
    model, batch = build("dense")
    optimizer = torch.optim.AdamW(model.parameters())
    twin, twin_optimizer = twins(model, optimizer)

    def run():
        update(model, optimizer, batch)
        torch.zeros(2**20)

    with pytest.raises(torch.OutOfMemoryError), memory_budget("1 MiB", model, optimizer, batch):
        run()
    update(twin, twin_optimizer, batch)
    assert_same_state(state_of(model, optimizer), state_of(twin, twin_optimizer))


def test_a_step_of_an_optimizer_that_was_not_named_is_undone_too():
    model, batch = build("dense")
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(torch.OutOfMemoryError), memory_budget("300 KiB", model, batch):
        update(model, optimizer, batch)
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_step_with_a_closure_and_nested_state_is_undone():
    model, batch = build("dense")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    before = state_of(model, optimizer)
    fails_late = []
    optimizer.register_step_post_hook(lambda *_: fails_late.append(False))
    for extra in range(100_000, 2_000_000, 100_000):  # in the closure, and between its calls
        try:
            with memory_budget(extra, model, batch):
                optimizer.step(closure)
        except torch.OutOfMemoryError:
            fails_late.append(True)
            assert_same_state(state_of(model, optimizer), before)
        else:
            break
    assert fails_late.count(True) >= 3
    assert fails_late.pop() is False
    assert len(list(memory._tensors_in(list(before)))) > 6


def test_half_precision_and_empty_parameters_survive_a_failed_step():
    parameters = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)), nn.Parameter(torch.empty(0))]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(torch.OutOfMemoryError), memory_budget(9000, parameters, optimizer):
        optimizer.step()
    assert torch.equal(parameters[0], torch.ones(1000, dtype=torch.bfloat16))
    assert not optimizer.state


def test_an_update_that_fits_never_passes_the_limit_whatever_the_limit():
    model, batch = build("attention")
    optimizer = torch.optim.AdamW(model.parameters())
    update(model, optimizer, batch)
    peak = peak_of(model, optimizer, batch)
    fitted = 0
    for limit in range(peak - 40_000, peak + 10_000, 5_000):
        with measure_memory(model, optimizer, batch) as meter:
            try:
                with memory_budget(limit, model, optimizer, batch) as budget:
                    update(model, optimizer, batch)
            except torch.OutOfMemoryError:
                assert limit < peak
                continue
        fitted += 1
        assert meter.peak_bytes == budget.peak_bytes <= limit
    assert 1 <= fitted < 10


def test_a_resized_output_is_refused_too():
    out = torch.empty(0)
    with memory_budget("1 KiB", out), pytest.raises(torch.OutOfMemoryError, match=r"allocate 4\.00 KiB"):
        out.resize_(1024)


# ---------------------------------------------------------------------------------------------------------------------
# Nesting


def test_meters_nest_and_both_see_every_category():
    model, batch = build("dense")
    optimizer = torch.optim.AdamW(model.parameters())
    update(model, optimizer, batch)
    with measure_memory(model, optimizer, batch) as outer, measure_memory(model, optimizer, batch) as inner:
        update(model, optimizer, batch, 2)
    assert outer.peak_bytes == inner.peak_bytes
    assert outer.at_peak == inner.at_peak
    assert max(outer.timeline.by_category["activations"]) == max(inner.timeline.by_category["activations"]) > 0


@pytest.mark.parametrize("meter_outside", [True, False])
def test_a_meter_and_a_budget_nest_in_either_order(meter_outside):
    model, batch = build("dense")
    optimizer = torch.optim.AdamW(model.parameters())
    update(model, optimizer, batch)
    peak = peak_of(model, optimizer, batch)
    meter, budget = measure_memory(model, optimizer, batch), memory_budget(peak, model, optimizer, batch)
    first, second = (meter, budget) if meter_outside else (budget, meter)
    with first, second:
        update(model, optimizer, batch)
    assert meter.peak_bytes == budget.peak_bytes == peak
    budget = memory_budget(peak - 1, model, optimizer, batch)
    first, second = (measure_memory(model), budget) if meter_outside else (budget, measure_memory(model))
    before = state_of(model, optimizer)
    with pytest.raises(torch.OutOfMemoryError), first, second:
        update(model, optimizer, batch)
    assert_same_state(state_of(model, optimizer), before)


@pytest.mark.parametrize("tight_outside", [True, False])
def test_budgets_nest_and_each_restores_what_it_was_given(tight_outside):
    model, optimizer, batch, limit = failing_case("step", 2)
    before = state_of(model, optimizer)
    outside, inside = (limit, "1 GiB") if tight_outside else ("1 GiB", limit)
    with memory_budget(outside, model, optimizer, batch) as outer:
        at_entry = outer.live_bytes
        with pytest.raises(torch.OutOfMemoryError), memory_budget(inside, model, optimizer, batch):
            update(model, optimizer, batch)
        gc.collect()
        assert outer.live_bytes == at_entry
    assert_same_state(state_of(model, optimizer), before)
    assert all(p.grad is None for p in model.parameters())


def test_an_outer_budget_that_runs_out_makes_the_inner_one_give_back():
    model, _ = build("dense")

    def run():
        for parameter in model.parameters():
            parameter.grad = parameter.detach()
        torch.zeros(1000)

    exceeded = pytest.raises(torch.OutOfMemoryError, match=r"limit of 1\.00 KiB")
    with exceeded, memory_budget("1 KiB"), memory_budget("1 GiB", model):
        run()
    assert all(p.grad is None for p in model.parameters())


def test_another_thread_is_neither_limited_nor_counted():
    made = []
    with memory_budget("1 KiB"), measure_memory() as meter:
        worker = threading.Thread(target=lambda: made.append(torch.zeros(10_000)))
        worker.start()
        worker.join()
    assert made[0].numel() == 10_000
    assert meter.peak_bytes == 0


def test_a_step_that_was_interrupted_is_not_undone_later():
    class Interrupted(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyboardInterrupt

    model = nn.Linear(5, 3)
    optimizer = Interrupted(model.parameters(), lr=0.1)
    with memory_budget("5 KB", model, optimizer):
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        with torch.no_grad():
            model.weight.fill_(7.0)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(100_000)
    assert (model.weight == 7.0).all()


def test_profiling_in_two_threads_at_once_is_refused_not_a_crash():
    messages = []

    def profile():
        try:
            with measure_memory(scratch=True):
                torch.zeros(10)
        except RuntimeError as error:
            messages.append(str(error))

    with measure_memory(scratch=True):
        thread = threading.Thread(target=profile)
        thread.start()
        thread.join()
    assert len(messages) == 1
    assert "already running" in messages[0]
    profile()  # and it is free again
    assert len(messages) == 1


@pytest.mark.parametrize(("size", "num_bytes"), [("9007199254740993 B", 9007199254740993), ("1" * 400 + " B", None)])
def test_a_very_large_size_keeps_its_digits(size, num_bytes):
    assert parse_bytes(size) == (num_bytes or int("1" * 400))


def test_a_budget_keeps_no_copy_after_a_step_that_was_completed():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memory_budget("5 KB", model, optimizer) as budget:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        assert not budget._undo_step


def test_tensors_on_another_device_count_nothing():
    with measure_memory() as meter:
        torch.empty(1000, device="meta")
    assert meter.peak_bytes == 0

"""Cutting, grouping and counting: views of the same structure, every micro-batch once, planned equals performed."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from course_lib.batches import (
    EffectiveBatch,
    batch_size,
    concatenate_batches,
    count_samples,
    effective_batch_size,
    group_micro_batches,
    group_sizes,
    map_tensors,
    solve_effective_batch,
    split_batch,
    tensors_of,
    tokens_per_update,
    updates_per_epoch,
)


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


class Encoding(UserDict):
    """What a tokenizer returns: a mapping that is no dict, with its keys as attributes and something beside them."""

    def __init__(self, data=None, note="none"):
        super().__init__(data)
        self.note = note

    def __getattr__(self, name):
        return self.data[name]


class Labelled(tuple):
    """A tuple of another kind, with no fields."""


class Kept(list):
    """A list of another kind."""


def numbers(num_samples: int, *shape: int) -> torch.Tensor:
    count = num_samples * int(np.prod(shape))
    return torch.arange(count, dtype=torch.float32).reshape(num_samples, *shape)


def structures(num_samples: int) -> dict[str, object]:
    """One batch of every kind of structure, all of `num_samples` samples."""
    a, b = numbers(num_samples, 2), torch.arange(num_samples)
    Old = namedtuple("Old", "a b")
    return {
        "tensor": a,
        "tuple": (a, b),
        "list": [a, b],
        "dict": {"a": a, "b": b},
        "ordered dict": OrderedDict(b=b, a=a),
        "default dict": defaultdict(list, a=a),
        "named tuple": Pair(a, b),
        "old named tuple": Old(a, b),
        "tuple of another kind": Labelled((a, b)),
        "list of another kind": Kept([a, b]),
        "tokenizer's output": Encoding({"input_ids": a, "labels": b}, note="kept"),
        "nested": ({"x": [a, Pair(b, a)]}, (b, {"deep": (a,)})),
    }


KINDS = list(structures(1))


def same_structure(one, other) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape[1:] == other.shape[1:]
    if hasattr(one, "keys"):
        return list(one) == list(other) and all(same_structure(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(same_structure, one, other))


def equal(one, other) -> bool:
    return same_structure(one, other) and all(map(torch.equal, tensors_of(one), tensors_of(other)))


# Cutting.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4, 9, 100])
def test_pieces_are_views_that_keep_the_structure_and_join_to_the_batch(kind, size):
    batch = structures(9)[kind]
    pieces = split_batch(batch, size)
    assert [batch_size(piece) for piece in pieces] == [min(size, 9 - start) for start in range(0, 9, size)]
    for piece in pieces:
        assert same_structure(piece, batch)
        for part, whole in zip(tensors_of(piece), tensors_of(batch), strict=True):
            assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert equal(concatenate_batches(pieces), batch)


def test_nine_by_four_is_four_four_one():
    """BN3: the plain cut of 9 by 4 is 4, 4, 1; the one sample left is what BatchNorm refuses."""
    pieces = split_batch(numbers(9, 3), 4)
    assert [len(piece) for piece in pieces] == [4, 4, 1]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.BatchNorm1d(3)(pieces[-1])
    assert [len(piece) for piece in split_batch(numbers(9, 3), 3)] == [3, 3, 3]


@given(num_samples=st.integers(1, 40), size=st.integers(1, 50))
def test_every_sample_is_in_one_piece_once_and_in_order(num_samples, size):
    """G01: the micro-batches of an update are disjoint, and together they are the batch."""
    seen = torch.cat(split_batch(torch.arange(num_samples), size)).tolist()
    assert seen == list(range(num_samples))


def test_repeating_one_micro_batch_is_not_the_batch():
    """G01: gradients 1, 2, 3, 6 have the mean 3; four rounds of the first have the mean 1."""
    gradients = torch.tensor([1.0, 2.0, 3.0, 6.0])
    pieces = split_batch(gradients, 1)
    assert sum(float(piece.sum()) for piece in pieces) / 4 == 3.0
    assert sum(float(pieces[0].sum()) for _ in range(4)) / 4 == 1.0


def test_attributes_of_a_mapping_survive_the_cut_and_the_batch_is_left_alone():
    batch = structures(5)["tokenizer's output"]
    whole = batch["input_ids"]
    piece = split_batch(batch, 2)[0]
    assert piece.note == "kept"
    assert torch.equal(piece.input_ids, whole[:2])
    assert batch["input_ids"] is whole


def test_a_mapping_that_cannot_be_changed_becomes_a_dict():
    pieces = split_batch(MappingProxyType({"a": numbers(3)}), 2)
    assert [type(piece) for piece in pieces] == [dict, dict]
    assert torch.equal(pieces[0]["a"], numbers(2))


def test_structures_without_tensors_inside_a_batch_are_fine():
    assert batch_size((numbers(3), {}, ())) == 3
    assert equal(split_batch((numbers(3), {}, ()), 2)[1], (numbers(3)[2:], {}, ()))


@pytest.mark.parametrize(
    ("batch", "error", "says"),
    [
        ((numbers(4), numbers(3)), ValueError, r"disagree in length: \[4, 3\]"),
        ({"a": numbers(4), "b": [numbers(4), numbers(5)]}, ValueError, r"disagree in length: \[4, 4, 5\]"),
        (torch.tensor(3.0), ValueError, "without dimensions"),
        ((), ValueError, "no tensor"),
        ({}, ValueError, "no tensor"),
        (numbers(4).numpy(), TypeError, "found a ndarray"),
        ((numbers(4), None), TypeError, "found a NoneType"),
        ((numbers(4), "text"), TypeError, "found a str"),
        (iter([numbers(4)]), TypeError, "found a list_iterator"),
    ],
)
def test_what_is_no_batch_is_refused_by_name(batch, error, says):
    for function in (batch_size, count_samples, lambda given: split_batch(given, 2)):
        with pytest.raises(error, match=f"batch .*{says}"):
            function(batch)


def test_an_empty_batch_has_size_zero_and_cannot_be_cut():
    assert batch_size((numbers(0, 2), numbers(0))) == 0
    with pytest.raises(ValueError, match="batch has 0 samples"):
        split_batch(numbers(0, 2), 2)


NOT_WHOLE = [
    (0, ValueError),
    (-1, ValueError),
    (2.0, TypeError),
    (True, TypeError),
    ("2", TypeError),
    (None, TypeError),
]


@pytest.mark.parametrize(("value", "error"), NOT_WHOLE)
def test_sizes_and_steps_must_be_whole_numbers_from_one(value, error):
    for name, call in {
        "micro_batch_size": lambda: split_batch(numbers(4), value),
        "accumulation_steps": lambda: group_sizes(4, value),
        "accumulation_steps ": lambda: group_micro_batches([], value),
        "accumulation_steps  ": lambda: updates_per_epoch(4, value),
        "accumulation_steps   ": lambda: effective_batch_size(4, value),
        "micro_batch_size ": lambda: effective_batch_size(value, 4),
        "world_size": lambda: effective_batch_size(4, 4, value),
        "sequence_length": lambda: tokens_per_update(4, value, 4),
    }.items():
        with pytest.raises(error, match=f"^{name.strip()} must be .*at least 1; got {value!r}"):
            call()


def test_whole_numbers_of_other_kinds_are_taken():
    assert len(split_batch(numbers(4), np.int64(2))) == 2
    assert group_sizes(np.int32(5), torch.tensor(2)) == [2, 2, 1]


# Joining.


def test_parts_are_joined_by_name_not_by_position():
    one, other = {"a": numbers(1), "b": numbers(2)[1:]}, {"b": numbers(4)[3:], "a": numbers(3)[2:]}
    assert equal(concatenate_batches([one, other]), {"a": torch.tensor([0.0, 2.0]), "b": torch.tensor([1.0, 3.0])})


def test_joining_takes_an_iterator_and_copies():
    whole = numbers(4)
    joined = concatenate_batches(iter(split_batch(whole, 3)))
    assert torch.equal(joined, whole)
    assert joined.data_ptr() != whole.data_ptr()


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([], "batches must hold at least one batch"),
        ([numbers(2), (numbers(2),)], "one structure"),
        ([(numbers(2),), numbers(2)], "one structure"),
        ([(numbers(2),), (numbers(2), numbers(2))], "one structure; not all hold 1 parts"),
        ([{"a": numbers(2)}, {"b": numbers(2)}], r"one structure; not all hold the keys \['a'\]"),
        ([{"a": numbers(2)}, [numbers(2)]], "one structure"),
        ([{"a": (numbers(2),)}, {"a": numbers(2)}], "one structure"),
    ],
)
def test_batches_that_are_not_built_alike_cannot_be_joined(batches, says):
    with pytest.raises(ValueError, match=says):
        concatenate_batches(batches)


def test_a_function_is_applied_to_every_tensor_in_order():
    batch = structures(2)["nested"]
    assert len(tensors_of(batch)) == 5
    doubled = map_tensors(lambda tensor: 2 * tensor, batch)
    assert same_structure(doubled, batch)
    for one, two in zip(tensors_of(batch), tensors_of(doubled), strict=True):
        assert torch.equal(2 * one, two)


# Grouping.


def test_the_group_sizes_of_five_by_two_and_of_the_wrong_condition():
    """B04: n = 5, K = 2 gives 2, 2, 1; stepping where i % 2 == 0 gives 1, 2, 2, and leaves one of six unused."""

    def wrong(num_micro_batches: int) -> list[int]:
        sizes, waiting = [], 0
        for i in range(num_micro_batches):
            waiting += 1
            if i % 2 == 0:
                sizes.append(waiting)
                waiting = 0
        return sizes

    assert group_sizes(5, 2) == [2, 2, 1]
    assert group_sizes(6, 2) == [2, 2, 2]
    assert wrong(5) == [1, 2, 2]
    assert sum(wrong(6)) == 5


@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("num_micro_batches", range(21))
def test_updates_planned_are_updates_performed(num_micro_batches, steps):
    """S03: one rule for planning and looping. B03: ceil(n / K) groups, so a few micro-batches still give one."""
    groups = list(group_micro_batches(iter(range(num_micro_batches)), steps))
    assert [len(group) for group in groups] == group_sizes(num_micro_batches, steps)
    assert updates_per_epoch(num_micro_batches, steps) == len(groups) == -(-num_micro_batches // steps)
    full = [group for group in groups if len(group) == steps]
    assert updates_per_epoch(num_micro_batches, steps, drop_tail=True) == len(full) == num_micro_batches // steps
    assert [micro_batch for group in groups for micro_batch in group] == list(range(num_micro_batches))


def test_planning_by_floor_stops_a_run_short():
    """S03: 5 batches, K = 2, 10 epochs are 30 updates; floor plans 20, which end after 6.67 epochs."""
    assert 10 * updates_per_epoch(5, 2) == 30
    assert round(10 * (5 // 2) / updates_per_epoch(5, 2), 2) == 6.67


def test_the_worked_numbers_of_lost_tails():
    """B03: n = 3, K = 4 is 1 update, not 0; n = 7, K = 4 is 2, not 1. E02: 331 batches, K = 2 are 166."""
    assert [updates_per_epoch(3, 4), updates_per_epoch(7, 4), updates_per_epoch(331, 2)] == [1, 2, 166]
    assert [3 // 4, 7 // 4, updates_per_epoch(331, 2, drop_tail=True)] == [0, 1, 165]


def test_the_boundary_comes_from_the_groups_not_from_the_loader():
    """B05: 2 loader batches of 4 micro-batches each, K = 4, are 2 groups; stepping once the loader ends gives 1 + 4."""
    loader = [numbers(8), numbers(8)]
    groups = list(group_micro_batches((piece for batch in loader for piece in split_batch(batch, 2)), 4))
    assert [len(group) for group in groups] == [4, 4]
    on_last = [position == 3 or number == len(loader) - 1 for number in range(2) for position in range(4)]
    assert sum(on_last) == 5


def test_one_group_is_read_at_a_time():
    read = []

    def loader():
        for number in range(5):
            read.append(number)
            yield numbers(2) + number

    groups = group_micro_batches(loader(), 2)
    assert read == []
    next(groups)
    assert read == [0, 1]
    next(groups)
    assert read == [0, 1, 2, 3]
    assert [len(group) for group in groups] == [1]
    assert next(groups, None) is None


def test_an_endless_loader_can_be_grouped():
    def endless():
        while True:
            yield numbers(2)

    assert [len(group) for group in islice(group_micro_batches(endless(), 3), 4)] == [3, 3, 3, 3]


def test_groups_are_lists_and_a_loader_can_be_grouped_every_epoch():
    loader = DataLoader(TensorDataset(numbers(9, 2), torch.arange(9)), batch_size=2)
    for _ in range(2):
        groups = list(group_micro_batches(loader, 2))
        assert [type(group) for group in groups] == [list] * 3
        assert [[len(targets) for _, targets in group] for group in groups] == [[2, 2], [2, 2], [1]]


@pytest.mark.parametrize("loader", [3, None, numbers(4, 2), {"a": numbers(4)}, "text"])
def test_a_loader_that_yields_no_micro_batches_is_refused_before_it_is_read(loader):
    with pytest.raises(TypeError, match=f"loader must yield micro-batches.*got {type(loader).__name__}"):
        group_micro_batches(loader, 2)


def test_arguments_of_grouping_are_checked_at_the_call():
    with pytest.raises(ValueError, match="accumulation_steps must be at least 1; got 0"):
        group_micro_batches([numbers(2)], 0)
    with pytest.raises(ValueError, match="num_micro_batches must be at least 0; got -1"):
        group_sizes(-1, 2)


# Counting.


def test_the_effective_batch_size_is_the_product():
    """D05: 256 is not 4 x 8 x 1, but it is 4 x 8 x 8."""
    assert effective_batch_size(4, 8) == 32
    assert effective_batch_size(4, 8, 8) == 256


def test_the_missing_number_is_found():
    """D05: whichever of the four is left out."""
    whole = EffectiveBatch(effective_batch_size=256, micro_batch_size=4, accumulation_steps=8, world_size=2 * 4)
    for name in EffectiveBatch._fields:
        assert solve_effective_batch(**{**whole._asdict(), name: None}) == whole
    assert solve_effective_batch(effective_batch_size=64, micro_batch_size=16).accumulation_steps == 4
    assert solve_effective_batch(**whole._asdict()) == whole


@given(numbers=st.tuples(*[st.integers(1, 50)] * 3), missing=st.integers(0, 3))
def test_solving_gives_back_the_number_taken_out(numbers, missing):
    whole = EffectiveBatch(numbers[0] * numbers[1] * numbers[2], *numbers)
    given_numbers = whole._asdict() | {EffectiveBatch._fields[missing]: None}
    assert solve_effective_batch(**given_numbers) == whole


def test_a_division_with_a_remainder_is_refused_not_rounded():
    """D05: 100 with micro-batch 8 and 4 processes is an error, never 96 or 128."""
    says = "effective_batch_size 100 is not a multiple of micro_batch_size 8 x world_size 4.*accumulation_steps"
    with pytest.raises(ValueError, match=says):
        solve_effective_batch(effective_batch_size=100, micro_batch_size=8, world_size=4)
    with pytest.raises(ValueError, match="effective_batch_size 4 is not a multiple of micro_batch_size 8"):
        solve_effective_batch(effective_batch_size=4, micro_batch_size=8)


def test_four_numbers_that_do_not_fit_are_refused():
    """D05: 256 with 4 x 8 x 1."""
    with pytest.raises(ValueError, match="effective_batch_size 256 is not the product 32"):
        solve_effective_batch(effective_batch_size=256, micro_batch_size=4, accumulation_steps=8)
    with pytest.raises(ValueError, match="exactly one number; left out: effective_batch_size, accumulation_steps"):
        solve_effective_batch(micro_batch_size=4)
    with pytest.raises(TypeError, match="micro_batch_size must be a whole number"):
        solve_effective_batch(effective_batch_size=8, micro_batch_size=2.0)
    with pytest.raises(ValueError, match="world_size must be at least 1; got 0"):
        solve_effective_batch(effective_batch_size=8, micro_batch_size=2, world_size=0)


def test_tokens_of_an_update_count_every_pass():
    """L05: 32 x 2048 x 8 processes are 524,288 a pass; with K = 4 in 2 s that is 1,048,576 a second, not 262,144."""
    one_pass = tokens_per_update(32, 2048, 1, world_size=8)
    assert one_pass == 524_288
    assert tokens_per_update(32, 2048, 4, world_size=8) / 2 == 1_048_576
    assert one_pass / 2 == 262_144

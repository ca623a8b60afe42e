"""The data files and their loaders, and batches in random order."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from itertools import chain
from typing import NamedTuple

import pytest
import torch

from course_lib import datasets
from course_lib.datasets import (
    DATA_FOLDER,
    Digits,
    load_digits,
    load_surname_tokens,
    load_surnames,
    shuffled_batches,
)

FILES_AND_LOADERS = [("digits.npz", load_digits), ("surnames.csv", load_surnames)]


@pytest.fixture
def copied_data(tmp_path, monkeypatch):
    """A copy of the data files that a test may damage."""
    for name, _ in FILES_AND_LOADERS:
        shutil.copy(DATA_FOLDER / name, tmp_path / name)
    monkeypatch.setattr(datasets, "DATA_FOLDER", tmp_path)
    return tmp_path


def draw(num_samples: int, batch_size: int, **options) -> list[list[int]]:
    """Draw batches of the numbers 0 to num_samples - 1, as lists."""
    return [batch.tolist() for batch in shuffled_batches(torch.arange(num_samples), batch_size, **options)]


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


# The files


def test_every_file_has_the_checksum_that_code_and_readme_state():
    readme = (DATA_FOLDER / "README.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|$", readme, flags=re.MULTILINE))
    found = {name: hashlib.sha256((DATA_FOLDER / name).read_bytes()).hexdigest() for name, _ in FILES_AND_LOADERS}
    assert found == datasets.CHECKSUMS == stated


@pytest.mark.parametrize(("name", "load"), FILES_AND_LOADERS)
def test_one_changed_bit_is_detected(copied_data, name, load):
    load()
    content = bytearray((copied_data / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copied_data / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} was altered: its SHA-256 is [0-9a-f]{{64}}, expected"):
        load()


@pytest.mark.parametrize(("name", "load"), FILES_AND_LOADERS)
def test_a_missing_file_is_named(copied_data, name, load):
    (copied_data / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(name)} is missing"):
        load()


def test_loading_works_from_any_folder_without_a_network_and_without_scikit_learn(tmp_path):
    # A process of its own: what is imported and what opens a socket then depends on the loaders alone.
    script = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(event) if event.startswith("socket.") else None)
from course_lib.datasets import load_digits, load_surnames
print(len(load_digits()), len(load_surnames()), opened, sorted({"sklearn", "names"} & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": str(DATA_FOLDER.parent)}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\n")[0] == "1797 10000 [] []"


# The digits


def test_digits_have_the_promised_shapes_types_and_range():
    digits = load_digits()
    assert digits.inputs.shape == (1797, 1, 8, 8)
    assert digits.inputs.dtype == torch.float32
    assert digits.targets.shape == (1797,)
    assert digits.targets.dtype == torch.int64
    assert len(digits) == 1797
    assert digits.inputs.min() == 0
    assert digits.inputs.max() == 1
    assert torch.equal(digits.inputs * 16, (digits.inputs * 16).round())
    assert repr(digits) == "Digits(1797 images of 8 x 8, float32)"


def test_every_class_has_as_many_digits_as_the_source_says():
    counts = torch.bincount(load_digits().targets).tolist()
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_first_64_digits_hold_every_class():
    _, targets = load_digits().first(64)
    assert torch.bincount(targets, minlength=10).min() >= 4


def test_the_first_image_is_the_first_of_the_source():
    rows = [
        [0, 0, 5, 13, 9, 1, 0, 0],
        [0, 0, 13, 15, 10, 15, 5, 0],
        [0, 3, 15, 2, 0, 11, 8, 0],
        [0, 4, 12, 0, 0, 8, 8, 0],
        [0, 5, 8, 0, 0, 9, 8, 0],
        [0, 4, 11, 0, 1, 12, 7, 0],
        [0, 2, 14, 5, 10, 12, 0, 0],
        [0, 0, 6, 13, 10, 0, 0, 0],
    ]
    inputs, targets = load_digits().first(1)
    assert (inputs[0, 0] * 16).tolist() == rows
    assert targets.tolist() == [0]


def test_images_belong_to_their_labels():
    # The mean image of each class, from one half of the data, recognises the other half.
    digits = load_digits()
    images, targets = digits.inputs.flatten(1), digits.targets
    means = torch.stack([images[:900][targets[:900] == label].mean(0) for label in range(10)])
    right = torch.cdist(images[900:], means).argmin(1) == targets[900:]
    assert right.double().mean() > 0.8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_no_floating_point_type_rounds_a_pixel(dtype):
    digits = load_digits(dtype)
    assert digits.inputs.dtype == dtype
    assert torch.equal(digits.inputs.to(torch.float32), load_digits().inputs)


@pytest.mark.parametrize("dtype", [torch.int64, "float32", None])
def test_a_dtype_that_is_no_floating_point_type_is_refused(dtype):
    with pytest.raises(TypeError, match="dtype must be a floating-point type"):
        load_digits(dtype)


def test_first_takes_the_first_digits_without_copying():
    digits = load_digits()
    inputs, targets = digits.first(5)
    assert torch.equal(inputs, digits.inputs[:5])
    assert torch.equal(targets, digits.targets[:5])
    assert inputs.data_ptr() == digits.inputs.data_ptr()
    assert len(digits.first(1797)[1]) == 1797


@pytest.mark.parametrize(
    ("num_samples", "error"), [(0, ValueError), (-1, ValueError), (1798, ValueError), (2.0, TypeError)]
)
def test_first_refuses_a_number_it_does_not_have(num_samples, error):
    with pytest.raises(error, match=r"num_samples must be"):
        load_digits().first(num_samples)


def test_two_loads_share_no_memory():
    digits = load_digits()
    digits.inputs.zero_()
    assert load_digits().inputs.max() == 1


def test_digits_cannot_be_reassigned():
    digits = Digits(torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(AttributeError):
        digits.targets = torch.ones(1)


# The surnames


def test_surnames_are_the_most_frequent_ones_in_order():
    surnames = load_surnames()
    assert len(surnames) == len(surnames.names) == len(set(surnames.names)) == 10_000
    assert surnames.names[:5] == ["smith", "johnson", "williams", "jones", "brown"]
    assert surnames.frequency_percent.shape == (10_000,)
    assert surnames.frequency_percent.dtype == torch.float64
    assert surnames.frequency_percent[0] == 1.006
    assert (surnames.frequency_percent.diff() <= 0).all()
    assert surnames.frequency_percent[-1] == 0.001
    assert repr(surnames) == "Surnames(10000 names from 'smith' to 'brust')"


def test_frequencies_are_in_percent_of_all_persons():
    # The source's cumulative column says 71.104; the rounding of 10,000 rows to 0.001 loses some of it.
    assert float(load_surnames().frequency_percent.sum()) == pytest.approx(71.1, abs=0.5)


def test_surnames_are_lower_case_letters_of_many_lengths():
    names = load_surnames().names
    assert all(re.fullmatch("[a-z]{2,13}", name) for name in names)
    assert {len(name) for name in names} == set(range(2, 14))


# Batches in random order


@pytest.mark.parametrize(("num_samples", "batch_size"), [(10, 3), (12, 4), (5, 5), (7, 1)])
def test_an_epoch_holds_every_sample_exactly_once(num_samples, batch_size):
    batches = draw(num_samples, batch_size, seed=0)
    assert sorted(flat(batches)) == list(range(num_samples))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= batch_size


def test_every_epoch_of_a_longer_run_holds_every_sample_once_in_a_new_order():
    batches = draw(10, 3, seed=0, num_batches=12)
    assert [len(batch) for batch in batches] == [3, 3, 3, 1] * 3
    epochs = [flat(batches[start : start + 4]) for start in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(10))


def test_num_batches_may_stop_within_an_epoch():
    assert [len(batch) for batch in draw(10, 3, seed=0, num_batches=6)] == [3, 3, 3, 1, 3, 3]
    assert len(draw(10, 3, seed=0, num_batches=2)) == 2


def test_drop_tail_leaves_out_the_short_batch_of_every_epoch():
    assert [len(batch) for batch in draw(10, 3, seed=0, drop_tail=True)] == [3, 3, 3]
    batches = draw(10, 3, seed=0, num_batches=6, drop_tail=True)
    assert [len(batch) for batch in batches] == [3] * 6
    for epoch in (batches[:3], batches[3:]):
        assert len(set(flat(epoch))) == 9
    assert [len(batch) for batch in draw(9, 3, seed=0, drop_tail=True)] == [3, 3, 3]


def test_drop_tail_leaves_out_another_sample_each_epoch():
    batches = draw(10, 3, seed=0, num_batches=60, drop_tail=True)
    dropped = {min(set(range(10)) - set(flat(batches[start : start + 3]))) for start in range(0, 60, 3)}
    assert len(dropped) > 3


def test_the_order_depends_on_the_seed_alone():
    first = draw(50, 7, seed=3, num_batches=20)
    torch.manual_seed(99)
    assert draw(50, 7, seed=3, num_batches=20) == first
    assert draw(50, 7, seed=4, num_batches=20) != first


def test_two_iterators_at_once_do_not_disturb_each_other():
    alone = draw(20, 6, seed=1, num_batches=9)
    one, two = (shuffled_batches(torch.arange(20), 6, seed=1, num_batches=9) for _ in range(2))
    pairs = [(left.tolist(), right.tolist()) for left, right in zip(one, two, strict=True)]
    assert pairs == [(batch, batch) for batch in alone]


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    draw(10, 3, seed=0, num_batches=10)
    assert torch.equal(torch.get_rng_state(), before)


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


@pytest.mark.parametrize(
    "build",
    [
        lambda numbers: (numbers.reshape(-1, 1), numbers),
        lambda numbers: [numbers, numbers],
        lambda numbers: {"ids": numbers, "more": (numbers, [numbers])},
        lambda numbers: Pair(numbers, numbers),
    ],
)
def test_any_structure_is_kept_and_its_tensors_stay_together(build):
    data = build(torch.arange(10))
    for batch in shuffled_batches(data, 4, seed=0):
        assert type(batch) is type(data)
        leaves = datasets.batches.tensors_of(batch)
        assert len(leaves) == len(datasets.batches.tensors_of(data))
        assert all(torch.equal(leaf.flatten(), leaves[0].flatten()) for leaf in leaves)
    if isinstance(data, dict):
        assert list(batch) == ["ids", "more"]


def test_images_keep_their_labels():
    digits = load_digits()
    label_of = {image.numpy().tobytes(): int(label) for image, label in zip(digits.inputs, digits.targets, strict=True)}
    for inputs, targets in shuffled_batches(digits.first(200), 64, seed=0):
        assert [label_of[image.numpy().tobytes()] for image in inputs] == targets.tolist()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 11}, ValueError, "batch_size must be at most 10, the number of samples; got 11"),
        ({"batch_size": 11, "drop_tail": True}, ValueError, "batch_size must be at most 10"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1; got 0"),
        ({"batch_size": 2.5}, TypeError, "batch_size must be a whole number"),
        ({"num_batches": 0}, ValueError, "num_batches must be at least 1; got 0"),
        ({"num_batches": -3}, ValueError, "num_batches must be at least 1; got -3"),
        ({"num_batches": 1.0}, TypeError, "num_batches must be a whole number"),
        ({"num_batches": True}, TypeError, "num_batches must be a whole number"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": None}, TypeError, "seed must be a whole number"),
        ({"batch": (torch.zeros(3), torch.zeros(4))}, ValueError, "disagree in length"),
        ({"batch": "digits"}, TypeError, "batch must be a tensor"),
    ],
)
def test_bad_arguments_are_refused_at_the_call_not_at_the_first_batch(options, error, message):
    arguments = {"batch": torch.arange(10), "batch_size": 4, "seed": 0, **options}
    with pytest.raises(error, match=message):
        shuffled_batches(arguments.pop("batch"), arguments.pop("batch_size"), **arguments)


# Surnames as pieces


@pytest.mark.parametrize("num_pieces", [27, 100, 2048])
def test_pieces_joined_are_the_surnames_again(num_pieces):
    pieces, tokens = load_surname_tokens(num_pieces)
    assert len(pieces) == len(set(pieces)) == num_pieces
    assert tokens.dtype == torch.int64
    assert "".join(pieces[token] for token in tokens) == "".join(f"{name}\n" for name in load_surnames().names)
    assert {len(piece) for piece in pieces} <= {1, 2, 3, 4}
    assert {piece for piece in pieces if len(piece) == 1} == set("\nabcdefghijklmnopqrstuvwxyz")


def test_more_pieces_make_a_shorter_text():
    lengths = [len(load_surname_tokens(num_pieces)[1]) for num_pieces in (27, 500, 2048)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 25_625
    pieces, tokens = load_surname_tokens()
    assert [pieces[token] for token in tokens[:5]] == ["sm", "ith\n", "jo", "h", "nson"]


@pytest.mark.parametrize(("bad", "error"), [(26, ValueError), (20_001, ValueError), (27.0, TypeError)])
def test_a_number_of_pieces_that_cannot_be_is_refused(bad, error):
    with pytest.raises(error, match="num_pieces must be"):
        load_surname_tokens(bad)

"""The real data in data/, checked against its checksum when it is read, and batches drawn from it in random order.

Nothing is downloaded. data/README.md says where each file comes from and under which licence it stands.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from course_lib import batches
from course_lib.batches import Batch, positive_int

DATA_FOLDER = Path(__file__).resolve().parent.parent / "data"
CHECKSUMS = {
    "digits.npz": "aa64e930663d6e9271e1566601d65e70236553f73ec6cb041a4ab37167cf1d04",
    "surnames.csv": "77d98669f9974ff0db57f334aa01c56058fe21b08ed46f8b49e59ae43eab3f65",
}
BLACKEST_PIXEL = 16  # a pixel counts the black ones in a block of 4 x 4


@dataclass(frozen=True, eq=False, repr=False)
class Digits:
    """Handwritten digits: `inputs` (N, 1, 8, 8) from 0 (blank) to 1 (black), `targets` (N,) int64 from 0 to 9."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __repr__(self) -> str:
        return f"Digits({len(self)} images of 8 x 8, {str(self.inputs.dtype).removeprefix('torch.')})"

    def first(self, num_samples: int) -> tuple[Tensor, Tensor]:
        """Return the first `num_samples` digits as the batch (inputs, targets): views, nothing is copied.

        Raises TypeError unless num_samples is a whole number, ValueError unless it is from 1 to len(self).
        """
        num_samples = positive_int("num_samples", num_samples)
        if num_samples > len(self):
            raise ValueError(f"num_samples must be at most {len(self)}, the number of digits; got {num_samples}")
        return self.inputs[:num_samples], self.targets[:num_samples]


@dataclass(frozen=True, eq=False, repr=False)
class Surnames:
    """Surnames, the most frequent first: `names` in lower case, `frequency_percent` (N,) float64, both in one order."""

    names: list[str]
    frequency_percent: Tensor

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Surnames({len(self)} names from {self.names[0]!r} to {self.names[-1]!r})"


def load_digits(dtype: torch.dtype = torch.float32) -> Digits:
    """Load the 1797 handwritten digits of 8 x 8 pixels.

    inputs: (1797, 1, 8, 8) in `dtype`, the source's 0 to 16 divided by 16, which no floating-point type has to round.
    targets: (1797,) int64. Classes alternate, so the first 64 hold each of them. Every call reads new tensors.
    Source: E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository, doi:10.24432/C50P49, CC BY 4.0.
    Raises TypeError for a dtype that is no floating-point type, FileNotFoundError or ValueError when the file is
    missing or altered.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point type such as torch.float32; got {dtype!r}")
    with np.load(io.BytesIO(_read_checked("digits.npz")), allow_pickle=False) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return Digits(inputs=images.unsqueeze(1).to(dtype) / BLACKEST_PIXEL, targets=labels.to(torch.int64))


def load_surnames() -> Surnames:
    """Load the 10,000 most frequent surnames of the 1990 US Census, in order of rank.

    names: letters a to z only, 2 to 13 of them. frequency_percent: (10000,) float64, in percent of the persons counted.
    Source: US Census Bureau (1995), file dist.all.last, public domain.
    Raises FileNotFoundError or ValueError when the file is missing or altered.
    """
    rows = list(csv.DictReader(io.StringIO(_read_checked("surnames.csv").decode("ascii"))))
    return Surnames(
        names=[row["name"] for row in rows],
        frequency_percent=torch.tensor([float(row["frequency_percent"]) for row in rows], dtype=torch.float64),
    )


def load_surname_tokens(num_pieces: int = 2048) -> tuple[list[str], Tensor]:
    """Load the surnames as one text, a name a line, cut into pieces of one to four letters: (pieces, tokens).

    pieces: `num_pieces` different strings, those of one letter and the line's end first, then the ones that save most
    letters. tokens: (N,) int64, numbers of pieces; joined they are the text again. With 2048 pieces N is 25,625.
    At each place the longest piece that fits is taken. Source of the names: see `load_surnames`.
    Raises TypeError or ValueError unless num_pieces is a whole number from 27 to 20,000.
    """
    if positive_int("num_pieces", num_pieces, at_least=27) > 20_000:
        raise ValueError(f"num_pieces must be at most 20000; got {num_pieces}")
    text = "".join(f"{name}\n" for name in load_surnames().names)
    found = Counter(text[start : start + size] for size in (2, 3, 4) for start in range(len(text) - size + 1))
    saved = {piece: count * (len(piece) - 1) for piece, count in found.items()}
    longer = sorted(saved, key=lambda piece: (-saved[piece], piece))
    pieces = (sorted(set(text)) + longer)[:num_pieces]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    tokens, start = [], 0
    while start < len(text):
        piece = next(piece for size in (4, 3, 2, 1) if (piece := text[start : start + size]) in numbers)
        tokens.append(numbers[piece])
        start += len(piece)
    return pieces, torch.tensor(tokens)


def shuffled_batches(
    batch: Batch, batch_size: int, *, seed: int, num_batches: int | None = None, drop_tail: bool = False
) -> Iterator[Batch]:
    """Yield batches of `batch_size` samples in random order, every sample once an epoch, in a new order each epoch.

    batch: all the data, in any structure of tensors that share their first dimension; the batches have that structure.
    num_batches: how many to yield, over as many epochs as it takes; None yields one epoch.
    An epoch whose last batch is short yields it short, also in the middle of a longer run, unless `drop_tail` is set;
    no batch mixes two epochs.
    The order depends on `seed` alone: the iterator has its own torch.Generator and leaves the global one alone.
    Raises TypeError or ValueError for a batch_size or num_batches below 1, a batch_size above the number of samples, a
    seed that is no whole number of at least 0, or tensors that disagree in length; all when called, not when iterated.
    """
    num_samples = batches.batch_size(batch)
    batch_size = positive_int("batch_size", batch_size)
    if batch_size > num_samples:
        raise ValueError(f"batch_size must be at most {num_samples}, the number of samples; got {batch_size}")
    generator = torch.Generator().manual_seed(positive_int("seed", seed, at_least=0))
    per_epoch = num_samples // batch_size if drop_tail else -(-num_samples // batch_size)
    num_batches = per_epoch if num_batches is None else positive_int("num_batches", num_batches)

    def draw() -> Iterator[Batch]:
        for index in range(num_batches):
            position = index % per_epoch
            if position == 0:
                order = torch.randperm(num_samples, generator=generator)
            chosen = order[position * batch_size : (position + 1) * batch_size]
            yield batches.map_tensors(lambda tensor, chosen=chosen: tensor[chosen.to(tensor.device)], batch)

    return draw()


def _read_checked(name: str) -> bytes:
    """Read a file of data/ and compare its checksum."""
    path = DATA_FOLDER / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing. course_lib reads its data from the repository: "
            "install it with `pip install -e .` from a full clone"
        )
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != CHECKSUMS[name]:
        raise ValueError(
            f"{path} was altered: its SHA-256 is {found}, expected {CHECKSUMS[name]}. "
            f"Restore it with `git checkout -- data/{name}`"
        )
    return content

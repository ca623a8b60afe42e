"""Make digits.npz and surnames.csv again, byte for byte, from the PyPI packages scikit-learn and names.

Only this script needs these packages; the course reads the two files it writes. Usage:

    pip install scikit-learn==1.9.1 names==0.3.0
    python data/make_data.py [folder]        # the folder of this script, unless another one is given

It prints the SHA-256 checksum of each file. They must be those in README.md and in course_lib/datasets.py.
"""

from __future__ import annotations

import csv
import hashlib
import io
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np

NUM_SURNAMES = 10_000


def write_digits(path: Path) -> None:
    """Write the images and labels that scikit-learn bundles as unsigned bytes into a compressed .npz file."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    arrays = {"images": digits.images.astype(np.uint8), "labels": digits.target.astype(np.uint8)}
    if not np.array_equal(arrays["images"], digits.images):
        raise ValueError("the pixels are no whole numbers from 0 to 255; storing them as bytes would change them")
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            # A date, a system and rights of our own: by default they would come from the clock and the machine.
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            content = io.BytesIO()
            np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
            archive.writestr(entry, content.getvalue(), zipfile.ZIP_DEFLATED, compresslevel=9)


def write_surnames(path: Path) -> None:
    """Write the first 10,000 rows of the census list: the name in lower case, its frequency as it stands there."""
    source = Path(find_spec("names").origin).parent / "dist.all.last"
    rows = [line.split() for line in source.read_text(encoding="ascii").splitlines()[:NUM_SURNAMES]]
    if [int(rank) for _, _, _, rank in rows] != list(range(1, NUM_SURNAMES + 1)):
        raise ValueError(f"{source.name} does not hold the ranks 1 to {NUM_SURNAMES} in order")
    with path.open("w", encoding="ascii", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["name", "frequency_percent"])
        writer.writerows([name.lower(), frequency_percent] for name, frequency_percent, _, _ in rows)


def main(folder: Path) -> None:
    """Write both files into `folder` and print their checksums."""
    for name, write in (("digits.npz", write_digits), ("surnames.csv", write_surnames)):
        write(folder / name)
        print(hashlib.sha256((folder / name).read_bytes()).hexdigest(), name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)

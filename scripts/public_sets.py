"""Public data sets by name: from their publishers' addresses, each file checked by its SHA-256."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from common.errors import DataError, one_line
from common.foreign import download


class PublicSet(NamedTuple):
    """A data set that its publisher lets everyone download."""

    about: str
    licence: str
    megabytes: float
    address: str  # the folder of its files
    files: Mapping[str, str]  # the SHA-256 of each file, or of the content of a .gz
    offline: str = ""  # the name of a quickstart that makes data of this kind; "" is the digits
    flags: tuple[str, ...] = ()  # for `python -m scripts.prepare`


_MOVIELENS = "https://files.grouplens.org/datasets/movielens"
_GROUPLENS = "GroupLens', for research, not for revenue (its README)"
# Sizes and digests of the archives: TensorFlow Datasets' checksums of them.
SETS = {
    "multi30k": PublicSet(
        "29,000 captions of photos in German and English",
        "none of its own; captions of Flickr30k are for research and teaching, not for revenue",
        1.3,
        "https://raw.githubusercontent.com/multi30k/dataset/"
        "c40b37b23d6387214f8ab37335b5a8672b9745f2/data/task1/raw",
        {
            "train.de.gz": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
            "train.en.gz": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
            "val.de.gz": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
            "val.en.gz": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
            "test_2016_flickr.de.gz": (
                "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16"
            ),
            "test_2016_flickr.en.gz": (
                "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182"
            ),
        },
        "transformer",
        ("--source_language=de",),  # the direction that others report
    ),
    "ml-100k": PublicSet(
        "100,000 ratings of films",
        _GROUPLENS,
        4.9,
        _MOVIELENS,
        {"ml-100k.zip": "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229"},
        "ncf",
    ),
    "ml-latest-small": PublicSet(
        "100,836 ratings of films, as of 2018",
        _GROUPLENS,
        1.0,
        _MOVIELENS,
        {"ml-latest-small.zip": "696d65a3dfceac7c45750ad32df2c259311949efec81f0f144fdfb91ebc9e436"},
        "ncf",
    ),
    "flower_photos": PublicSet(
        "3,670 photos of five kinds of flowers",
        "CC-BY, each photographer's: see LICENSE.txt in it",
        229,
        "https://storage.googleapis.com/download.tensorflow.org/example_images",
        {"flower_photos.tgz": "4c54ace7911aaffe13a365c34f650e71dd5bf1be0a58b464e5a7183e3e595d9c"},
    ),
}


def get(name: str) -> str:
    """Downloads the files of a set that are not in data/raw; returns the file or folder there.

    A .gz is stored unpacked. DataError if a file cannot be downloaded, or has other content than
    the published one.
    """
    dataset = SETS[name]
    has_folder = len(dataset.files) > 1
    folder = f"data/raw/{name}" if has_folder else "data/raw"
    print(
        f"{name}: {dataset.about}; licence: {dataset.licence}; {dataset.megabytes} MB from "
        f"{dataset.address}",
        flush=True,
    )
    os.makedirs(folder, exist_ok=True)
    for file, digits in dataset.files.items():
        address = f"{dataset.address}/{file}"
        try:
            download(address, os.path.join(folder, file.removesuffix(".gz")), digits)
        except ValueError as error:
            raise DataError(str(error)) from error
        except Exception as error:  # of the network, the disk, an archive
            pattern = f"{{{','.join(dataset.files)}}}" if has_folder else file
            quickstart = f"bash scripts/quickstart.sh {dataset.offline}".strip()
            raise DataError(
                f"{address} cannot be read: {one_line(error)}; without a network type "
                f"`curl -O '{dataset.address}/{pattern}'` on another machine, unpack each .gz, and "
                f"copy the files to {folder} here; `{quickstart}` needs no data"
            ) from error
    return folder if has_folder else os.path.join(folder, *dataset.files)

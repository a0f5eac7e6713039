"""`prepare coco` from gs:// to gs://, over Google's protocol."""

import re

import pytest

from scripts import prepare
from tests.benchmarks.detection.preparation.test_coco import RECORDS, SHARDS, contents, write_coco
from tests.benchmarks.resnet.preparation.test_imagenet_gcs import assert_same

SETTINGS = ["--subset", "--masks", *SHARDS]


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """(the archives' folder, {name: bytes} of what a run on local disk makes of them)."""
    folder = tmp_path_factory.mktemp("local")
    prepare.make("coco", [*write_coco(folder), *SETTINGS, f"--out={folder}/records"])
    return folder, contents(folder / "records")


@pytest.fixture
def raw(gcs, local):
    """A bucket that may only be read, with the archives and the open folder."""
    bucket = gcs.bucket("read")
    for path in local[0].rglob("*"):
        if path.is_file() and "records" not in path.parts:
            gcs.write(f"{bucket}/raw/{path.relative_to(local[0])}", path.read_bytes())
    return bucket


def archives(bucket):
    """The arguments for the archives in a bucket."""
    return [
        f"--train_images={bucket}/raw/train2017.zip",
        f"--val_images={bucket}/raw/val2017.zip",
        f"--annotations={bucket}/raw/annotations.zip",
        *SETTINGS,
    ]


@pytest.mark.long
def test_archives_and_folders_become_the_bytes_of_a_local_run(gcs, raw, local, capsys):
    out = gcs.bucket("objects")  # as roles/storage.objectAdmin has it
    prepare.make("coco", [*archives(raw), f"--out={out}/some/folder/", "--workers=16"])
    assert_same(gcs, f"{out}/some/folder", local[1])
    assert set(local[1]) == {*RECORDS, "instances_val2017.json", "manifest.json"}
    before = len(gcs.log())
    prepare.make("coco", [*archives(raw), f"--out={out}/some/folder"])
    assert "continuing: 5 of 5 shards" in capsys.readouterr().out
    again = [request for request, _, _ in gcs.log()[before:]]
    assert again and not [line for line in again if not line.startswith("GET ")]
    folders = [f"--{split}-images={raw}/raw/open/{split}2017" for split in ("train", "val")]
    folders += [f"--annotations={raw}/raw/open", *SETTINGS, f"--out={out}/again"]
    prepare.make("coco", folders)
    assert_same(gcs, f"{out}/again", local[1])


def test_an_image_is_one_ranged_read_and_nothing_is_unpacked(gcs, raw):
    out = gcs.bucket()
    prepare.make("coco", [*archives(raw), f"--out={out}/out"])
    written = {re.sub(r"tmp\.|\.[0-9a-f]{8}", "", name) for name in gcs.names(f"{out}/out")}
    records = {name for name in written if not name.startswith("prepare_state/")}
    assert records == {*RECORDS, "instances_val2017.json", "manifest.json"}
    paths = [request for request, _, _ in gcs.log() if "train2017.zip" in request]
    reads = [path for path in paths if "/storage/v1/" not in path]
    assert 12 <= len(reads) <= 12 + 10  # of 12 images, the directory, and both ends of the archive

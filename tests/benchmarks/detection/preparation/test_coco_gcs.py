"""`prepare coco` from gs:// to gs://, over Google's protocol."""

from scripts import prepare
from tests.benchmarks.detection.preparation.test_coco import RECORDS, SHARDS, contents, write_coco
from tests.benchmarks.resnet.preparation.test_imagenet_gcs import assert_same

SETTINGS = ["--masks", *SHARDS]


def test_archives_and_folders_become_the_bytes_of_a_local_run(gcs, tmp_path, capsys):
    """An image of a zip is one ranged read."""
    prepare.make("coco", [*write_coco(tmp_path), *SETTINGS, f"--out={tmp_path}/records"])
    expected, raw, out = contents(tmp_path / "records"), gcs.bucket("read"), gcs.bucket("objects")
    assert set(expected) == {*RECORDS, "instances_val2017.json", "manifest.json"}
    for path in tmp_path.rglob("*"):
        if path.is_file() and "records" not in path.parts:
            gcs.write(f"{raw}/{path.relative_to(tmp_path)}", path.read_bytes())
    inputs = [f"--{split}_images={raw}/{split}2017.zip" for split in ("train", "val")]
    command = [*inputs, f"--annotations={raw}/annotations.zip", *SETTINGS, f"--out={out}/a"]
    prepare.make("coco", [*command, "--workers=16"])
    assert_same(gcs, f"{out}/a", expected)
    paths = [request for request, _, _ in gcs.log() if "train2017.zip" in request]
    reads = [path for path in paths if "/storage/v1/" not in path]
    assert 12 <= len(reads) <= 12 + 10  # of 12 images, the directory, and both ends of the archive
    before = len(gcs.log())
    prepare.make("coco", command)
    assert "continuing: 5 of 5 shards" in capsys.readouterr().out
    again = [request for request, _, _ in gcs.log()[before:]]
    assert again and not [line for line in again if not line.startswith("GET ")]
    folders = [f"--{split}_images={raw}/open/{split}2017" for split in ("train", "val")]
    folders += [f"--annotations={raw}/open", *SETTINGS, f"--out={out}/b"]
    prepare.make("coco", folders)
    assert_same(gcs, f"{out}/b", expected)

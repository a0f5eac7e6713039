"""`prepare imagenet` from gs:// to gs://, over Google's protocol."""

import signal
import subprocess
import sys
import time

import pytest

from configs import resnet50
from scripts import prepare
from tests.benchmarks.resnet.preparation.test_imagenet import contents, pictures, write_imagenet
from tests.helpers.preparation import check_data, leaves, place
from tests.test_main import ROOT

SETTINGS = ["--subset", "--shards=5", "--validation_shards=2"]
PHOTOS = {  # names that mean something in an address, a shell or a format
    "50%": ["100%25.jpg", "1.jpg", "2.jpg"],
    "Dogs & cats #2": ["a b.jpg", "sub folder/why?.jpg", "semi;colon+plus=1.jpg"],
    "cats": ["#1.jpg", "$HOME.jpg", "'quoted\".jpg", "back\\slash.jpg"],
    "Äpfel?": ["ñandú 🐦.JPG", "1.jpg", "%s {0}.jpg"],
}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """(the archives' folder, {name: bytes} of what a run on local disk makes of them)."""
    folder = tmp_path_factory.mktemp("local")
    inputs, *_ = write_imagenet(folder)
    prepare.make("imagenet", [*inputs, *SETTINGS, f"--out={folder}/records"])
    return folder, contents(folder / "records")


def archives(bucket):
    """The arguments for the archives in a bucket."""
    return [
        f"--train={bucket}/raw/ILSVRC2012_img_train.tar",
        f"--validation={bucket}/raw/ILSVRC2012_img_val.tar",
        f"--validation_labels={bucket}/raw/synset_labels.txt",
        *SETTINGS,
    ]


@pytest.fixture
def raw(gcs, local):
    """A bucket that may only be read, with the archives."""
    bucket = gcs.bucket("read")
    for path in local[0].iterdir():
        if path.is_file():
            gcs.write(f"{bucket}/raw/{path.name}", path.read_bytes())
    return bucket


def result(gcs, folder):
    """{name: bytes} of all that lies in a folder but the state, which may hold anything."""
    names = [name for name in gcs.names(folder) if not name.startswith("prepare_state/")]
    return {name: gcs.read(f"{folder}/{name}") for name in names}


def assert_same(gcs, folder, expected):
    """A folder on gs:// holds what the local run wrote, and no remains anywhere."""
    assert result(gcs, folder) == expected
    assert not [name for name in gcs.names(folder) if "tmp." in name]


@pytest.mark.parametrize(
    ("request_", "finished"),
    [
        ("PUT .*name=out/tmp.train-00002", []),
        pytest.param("POST .*tmp.train-00001.*/rewriteTo/", [], marks=pytest.mark.slow),
        pytest.param("PUT .*state/tmp.train-00003", ["train-00003"], marks=pytest.mark.slow),
    ],
    ids=["shard", "rename", "state"],
)
def test_kill_9_in_the_middle_of_a_request(request_, finished, gcs, raw, local):
    """The request waits at the server; the process dies; the same command goes on."""
    out = f"{gcs.bucket()}/out"
    command = [*archives(raw), f"--out={out}"]
    gcs.fault(request_, delay=600.0)
    words = [sys.executable, "-m", "scripts.prepare", "imagenet", *command]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None and gcs.hits() == [0]:
        time.sleep(0.05)
    process.kill()
    assert gcs.hits() == [1] and process.wait() == -signal.SIGKILL
    gcs.clear_faults()
    left = result(gcs, out)
    kept = (name for name in left if not name.startswith("tmp.") and name != "prepare.lock")
    complete = {name: left[name] for name in kept}
    assert complete.items() <= local[1].items() and "manifest.json" not in complete
    assert {name.split("-of-")[0] for name in finished} <= {n.split("-of-")[0] for n in complete}
    prepare.make("imagenet", command)
    assert_same(gcs, out, local[1])


@pytest.mark.parametrize(
    ("where", "mode", "code", "words"),
    [
        ("out", "read", 1, ["storage.objects.create", "/out/prepare.lock"]),
        ("out", "missing", 1, ["The specified bucket does not exist", "nobody-made-this/out"]),
        ("in", "missing", 2, ["there is no file gs://nobody-made-this/raw/synset_labels.txt"]),
        ("train", "none", 1, ["does not have storage.objects.get", "img_train.tar"]),
    ],
)
def test_a_bucket_that_cannot_be_used_takes_one_line(where, mode, code, words, gcs, raw, capsys):
    bucket = "gs://nobody-made-this" if mode == "missing" else gcs.bucket(mode)
    inputs = archives(bucket if where == "in" else raw)
    if where == "train":
        inputs[0] = f"--train={bucket}/raw/ILSVRC2012_img_train.tar"
    out = f"{bucket if where == 'out' else gcs.bucket()}/out"
    status, line = leaves("imagenet", [*inputs, f"--out={out}"], capsys)
    assert status == code
    for word in words:
        assert word in line
    assert "{" not in line


@pytest.mark.long
def test_own_photos_with_odd_names(gcs, tmp_path, capsys):
    bucket = gcs.bucket()
    names = [f"{name}/{file}" for name, files in PHOTOS.items() for file in files]
    names += [f"{name}/more {i}.jpg" for name in PHOTOS for i in range(6)]
    photos = pictures(names)
    place(tmp_path / "my photos", photos)
    for name, data in photos.items():
        gcs.write(f"{bucket}/my photos/{name}", data)
    for marker in ("my photos/", "my photos/cats/"):  # what Google's console makes as folders
        gcs.write(f"{bucket}/{marker}", b"")
    flags = ["--layout=folder", "--validation_fraction=0.2"]
    prepare.make("imagenet", [*flags, f"--train={bucket}/my photos", f"--out={bucket}/own"])
    command = [*flags, f"--train={tmp_path}/my photos", f"--out={tmp_path}/own"]
    assert "--config.train_batch_size=8 " in prepare.make("imagenet", command)
    assert_same(gcs, f"{bucket}/own", contents(tmp_path / "own"))
    assert sum(check_data(resnet50.get_config(), f"{bucket}/own", tmp_path)) == len(names)

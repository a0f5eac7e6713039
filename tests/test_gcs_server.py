"""The server of gcs_server.py against the real, unmodified clients."""

import os
import ssl
import urllib.error
import urllib.request

import pytest

from ops.shards import tensorflow


@pytest.fixture
def gfile():
    return tensorflow().io.gfile


def test_files_and_folders(gcs, gfile):
    bucket = gcs.bucket()
    gfile.makedirs(f"{bucket}/a/b")
    assert gcs.names(bucket) == ["a/", "a/b/"]
    names = ["plain", "with space", "ü+&?#%.txt"]
    for name in names:
        with gfile.GFile(f"{bucket}/a/b/{name}", "w") as file:
            file.write("hello\n")
        with gfile.GFile(f"{bucket}/a/b/{name}", "a") as file:
            file.write("world\n")
        assert gcs.read(f"{bucket}/a/b/{name}") == b"hello\nworld\n"
        with gfile.GFile(f"{bucket}/a/b/{name}") as file:
            assert file.read() == "hello\nworld\n"
        assert gfile.stat(f"{bucket}/a/b/{name}").length == 12
    assert sorted(gfile.listdir(f"{bucket}/a/b")) == sorted(names)
    assert gfile.listdir(f"{bucket}/a") == ["b/"]
    assert gfile.glob(f"{bucket}/a/*/pl*") == [f"{bucket}/a/b/plain"]
    assert gfile.isdir(f"{bucket}/a") and not gfile.isdir(f"{bucket}/c")
    assert gfile.exists(bucket) and not gfile.exists(f"{bucket}/c")
    gfile.copy(f"{bucket}/a/b/plain", f"{bucket}/copy")
    gfile.rename(f"{bucket}/a/b", f"{bucket}/d")
    assert sorted(gcs.names(f"{bucket}/d")) == ["", *sorted(names)]
    gfile.remove(f"{bucket}/copy")
    gfile.rmtree(f"{bucket}/d")
    assert gcs.names(bucket) == ["a/"]


def test_a_large_file_and_pages_of_a_listing(gcs, gfile):
    bucket = gcs.bucket()
    data = os.urandom(3 << 20)
    with gfile.GFile(f"{bucket}/large", "wb") as file:
        file.write(data)
    assert gcs.read(f"{bucket}/large") == data
    with gfile.GFile(f"{bucket}/large", "rb") as file:
        file.seek(1 << 20)
        assert file.read(1000) == data[1 << 20 :][:1000]
    for i in range(1100):
        gcs.write(f"{bucket}/many/{i:04}", b"")
        if i % 2:
            gcs.write(f"{bucket}/many/{i:04}/below", b"")
    listed = gfile.listdir(f"{bucket}/many")
    assert sorted({name.rstrip("/") for name in listed}) == [f"{i:04}" for i in range(1100)]


def test_googles_own_client(gcs):
    from google.cloud import storage

    bucket = gcs.bucket()
    remote = storage.Client().get_bucket(bucket.removeprefix("gs://"))
    remote.blob("a/b").upload_from_string(b"some bytes")
    assert remote.blob("a/b").download_as_bytes() == b"some bytes"
    assert [blob.name for blob in remote.list_blobs(prefix="a/")] == ["a/b"]
    remote.blob("a/b").delete()
    assert gcs.names(bucket) == []


@pytest.mark.parametrize(
    ("mode", "reads", "writes", "asks"),
    [
        ("none", False, False, False),
        ("read", True, False, True),
        ("objects", True, True, False),
        ("full", True, True, True),
    ],
)
def test_permissions(mode, reads, writes, asks, gcs, gfile):
    tf = tensorflow()
    bucket = gcs.bucket(mode)
    gcs.write(f"{bucket}/file", b"text")

    def allowed(act):
        try:
            act()
        except tf.errors.PermissionDeniedError as error:
            assert "tpu-vm@project" in str(error)
            return False
        return True

    assert allowed(lambda: gfile.GFile(f"{bucket}/file").read()) == reads
    assert allowed(lambda: gfile.glob(f"{bucket}/f*")) == reads
    assert allowed(lambda: gfile.copy(f"{bucket}/file", f"{bucket}/new")) == writes
    assert allowed(lambda: gfile.exists(bucket)) == asks


def test_nothing_else_can_be_reached(gcs):
    trusted = ssl.create_default_context(cafile=gcs.env["CURL_CA_BUNDLE"])
    proxy = urllib.request.ProxyHandler({"https": gcs.env["HTTPS_PROXY"]})
    https = urllib.request.HTTPSHandler(context=trusted)
    opener = urllib.request.build_opener(proxy, https)
    with pytest.raises(OSError, match="403"):
        opener.open("https://example.com/")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        opener.open("https://storage.googleapis.com/storage/v1/b/any")
    assert "CONNECT example.com:443" in [row[0] for row in gcs.log()]


def test_faults_wait_their_turn_and_can_be_called_off(gcs, gfile):
    bucket = gcs.bucket()
    gcs.fault("uploadType=media", skip=1, status=403)
    gfile.makedirs(f"{bucket}/first")
    with pytest.raises(tensorflow().errors.PermissionDeniedError):
        gfile.makedirs(f"{bucket}/second")
    gcs.clear_faults()
    gfile.makedirs(f"{bucket}/second")
    assert gcs.names(bucket) == ["first/", "second/"]

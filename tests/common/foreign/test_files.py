"""Reading other libraries' files: the file that a path means, safetensors, damage, class names."""

import json
import os
import struct

import numpy as np
import pytest
import safetensors.numpy

from common import foreign
from common.errors import DataError
from common.foreign import files
from tests.helpers.pth import W, tensor, write_pth


def test_a_file_that_was_peeked_at_is_read_once_more(tmp_path):
    """The next `read` of the path takes it out of memory, and later ones read the file."""
    path = write_pth(tmp_path / "x.pth", {"a": tensor("0", W)}, {"0": W})
    other = write_pth(tmp_path / "y.pth", {"b": tensor("0", W)}, {"0": W})
    source = files.peek(path)
    assert files.peek(path) is source and list(files.read(other).arrays) == ["b"]
    assert files.read(path) is source and files.read(path) is not source
    files.peek(path)
    files.peek(other)  # the memory holds one file
    os.remove(path)
    with pytest.raises(DataError, match="cannot read"):
        files.read(path)
    files.read(other)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_files_that_are_cut_short(share, tmp_path):
    write_pth(tmp_path / "x.pth", {"w": tensor("0", W)}, {"0": W})
    safetensors.numpy.save_file({"w": W}, tmp_path / "x.safetensors")
    for path in (tmp_path / "x.pth", tmp_path / "x.safetensors"):
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(DataError, match=r"damaged|not a file of weights") as refused:
            files.read(str(path))
        assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_changed_byte_in_a_record(tmp_path):
    path = tmp_path / "x.pth"
    write_pth(path, {"w": tensor("0", W)}, {"0": W})
    path.write_bytes(path.read_bytes().replace(W.tobytes(), (W + 1).tobytes()))
    with pytest.raises(DataError, match="Bad CRC-32"):
        files.read(str(path))


def with_header(header, body):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


ENTRY = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}


def stored(entry, body=b"\0" * 12):
    return with_header({"w": entry}, body)


IS_NONE = r"is not a file of weights .* use \.safetensors,"
UNFINISHED = "is damaged or empty: get it again"
POINTER = b"version https://git-lfs.github.com/spec/v1\n"
INFINITE = np.array([1, np.inf, 2], "f").tobytes()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.h5", b"\x89HDF\r\n\x1a\n" * 9, IS_NONE),
        ("x.pth", b"", IS_NONE),
        ("x.pth", b"hello" * 9, IS_NONE),
        ("x.safetensors", b"", UNFINISHED),
        ("x.safetensors", b"<html>not found</html>", UNFINISHED),
        ("x.safetensors", POINTER, "is a pointer of Git LFS"),
        ("x.safetensors", stored(ENTRY, b"\0" * 8), "is damaged"),
        ("x.safetensors", stored({**ENTRY, "shape": [10**15]}), "is damaged"),
        ("x.safetensors", stored({**ENTRY, "dtype": "I16", "shape": [6]}), ".*w has the dtype I16"),
        ("x.safetensors", stored(ENTRY, INFINITE), ".*w has values that are not finite"),
        ("x.safetensors", with_header({}, b""), "holds no arrays"),
    ],
)
def test_what_is_no_complete_file_of_weights(name, data, words, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{name}:? {words}") as refused:
        files.read(str(path))
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)


def test_safetensors(tmp_path):
    path = str(tmp_path / "x.safetensors")
    arrays = {"w": W, "h": W.astype(np.float16), "n": np.int64(3)}
    safetensors.numpy.save_file({k: np.asarray(v) for k, v in arrays.items()}, path)
    read = files.read(path).arrays
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == np.asarray(array).dtype
    bf16 = {"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    (tmp_path / "x.safetensors").write_bytes(with_header(bf16, b"\x80\x3f\x00\xc0"))
    assert files.read(path).arrays["w"].tolist() == [1.0, -2.0]


def test_folders(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    assert foreign.find(str(folder)) == "" and foreign.find(str(tmp_path / "none")) == ""
    (folder / "notes.txt").touch()
    safetensors.numpy.save_file({"w": W}, str(folder / "a.safetensors"))
    assert foreign.find(str(folder)) == str(folder / "a.safetensors")
    for name in "bcdef":
        (folder / f"{name}.bin").touch()
    with pytest.raises(DataError, match=r"has the weights a.safe\w+, b.bin, c.bin, d.bin: name on"):
        foreign.find(str(folder))
    (folder / "model.safetensors").touch()
    assert foreign.find(str(folder)) == str(folder / "model.safetensors")
    (folder / "checkpoints").mkdir()
    assert foreign.find(str(folder)) == ""  # a workdir


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({"label_names": ["cat", "a\n dog"]}, ("cat", "a dog")),
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b")),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, ()),
        *(({"label_names": names}, ()) for names in ([1, "a"], "cat", None)),
    ],
)
def test_names_of_classes(config, labels, tmp_path):
    for name in ("model", "b"):
        safetensors.numpy.save_file({"w": W}, str(tmp_path / f"{name}.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert files.read(str(tmp_path / "model.safetensors")).labels == labels
    assert files.read(str(tmp_path / "b.safetensors")).labels == ()  # may be another model's
    (tmp_path / "labels.txt").write_text("x\ny\n")
    assert files.read(str(tmp_path / "model.safetensors")).labels == ("x", "y")
    (tmp_path / "labels.txt").write_bytes("x\nété\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"labels.txt, line 2 is not UTF-8 "):
        files.read(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("text", ["[]", "{", '{"a": '])
def test_a_description_that_is_no_object(text, tmp_path):
    safetensors.numpy.save_file({"w": W}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config.json is not a JSON object"):
        files.read(str(tmp_path / "model.safetensors"))


def test_every_element_finds_its_place():
    """Theirs are transposed, one is split; what does not fit is told."""
    shapes = {"params/a": (2, 3), "params/b": (4,)}

    def theirs(path, array):
        return {"a.w": array.T} if path == "params/a" else {"b.0": array[:1], "b.1": array[1:]}

    arrays = {
        "a.w": np.arange(6.0).reshape(3, 2),
        "b.0": np.array([9], np.float16),
        "b.1": np.arange(3.0),
    }
    found = files.adapt("f", arrays, shapes, theirs)
    np.testing.assert_array_equal(found["params/a"], arrays["a.w"].T)
    assert found["params/b"].tolist() == [9, 0, 1, 2] and found["params/b"].dtype == np.float32
    for change, words in (
        ({"a.w": np.zeros((2, 3))}, r"it has other shapes: a.w \[2, 3\] instead of \[3, 2\]$"),
        ({"c": np.zeros(1)}, "it has unknown arrays: c$"),
        ({"b.0": np.zeros(1, np.int8)}, "it has no weights, but whole numbers, in b.0$"),
    ):
        with pytest.raises(DataError, match=words):
            files.adapt("f", {**arrays, **change}, shapes, theirs)
    with pytest.raises(DataError, match="it lacks b.0, b.1$"):
        files.adapt("f", {"a.w": arrays["a.w"]}, shapes, theirs)

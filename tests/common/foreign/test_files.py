"""Reading other libraries' files: PyTorch's, safetensors; and hostile ones."""

import json
import os
import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from common import foreign
from common.errors import DataError
from common.foreign import files
from tests.helpers.pth import Call, Global, W, dumps, tensor, write_pth


def test_a_state_dict(tmp_path):
    half = np.arange(3).astype(ml_dtypes.bfloat16)
    content = {
        "a.weight": tensor("0", W),
        "module.b": tensor("0", W, offset=4, size=(2, 3), stride=(1, 2)),  # a view
        "c": Call("torch._utils", "_rebuild_parameter", tensor("1", half, "BFloat16Storage")),
        "empty": tensor("0", W, size=(0, 5), stride=(5, 1)),
    }
    source = files.read(write_pth(tmp_path / "x.pth", content, {"0": W, "1": half}))
    assert source.format == "PyTorch" and sorted(source.arrays) == ["a.weight", "b", "c", "empty"]
    np.testing.assert_array_equal(source.arrays["a.weight"], W)
    np.testing.assert_array_equal(source.arrays["b"], [[4, 6, 8], [5, 7, 9]])
    assert source.arrays["c"].dtype == ml_dtypes.bfloat16 and source.arrays["c"][2] == 2
    assert source.arrays["empty"].shape == (0, 5)


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


def test_a_training_checkpoint_gives_its_average(tmp_path):
    settings = Call("argparse", "Namespace", state={"lr": 0.1, "path": Call("pathlib", "Path")})
    content = {
        **{"model": {"w": tensor("0", W)}, "args": settings, "epoch": 3},
        "best": Call("numpy.core.multiarray", "scalar", Call("numpy", "dtype", "f8"), b"12345678"),
        "model_ema": {"n_averaged": tensor("0", W), "module.w": tensor("1", W)},
    }
    path = write_pth(tmp_path / "x.pth", content, {"0": W, "1": W + 1})
    source = files.read(path)
    assert source.format == "PyTorch, entry 'model_ema'" and list(source.arrays) == ["w"]
    np.testing.assert_array_equal(source.arrays["w"], W + 1)
    del content["model_ema"]
    source = files.read(write_pth(path, content, {"0": W}))
    np.testing.assert_array_equal(source.arrays["w"], W)


def test_a_dictionary_with_attributes(tmp_path):
    """PyTorch's has `_metadata`; others could hide the methods that its reader calls."""
    hidden = {"_metadata": Call("collections", "OrderedDict"), "items": 1, "get": 2, "keys": 3}
    rows = [("a.weight", tensor("0", W))]
    content = Call("collections", "OrderedDict", rows, state=hidden)
    source = files.read(write_pth(tmp_path / "x.pth", content, {"0": W}))
    assert list(source.arrays) == ["a.weight"]
    content = Call("collections", "OrderedDict", [("state_dict", content)], state=(hidden, hidden))
    source = files.read(write_pth(tmp_path / "x.pth", content, {"0": W}))
    assert source.format == "PyTorch, entry 'state_dict'"


EVIL = [("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("torch", "load")]
EVIL += [("torch.nn.modules.conv", "Conv2d"), ("numpy", "load"), ("os", "system\u0000.x")]


@pytest.mark.parametrize(("module", "name"), EVIL)
def test_a_pickle_that_would_run_something_is_refused_by_name(module, name, tmp_path):
    mark = tmp_path / "executed"
    content = {"w": tensor("0", W), "x": Call(module, name, f"touch {mark}")}
    path = write_pth(tmp_path / "x.pth", content, {"0": W})
    with pytest.raises(DataError, match="which is no part of weights; save only") as refused:
        files.read(path)
    assert f"{module}.{name}"[:9] in str(refused.value) and len(str(refused.value).split("\n")) == 1
    assert not mark.exists()


def build(target, state):
    """A pickle that changes what a name stands for."""
    return b"\x80\x02" + dumps(target)[2:-1] + dumps(state)[2:-1] + b"b."


PICKLES = {  # content: words of the refusal
    b"(S'id'\nios\nsystem\n.": "the operation INST",
    b"\x80\x02(cos\nsystem\nX\x02\x00\x00\x00ido.": "the operation OBJ",
    b"\x80\x02\x82\x01.": "the operation EXT1",
    b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x00.": "damaged",  # a bytearray that is not there
    b"\x80\x02Nr\xff\xff\xff\x7f.": "memo is larger",
    b"\x80\x02}": "damaged",
    b"": "damaged",
    b"\x80\x02" + b"(" * 200_000 + b".": "damaged",
    b"\x80\x02" + b"]" + b"]a" * 3 + b".": "holds no weights",
    build(Global("torch._utils", "_rebuild_tensor_v2"), (None, {"_call": 1})): "changes a function",
    build(Global("collections", "OrderedDict"), (None, {"update": 1})): "damaged",
    build(Global("argparse", "Namespace"), (None, {"append": 1})): "damaged",
    dumps({"w": 1, 2: "x"}): "holds no weights by name",
    dumps([tensor("0", W)]): "holds no weights by name",
    dumps({"w": tensor("7", W)}): "damaged.*no item named",
    dumps({"w": tensor("../data.pkl", W)}): "damaged",
    dumps({"w": tensor("0", W, "QInt8Storage")}): r"another dtype \('torch.QInt8Storage'\); save",
    dumps(
        {"w": Call("torch._utils", "_rebuild_tensor_v3", 1)}
    ): "another dtype .*_v3'.; save it as float32",
    dumps({"w": tensor("0", W, size=(4, 4))}): "larger than its storage",
    dumps({"w": tensor("0", W, size=(2, 2), stride=(8, 8))}): "beyond its storage",
    dumps({"w": tensor("0", W, size=(10**6, 10**6), stride=(0, 0))}): "larger than its storage",
    dumps({"w": tensor("0", W, offset=-1)}): "larger than its storage",
    dumps({"w": tensor("0", W, size=("a",), stride=(1,))}): "damaged",
}


@pytest.mark.parametrize("content", PICKLES, ids=lambda data: repr(data[:16]))
def test_hostile_and_damaged_pickles(content, tmp_path):
    path = write_pth(tmp_path / "x.pth", content, {"0": W})
    with pytest.raises(DataError, match=PICKLES[content]) as refused:
        files.read(path)
    assert str(refused.value).startswith(path) and "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1500


def test_bombs_and_foreign_archives(tmp_path):
    content = {"w": tensor("0", np.zeros(10**7, np.float32))}
    zeros = {"0": np.zeros(10**7, np.float32)}
    path = write_pth(tmp_path / "x.pth", content, zeros, zipfile.ZIP_DEFLATED)
    with pytest.raises(DataError, match=r"its record \S+ is compressed or larger than the file"):
        files.read(path)
    write_pth(path, {"w": tensor("0", W)}, {"0": W}, byteorder="big")
    with pytest.raises(DataError, match="big-endian"):
        files.read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("holiday.jpg", b"")
    with pytest.raises(DataError, match="it has no data.pkl"):
        files.read(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated_files(share, tmp_path):
    paths = [write_pth(tmp_path / "x.pth", {"w": tensor("0", W)}, {"0": W})]
    paths.append(str(tmp_path / "x.safetensors"))
    safetensors.numpy.save_file({"w": W}, paths[-1])
    for path in paths:
        data = Path(path).read_bytes()
        Path(path).write_bytes(data[: int(len(data) * share)])
        with pytest.raises(DataError, match=r"damaged|no file of weights") as refused:
            files.read(path)
        assert path in str(refused.value) and "\n" not in str(refused.value)


def test_a_changed_byte_in_a_record(tmp_path):
    path = write_pth(tmp_path / "x.pth", {"w": tensor("0", W)}, {"0": W})
    data = Path(path).read_bytes()
    Path(path).write_bytes(data.replace(W.tobytes(), (W + 1).tobytes()))
    with pytest.raises(DataError, match="Bad CRC-32"):
        files.read(path)


def lying(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


ENTRY = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
HEADERS = [
    lying({"w": ENTRY}, b"\0" * 8),  # fewer bytes than it says
    lying({"w": ENTRY}, b"\0" * 16),
    lying({"w": {**ENTRY, "shape": [10**15]}}, b"\0" * 12),
    lying({"w": {**ENTRY, "shape": [2**62, 8]}}, b"\0" * 12),
    lying({"w": {**ENTRY, "data_offsets": [4, 2]}}, b"\0" * 12),
    lying({"a": ENTRY, "w": ENTRY}, b"\0" * 12),  # overlapping
    lying({"w": {**ENTRY, "dtype": "F99"}}, b"\0" * 12),
    lying(b"{" * 100_000),
    struct.pack("<Q", 2**63) + b"{}",
    lying({"w": {**ENTRY, "dtype": "I16", "shape": [6]}}, b"\0" * 12),  # valid, not supported
    lying({}),
]


@pytest.mark.parametrize("data", HEADERS, ids=range(len(HEADERS)))
def test_safetensors_headers_that_lie(data, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(DataError) as refused:
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
    (tmp_path / "x.safetensors").write_bytes(lying(bf16, b"\x80\x3f\x00\xc0"))
    assert files.read(path).arrays["w"].tolist() == [1.0, -2.0]


@pytest.mark.parametrize(("name", "data"), [("x.h5", b"\x89HDF\r\n\x1a\n"), ("x.keras", b"PK\3\4")])
def test_files_of_keras_are_refused(name, data, tmp_path):
    (tmp_path / name).write_bytes(data + b"\0" * 64)
    with pytest.raises(DataError, match=rf"{name} is no file of weights .* use \.safetensors, .*"):
        files.read(str(tmp_path / name))


def test_folders(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    assert foreign.find(str(folder)) == "" and foreign.find(str(tmp_path / "none")) == ""
    for name in ("model.safetensors", "b.pth"):
        safetensors.numpy.save_file({"w": W}, str(folder / name))
    assert foreign.find(str(folder)) == str(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"label_names": ["cat", "a\n dog"]}))
    assert files.read(str(folder / "model.safetensors")).labels == ("cat", "a dog")
    assert files.read(str(folder / "b.pth")).labels == ()  # may be another model's
    (folder / "config.json").write_text(json.dumps({"id2label": {"1": "b", "0": "a"}}))
    assert files.read(str(folder / "model.safetensors")).labels == ("a", "b")
    for config, labels in (
        ({"label_names": ["cat"], "id2label": {"0": "b"}}, ("cat",)),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, ()),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_x"}}, ("LABEL_0", "LABEL_x")),
        *(({"label_names": names}, ()) for names in ([1, "a"], "cat", {"a": "b"}, None)),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        assert files.read(str(folder / "model.safetensors")).labels == labels
    (folder / "labels.txt").write_text("x\ny\n")
    assert files.read(str(folder / "model.safetensors")).labels == ("x", "y")
    for text in ("[" * 100_000, "[]", "{", '{"a": '):
        (folder / "config.json").write_text(text)
        with pytest.raises(DataError, match=r"config.json is no JSON object"):
            files.read(str(folder / "model.safetensors"))
    os.rename(folder / "model.safetensors", folder / "a.pth")
    with pytest.raises(DataError, match=r"has the weights a.pth, b.pth: name one of them"):
        foreign.find(str(folder))
    for name in "cdef":
        (folder / f"{name}.bin").touch()
    with pytest.raises(DataError, match=r"has the weights a.pth, b.pth, c.bin, d.bin: name one"):
        foreign.find(str(folder))
    (folder / "checkpoints").mkdir()
    assert foreign.find(str(folder)) == ""  # a workdir


def test_a_folder_with_one_file_and_the_largest_size(tmp_path, monkeypatch):
    path = tmp_path / "some.safetensors"
    safetensors.numpy.save_file({"w": W}, str(path))
    (tmp_path / "notes.txt").touch()
    assert foreign.find(str(tmp_path)) == foreign.find(str(path)) == str(path)
    size = path.stat().st_size
    monkeypatch.setattr(files, "_MOST_BYTES", size)
    assert list(files.read(str(path)).arrays) == ["w"]
    monkeypatch.setattr(files, "_MOST_BYTES", size - 1)
    with pytest.raises(DataError, match=f"has {size} bytes: more than {size - 1} are not read"):
        files.read(str(path))


def test_half_of_a_checkpoint_of_tensorflow(tmp_path):
    """Format V1 is known by its end; without it the file beside it says what it is."""
    (tmp_path / "model.ckpt-9").write_bytes(bytes(99))
    (tmp_path / "model.ckpt-9.meta").write_bytes(b"")
    with pytest.raises(DataError, match=r"model.ckpt-9 is damaged or cut short: .*-9.meta says"):
        files.read(str(tmp_path / "model.ckpt-9"))


@pytest.mark.parametrize("data", [b"", b"\x89PNG", b"hello" * 9, bytes(range(7, 71))])
def test_what_is_no_file_of_weights(data, tmp_path):
    path = tmp_path / "x.pth"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"no file of weights that can be read|damaged"):
        files.read(str(path))

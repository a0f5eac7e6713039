"""PyTorch's files, in zip archives and from before 1.6: what they hold, and that nothing runs."""

import zipfile

import ml_dtypes
import numpy as np
import pytest

from common.errors import DataError
from common.foreign import files
from tests.helpers.pth import Call, Global, Storage, W, dumps, old_pth, tensor, write_pth


def test_a_state_dict(tmp_path):
    half = np.arange(3).astype(ml_dtypes.bfloat16)
    rows = [
        ("a.weight", tensor("0", W)),
        ("module.b", tensor("0", W, offset=4, size=(2, 3), stride=(1, 2))),  # a view
        ("c", Call("torch._utils", "_rebuild_parameter", tensor("1", half, "BFloat16Storage"))),
        ("empty", tensor("0", W, size=(0, 5), stride=(5, 1))),
    ]
    # PyTorch's dictionaries have `_metadata`; others could hide the methods that the reader calls.
    state = {"_metadata": Call("collections", "OrderedDict"), "items": 1, "get": 2}
    content = Call("collections", "OrderedDict", rows, state=state)
    source = files.read(write_pth(tmp_path / "x.pth", content, {"0": W, "1": half}))
    assert source.format == "PyTorch" and sorted(source.arrays) == ["a.weight", "b", "c", "empty"]
    np.testing.assert_array_equal(source.arrays["a.weight"], W)
    np.testing.assert_array_equal(source.arrays["b"], [[4, 6, 8], [5, 7, 9]])
    assert source.arrays["c"].dtype == ml_dtypes.bfloat16 and source.arrays["c"][2] == 2
    assert source.arrays["empty"].shape == (0, 5)


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


def test_a_file_from_before_zip_archives(tmp_path):
    """Tensors and parameters in the forms that PyTorch had from 0.4 to 1.5."""
    storage, torch = Storage("7", "FloatStorage", 12, None), "torch._utils"
    part = Storage("7", "FloatStorage", 12, ("8", 4, 6))
    hooks = Call("collections", "OrderedDict")
    more = False, hooks
    plain = Call(torch, "_rebuild_tensor_v2", storage, 0, (3, 4), (4, 1), *more)
    number = Storage("9", "LongStorage", 1, None)
    rows = [
        ("module.a", plain),
        ("b", Call(torch, "_rebuild_tensor_v2", part, 1, (2, 2), (1, 2), *more)),
        ("c", Call(torch, "_rebuild_parameter", plain, True, hooks)),
        ("d", Call(torch, "_rebuild_tensor_v2", number, 0, (1,), (1,), *more)),
    ]
    data = old_pth(Call("collections", "OrderedDict", rows), {"9": np.array([5]), "7": W})
    (tmp_path / "x.pth").write_bytes(data)
    source = files.read(str(tmp_path / "x.pth"))
    assert source.format == "PyTorch" and list(source.arrays) == ["a", "b", "c", "d"]
    for name in ("a", "c"):
        np.testing.assert_array_equal(source.arrays[name], W, strict=True)
    np.testing.assert_array_equal(source.arrays["b"], [[5, 7], [6, 8]])
    assert source.arrays["d"].tolist() == [5]
    for size in (0, 1, 13, 40, 200, len(data) - 60, len(data) - 1):
        with pytest.raises(DataError, match=r"x.pth is (damaged|not a file)") as refused:
            (tmp_path / "x.pth").write_bytes(data[:size])
            files.read(str(tmp_path / "x.pth"))
        assert "\n" not in str(refused.value)


EVIL = [("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("torch", "load")]
EVIL += [("torch.nn.modules.conv", "Conv2d"), ("numpy", "load")]


@pytest.mark.parametrize(("module", "name"), EVIL)
@pytest.mark.parametrize("write", [write_pth, lambda path, *args: path.write_bytes(old_pth(*args))])
def test_a_pickle_that_would_run_something_does_not(module, name, write, tmp_path):
    mark, path = tmp_path / "executed", tmp_path / "x.pth"
    write(path, {"w": tensor("0", W), "x": Call(module, name, f"touch {mark}")}, {"0": W})
    assert list(files.read(str(path)).arrays) == ["w"] and not mark.exists()


PICKLES = {  # content: words of the refusal
    b"(S'id'\nios\nsystem\n.": "holds no weights by name",
    b"\x80\x02(cos\nsystem\nX\x02\x00\x00\x00ido.": "holds no weights by name",
    b"\x80\x02\x82\x01.": "damaged",  # an extension
    b"\x80\x02}": "damaged",
    # A change of what a name stands for
    b"\x80\x02" + dumps(Global("argparse", "Namespace"))[2:-1] + b"}b.": "damaged",
    dumps({"w": 1, 2: "x"}): "holds no weights by name",
    dumps([tensor("0", W)]): "holds no weights by name",
    dumps({"w": tensor("7", W)}): "damaged.*no item named",
    dumps({"w": tensor("0", W, "QInt8Storage")}): "it has a QInt8Storage: save",
    dumps({"w": Call("torch._utils", "_rebuild_tensor_v3", 1)}): "holds no weights by name",
    dumps({"w": tensor("0", W, size=(4, 4))}): "larger than its storage",
    dumps({"w": tensor("0", W, size=(2, 2), stride=(8, 8))}): "damaged",
    dumps({"w": tensor("0", W, offset=-1)}): "damaged",
}


@pytest.mark.parametrize("content", PICKLES, ids=lambda data: repr(data[:16]))
def test_damaged_pickles_and_other_contents(content, tmp_path):
    path = write_pth(tmp_path / "x.pth", content, {"0": W})
    with pytest.raises(DataError, match=PICKLES[content]) as refused:
        files.read(path)
    assert str(refused.value).startswith(path) and "\n" not in str(refused.value)


ONE = {"w": tensor("0", W)}
HUGE = {"w": tensor("0", W, count=10**12)}
OLD = {  # bytes: words of the refusal
    old_pth(ONE, {"0": W}, magic=5): "it does not begin as PyTorch writes it",
    old_pth(ONE, {"0": W[:2]}): "its storage 0 has 8 elements, not 12",
    old_pth(ONE, {}): "its list of storages differs from the storages of its arrays",
    old_pth(HUGE, {"0": W}): "its storages are larger than the file",
    old_pth({"w": Call("torch.nn.parameter", "Parameter")}, {}): "holds no weights",
    old_pth({"w": Call("torch._utils", "_rebuild_tensor")}, {}): "PyTorch before 0.4 wrote it: .*",
    dumps({"w": 1}): "damaged",
}


@pytest.mark.parametrize("data", OLD, ids=OLD.get)
def test_damaged_files_from_before_zip_archives(data, tmp_path):
    (tmp_path / "x.pth").write_bytes(data)
    with pytest.raises(DataError, match=OLD[data]) as refused:
        files.read(str(tmp_path / "x.pth"))
    message = str(refused.value)
    assert message.startswith(f"{tmp_path}/x.pth") and len(message.splitlines()) == 1


def test_other_archives(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pth", "w") as archive:
        archive.writestr("holiday.jpg", b"")
    with pytest.raises(DataError, match="it has no data.pkl"):
        files.read(str(tmp_path / "x.pth"))

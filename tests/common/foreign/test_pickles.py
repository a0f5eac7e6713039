"""PyTorch's files from before 1.6, which are five pickles and then the storages."""

import numpy as np
import pytest

from common.errors import DataError
from common.foreign import files
from tests.helpers.pth import Call, Storage, W, dumps, old_pth, tensor


def test_a_file_from_before_zip_archives(tmp_path):
    """Tensors and parameters in the forms that PyTorch had up to 0.3, and then up to 1.5."""
    storage, torch = Storage("7", "FloatStorage", 12, None), "torch._utils"
    part = Storage("7", "FloatStorage", 12, ("8", 4, 6))
    plain = Call(torch, "_rebuild_tensor", storage, 0, (3, 4), (4, 1))
    number = Storage("9", "LongStorage", 1, None)
    hooks = Call("collections", "OrderedDict")
    parameter = Call("torch.nn.parameter", "Parameter", plain, state=(True, False, hooks))
    rows = [
        ("module.a", parameter),
        ("b", Call(torch, "_rebuild_tensor_v2", part, 1, (2, 2), (1, 2), False, hooks)),
        ("c", Call(torch, "_rebuild_parameter", plain, True, hooks)),
        ("d", Call(torch, "_rebuild_tensor", number, 0, (1,), (1,))),
    ]
    content = Call("collections", "OrderedDict", rows)
    arrays = {"9": np.array([5]), "7": W}
    data = old_pth(content, arrays)
    (tmp_path / "x.pth").write_bytes(data)
    source = files.read(str(tmp_path / "x.pth"))
    assert source.format == "PyTorch" and list(source.arrays) == ["a", "b", "c", "d"]
    np.testing.assert_array_equal(source.arrays["a"], W, strict=True)
    np.testing.assert_array_equal(source.arrays["b"], [[5, 7], [6, 8]])
    np.testing.assert_array_equal(source.arrays["c"], W)
    assert source.arrays["d"].tolist() == [5]
    with pytest.raises(ValueError, match="read-only"):
        source.arrays["a"][...] = 0
    for size in (0, 1, 13, 40, 200, len(data) - 60, len(data) - 1):
        with pytest.raises(DataError, match=r"x.pth is (damaged|no file)") as refused:
            (tmp_path / "x.pth").write_bytes(data[:size])
            files.read(str(tmp_path / "x.pth"))
        assert "\n" not in str(refused.value)


HUGE = Storage("0", "FloatStorage", 10**12, None)
HUGE = Call("torch._utils", "_rebuild_tensor", HUGE, 0, (), ())
ONE = {"w": tensor("0", W)}
OLD = {  # bytes: words of the refusal
    old_pth(ONE, {"0": W}, magic=5): "it begins with another number",
    old_pth(ONE, {"0": W}, little_endian=False): "big-endian",
    old_pth(ONE, {"0": W[:2]}): "has 8 elements in 32 bytes, not 12 in 48",
    old_pth(ONE, {"0": W[:2], "1": W}, keys=["0"]): "has 8 elements in 48 bytes, not 12 in 48",
    old_pth(ONE, {}): "its list of storages is not that of its arrays",
    old_pth(ONE, {"0": W, "1": W}): "its list of storages",
    old_pth({"w": HUGE}, {"0": W}): "its storages are larger than the file",
    old_pth({"a": tensor("0", W), "b": tensor("0", W, "IntStorage")}, {"0": W}): "has two dtypes",
    old_pth(Call("torch.nn.parameter", "Parameter"), {}): "holds no weights",
    old_pth({"w": Call("torch.nn.parameter", "Parameter")}, {}): "holds no weights",
    old_pth({"w": tensor("0", W), "x": Call("os", "system", "false")}, {"0": W}): "'os.system'",
    dumps(0x1950A86A20F9469CFC6C) + dumps(Call("os", "system", "false")): "'os.system'",
    dumps({"w": 1}): "damaged",
}


@pytest.mark.parametrize("data", OLD, ids=OLD.get)
def test_hostile_and_lying_files_from_before_zip_archives(data, tmp_path):
    (tmp_path / "x.pth").write_bytes(data)
    with pytest.raises(DataError, match=OLD[data]) as refused:
        files.read(str(tmp_path / "x.pth"))
    message = str(refused.value)
    assert message.startswith(f"{tmp_path}/x.pth") and len(message.splitlines()) == 1

"""The doctor with weights of each kind that a run can begin with."""

import json

import numpy as np
import pytest

from commands import doctor
from common.foreign import resnets
from tests.benchmarks.resnet.use.test_tensorflow_weights import arrays_of, saved
from tests.common.foreign.test_resnets import variables
from tests.conftest import make_tiny_config, resolved
from tests.helpers.pth import old_pth, tensor, write_pth


def pytorch(folder, is_old):
    """A narrow ResNet-18 for 4 classes."""
    params, state = variables(18, num_classes=4)
    arrays = {k: np.ascontiguousarray(v) for k, v in resnets.names(params, state).items()}
    content = {name: tensor(name, array) for name, array in arrays.items()}
    path = folder / "x.pth"
    if is_old:
        path.write_bytes(old_pth(content, arrays))
        return str(path)
    return write_pth(path, content, arrays)


def tensorflow(folder, form):
    saved(folder / "x.ckpt", arrays_of(18, projects=True), form)
    return f"{folder}/x.ckpt"


FILES = {
    "PyTorch": lambda folder: pytorch(folder, False),
    "PyTorch before 1.6": lambda folder: pytorch(folder, True),
    "TensorFlow V1": lambda folder: tensorflow(folder, 1),
    "TensorFlow V2": lambda folder: tensorflow(folder, 2),
}


@pytest.mark.parametrize("kind", FILES)
def test_the_doctor_reads_what_training_reads(kind, tiny_records, tmp_path, monkeypatch, capsys):
    path = FILES[kind](tmp_path)
    monkeypatch.setattr(doctor, "_CHECKS", {"initial weights": doctor._initial_weights})
    config = make_tiny_config(tiny_records, init_from=path)
    settings, _ = resolved(config, f"{tmp_path}/run", "doctor")
    assert doctor.run(settings, True) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["status"] == "ok" and row["text"].startswith(f"{path}: "), row["text"]
    assert "arrays taken, " in row["text"] and " 0 left" in row["text"]

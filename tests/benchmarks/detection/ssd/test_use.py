"""An SSD as an ONNX graph."""

import jax
import numpy as np
import pytest

from benchmarks.detection.use import distance
from commands import export
from commands.export import formats, programs
from engine.checkpoint import model_source
from tests.commands.conftest import opens  # noqa: F401 (a fixture)
from tests.commands.predict.test_boxes import (
    data,  # noqa: F401 (fixtures)
    model,  # noqa: F401 (fixtures)
)


@pytest.mark.long
@pytest.mark.parametrize("model", ["ssd"], indirect=True)
@pytest.mark.parametrize("changes", [{}, {"antialias": True, "clip_boxes": False}])
def test_onnx_has_the_same_detections(model, changes, tmp_path, capsys, monkeypatch):  # noqa: F811
    pytest.importorskip("onnxruntime")
    opened = model[0].changed(**changes)
    monkeypatch.setattr(model_source, "load", lambda *_, **__: opened)
    export.run("any", "latest", "onnx", str(tmp_path / "out"))
    assert capsys.readouterr().out.startswith("onnx: model.onnx, ")
    run = formats.read("onnx", str(tmp_path / "out" / "model.onnx"))
    (program,) = opened.benchmark.uses.programs(opened.params, opened.model_state).values()
    for shape, limit in (((64, 64), 1e-5), ((31, 87), programs.PREDICTED_LIMIT)):
        photo = np.random.default_rng(5).integers(0, 256, (*shape, 3), np.uint8)
        results, outputs = dict(run({"photo": photo})), jax.jit(program.compute)({"photo": photo})
        wanted = {name: np.asarray(x) for name, x in outputs.items()}
        for name, x in wanted.items():
            assert (results[name].shape, results[name].dtype) == (x.shape, x.dtype)
        assert np.sum(wanted["score"] > 0.1) > 3
        assert distance(wanted, results, 0.05) <= limit
        assert distance(wanted, results | {"class": results["class"] + 1}, 0.05) == 1

"""The picture of README.md, from a run of a detector."""

import json

import pytest
from PIL import Image

from scripts import front_page


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "eval").mkdir()
    scenes = Image.new("RGB", (300, 180), "red")
    scenes.paste("blue", (200, 0, 300, 180))  # the last third
    scenes.save(tmp_path / "eval" / "detections.png")
    rows = [{"split": "train", "epoch": k, "loss": 1 / (k + 1)} for k in range(3)]
    rows += [{"split": "eval", "epoch": k, "mAP": 0.1 * k} for k in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_scenes_stand_beside_curves(workdir, capsys):
    out = workdir / "page.png"
    front_page.main([str(workdir), str(out)])
    page = Image.open(out)
    assert page.size == (720 * 200 // 180 + 480, 720)
    colours = page.convert("RGB")
    assert colours.getpixel((10, 700)) == colours.getpixel((790, 10)) == (255, 0, 0)
    assert colours.getpixel((805, 5)) == (255, 255, 255)
    assert capsys.readouterr().out == f"wrote {out} ({out.stat().st_size / 1e3:.0f} kB)\n"


def test_a_run_that_is_not_evaluated_is_one_line(workdir):
    (workdir / "eval" / "detections.png").unlink()
    with pytest.raises(SystemExit, match=r"^front_page: .*; first bash scripts/quickstart.sh ssd$"):
        front_page.main([str(workdir), str(workdir / "page.png")])

"""--mode=export --format=ctranslate2: other programs translate as predict.py does."""

import json

import numpy as np
import pytest

from commands import export
from tests.commands.predict import test_sentences

ctranslate2 = pytest.importorskip("ctranslate2")
translator = test_sentences.model  # a fixture


@pytest.mark.parametrize("translator", ["transformer"], indirect=True)
def test_x(translator, tmp_path, capsys):
    out = tmp_path / "out"
    export.run("any", "latest", "ctranslate2", str(out))
    print(capsys.readouterr().out)
    print((out / "README.md").read_text(), (out/"export.json").read_text())
    import subprocess
    print(subprocess.run(["ls","-lR",str(out)],capture_output=True,text=True).stdout)
    assert 0

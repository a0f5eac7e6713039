"""Writes a translator for other programs: for CTranslate2, and for Hugging Face's transformers.

CTranslate2's folder has a script, which translates as predict.py does.
"""

import math
import os
import pathlib
import runpy
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from safetensors import numpy as safetensors

from commands.export import formats
from common.errors import OutputError, count
from common.exportable import Translated
from engine.checkpoint import model_source

_LIMIT = 1e-4  # of a score, or of its share if the score is above 1
_SCRIPT = pathlib.Path(__file__).with_name("translate.py")


def _write_ctranslate2(model: model_source.Model, folder: str) -> dict[str, Any]:
    """Writes CTranslate2's format into a local `folder`, in float32; returns its facts.

    OutputError if what was written computes something else than predict.py.
    """
    path = f"{folder}/{formats.PATHS['ctranslate2']}"
    os.mkdir(path)
    examples = model.in_float32().benchmark.uses.write_ctranslate2(model.params, path)
    translate = runpy.run_path(shutil.copy(_SCRIPT, path))["Translator"](path)
    error, same = _check(translate, examples)
    equal = f"{same} of {count(len(examples), 'translation')}"
    size = formats.megabytes(path)
    print(f"ctranslate2: {size:.1f} MB, scores are off by {error:.1e}; {equal} equal predict.py's")
    packages = ["ctranslate2", "sentencepiece"][: 1 + bool(translate.rules["sentencepiece"])]
    return {"path": "ctranslate2", "error": error, "equal": equal, "packages": packages}


def _check(translate: Any, examples: Sequence[Translated]) -> tuple[float, int]:
    """(the largest difference of a score, the number of equal translations).

    The network must give predict.py's translations their probabilities. Its search has other rules,
    by which a few translations differ.
    """
    pairs = [x.source[1] for x in examples], [x.translation[1] for x in examples]
    scored = translate.model.score_batch(*pairs, max_input_length=0)
    found = translate([x.source[0] for x in examples])
    errors, same = [], 0
    for x, probabilities, (text, _) in zip(examples, scored, found, strict=True):
        texts = translate.text.split(x.source[0]), translate.join(x.translation[1])
        if texts != (x.source[1], x.translation[0]):
            raise OutputError(
                "--format=ctranslate2: the script cuts or joins words in another way than "
                f"predict.py in {x.source[0]!r}; nothing is exported"
            )
        logp = probabilities.log_probs[: len(x.translation[1]) + (not x.is_cut)]
        same += text == x.translation[0]
        score = translate.score(sum(logp), len(logp))
        errors.append(abs(score - x.score) / max(abs(x.score), 1))
    error = max(errors, key=lambda x: math.inf if math.isnan(x) else x)
    if not error <= _LIMIT:
        raise OutputError(
            f"--format=ctranslate2: scores are off by {error:.1e}, more than {_LIMIT:.0e}; nothing "
            "is exported"
        )
    return error, same


def _write_hf(model: model_source.Model, folder: str) -> dict[str, Any]:
    """Writes the folder of Hugging Face's transformers into a local `folder`; returns its facts.

    OutputError if other weights are read back.
    """
    uses, file = model.benchmark.uses, f"{folder}/{formats.PATHS['hf']}"
    arrays, files = uses.foreign_folder(model.params)
    safetensors.save_file(dict(arrays), file, {"format": "pt"})
    for name, content in files.items():
        pathlib.Path(folder, name).write_bytes(content)
    back = uses.read_foreign(file)
    assert back is not None
    pairs = zip(*map(jax.tree.leaves, (back.params, model.params)), strict=True)
    error = float(max(np.max(np.abs(a - b)) for a, b in pairs))
    if error:
        raise OutputError(f"--format=hf: weights are off by {error:.1e}; nothing is exported")
    print(f"hf: {formats.megabytes(file):.1f} MB, the same weights")
    return {"path": formats.PATHS["hf"], "error": error}


FORMS = {"ctranslate2": _write_ctranslate2, "hf": _write_hf}

"""Writes a translator for CTranslate2, with a script that translates as predict.py does."""

import importlib.util
import math
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from commands.export import formats
from common.errors import OutputError, count
from common.exportable import Example, ExportableTranslator

_LIMIT = 1e-4  # of a score, or of its share if that is less
_SHARE = 0.5  # of the translations that another search may change
_SCRIPT = pathlib.Path(__file__).with_name("translate.py")


def write(translator: ExportableTranslator, folder: str) -> dict[str, Any]:
    """Writes the format into a new folder in a local `folder`, and checks it; returns its facts.

    OutputError if what was written computes something else than predict.py.
    """
    path = f"{folder}/{formats.PATHS['ctranslate2']}"
    os.mkdir(path)
    translator.save(path)
    script = shutil.copy(_SCRIPT, path)
    examples = translator.examples()
    spec = importlib.util.spec_from_file_location("exported", script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    translate = module.Translator(path)
    error, same = _check(translate, examples)
    print(
        f"ctranslate2: {formats.megabytes(path):.1f} MB, scores are off by {error:.1e}; "
        f"{same} of {count(len(examples), 'translation')} equal those of predict.py"
    )
    return {
        "path": formats.PATHS["ctranslate2"],
        "error": error,
        "equal": f"{same} of {len(examples)}",
        "sentencepiece": bool(translate.rules["sentencepiece"]),
    }


def _check(translate: Any, examples: Sequence[Example]) -> tuple[float, int]:
    """(the largest difference of a score, the number of equal translations).

    The network must give predict.py's translations their probabilities. Its search has other rules,
    by which a few translations differ.
    """
    if any(
        translate.text.split(x.source) != x.source_pieces
        or translate.join(x.pieces) != x.translation
        for x in examples
    ):
        raise OutputError(
            "--format=ctranslate2: the script cuts or joins words in another way than predict.py; "
            "nothing is exported"
        )
    pairs = [x.source_pieces for x in examples], [x.pieces for x in examples]
    scored = translate.model.score_batch(*pairs, max_input_length=0)
    errors, same = [], 0
    found = translate([x.source for x in examples])
    for x, probabilities, (translation, score) in zip(examples, scored, found, strict=True):
        logp = probabilities.log_probs[: len(x.pieces) + (not x.is_cut)]
        scores = [translate.score(sum(logp), len(logp))]
        if translation == x.translation:
            same += 1
            scores.append(score)
        errors += [abs(each - x.score) / max(abs(x.score), 1) for each in scores]
    error = max(errors, key=lambda x: math.inf if math.isnan(x) else x)
    if not error <= _LIMIT or same < _SHARE * len(examples):
        raise OutputError(
            f"--format=ctranslate2: scores are off by {error:.1e}, at most {_LIMIT:.0e} is right, "
            f"and {same} of {len(examples)} translations equal those of predict.py; "
            "nothing is exported"
        )
    return error, same

"""newstest2014, MLPerf's evaluation set: its token ids, and its BLEU through --mode=eval.

The files are those of which MLPerf's verify_dataset.sh has the MD5s (dabf51a9... for English and
f6c3818b... for German): OPUS-MT-testsets has them as newstest2014-deen.eng and .deu, and sacrebleu
downloads the same text as wmt14/full. The two vocabularies are tensor2tensor's and the copy of it
in mlcommons/training, which differ in their first two lines. WMT_DATA names the folder.
"""

import hashlib
import os
from pathlib import Path

import pytest
import sacrebleu

from benchmarks.translation.evaluation import read_lines
from benchmarks.translation.vocabulary import EOS, load_vocabulary
from commands import evaluating
from scripts import prepare
from tests.benchmarks.translation.test_translators import TINY, settings
from tests.test_main import ROOT
from train import train_and_evaluate

REAL = Path(os.environ.get("WMT_DATA", ROOT.parent / "shared" / "data" / "wmt"))
NEWS = {"en": REAL / "newstest2014.eng", "de": REAL / "newstest2014.deu"}
VOCABULARY = REAL / "vocab.translate_ende_wmt32k.32768.subwords"
# Of the 3,003 English and then the 3,003 German lines as mlcommons/training's process_data.py
# writes them: a sentence's ids with spaces between and 1 at the end, a line each. Computed with its
# utils/tokenizer.py of commit e3ed3cb5 (2019) and with tensor2tensor's SubwordTextEncoder of commit
# bafdc1b6 (2023), which agree; sha256sum of the two files in a row shows the same.
IDS = "323e81b6cfd81fc4cf852393df99e608e939d92f6e4b77383c12f0a0f5c909e9"

pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason="needs newstest2014, see WMT_DATA")


@pytest.mark.parametrize("name", [VOCABULARY.name, "vocab.mlperf_reference.subwords"])
def test_ids_are_those_of_mlperf(name):
    encode = load_vocabulary(str(REAL / name)).encode
    lines = [line for path in NEWS.values() for line in read_lines(str(path))]
    assert len(lines) == 6006
    ids = "".join(f"{' '.join(map(str, [*encode(line), EOS]))}\n" for line in lines)
    assert hashlib.sha256(ids.encode()).hexdigest() == IDS


@pytest.mark.long
@pytest.mark.parametrize("count", [40, pytest.param(3003, marks=pytest.mark.slow)])
def test_bleu_is_that_of_the_text(tmp_path, count):
    """The model learns the first lines a little, so that its BLEU is not 0."""
    data, workdir = tmp_path / "data", tmp_path / "run"
    lines = {name: path.read_text().split("\n")[:count] for name, path in NEWS.items()}
    flags = [f"--vocabulary={VOCABULARY}", "--length=128", "--shards=1", f"--out={data}"]
    for name, side in (("en", "source"), ("de", "target")):
        path = tmp_path / f"newstest2014.{name}"
        path.write_text("\n".join(lines[name]) + "\n")
        flags += [f"--train_{side}={path}", f"--eval_{side}={path}"]
    prepare.make("text", flags)
    for path in tmp_path.glob("newstest2014.*"):
        path.rename(data / path.name)
    sizes = {"row_length": 128, "eval_lengths": (32, 64, 192), "width": 32, "mlp_width": 32}
    rates = {"train_steps": "60", "warmup_steps": "20", "base_learning_rate": 0.03, "dropout": 0.0}
    often = dict.fromkeys(("steps_per_eval", "steps_per_checkpoint"), "60")
    overrides = TINY["transformer"] | sizes | rates | often | {"input_streams": 1}
    config = settings("transformer", str(data), workdir, **overrides)
    train_and_evaluate(config)
    scores = evaluating.evaluate(config, "latest", 0)

    rows = (workdir / "eval" / "translations.tsv").read_text().split("\n")[1:-1]
    sources, translations, references, *_ = zip(*(row.split("\t") for row in rows), strict=True)
    assert [*sources] == lines["en"] and [*references] == lines["de"]
    bleu = sacrebleu.corpus_bleu(translations, [lines["de"]], lowercase=True, tokenize="intl")
    assert scores["BLEU"] == pytest.approx(bleu.score / 100, abs=1e-12) and bleu.score > 0

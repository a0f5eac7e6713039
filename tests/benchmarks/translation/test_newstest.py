"""newstest2014, MLPerf's evaluation set: its token ids, and its BLEU through --mode=eval.

The files are those of which MLPerf's verify_dataset.sh has the MD5s (dabf51a9... for English and
f6c3818b... for German): OPUS-MT-testsets has them as newstest2014-deen.eng and .deu, and sacrebleu
downloads the same text as wmt14/full. The two vocabularies are tensor2tensor's and the copy of it
in mlcommons/training, which differ in their first two lines. WMT_DATA names the folder.
"""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from benchmarks.translation.evaluation import read_lines
from benchmarks.translation.vocabulary import EOS, load_vocabulary
from engine import evaluate
from scripts import prepare
from tests.benchmarks.translation.test_translators import TINY, make, settings
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
# By compute_bleu.py of mlcommons/training's retired Transformer, of the text that its tokenizer
# decodes from the references' ids without each seventh.
BLEU = 0.50811819959627

pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason="needs newstest2014, see WMT_DATA")


@pytest.mark.parametrize("name", [VOCABULARY.name, "vocab.mlperf_reference.subwords"])
def test_ids_are_those_of_mlperf(name):
    encode = load_vocabulary(str(REAL / name)).encode
    lines = [line for path in NEWS.values() for line in read_lines(str(path))]
    assert len(lines) == 6006
    ids = "".join(f"{' '.join(map(str, [*encode(line), EOS]))}\n" for line in lines)
    assert hashlib.sha256(ids.encode()).hexdigest() == IDS


def write(folder, lines):
    """Puts sentences into a folder as the evaluation's text; returns flags that prepare them."""
    flags = [f"--vocabulary={VOCABULARY}", "--length=64", "--shards=1", f"--out={folder}/data"]
    for name, side in (("en", "source"), ("de", "target")):
        path = folder / f"newstest2014.{name}"
        path.write_text("".join(f"{line}\n" for line in lines[name]))
        flags += [f"--train_{side}={path}", f"--eval_{side}={path}"]
    return flags


def sacrebleu_of(translations, references):
    """As a fraction, with MLPerf's rules: without case, WMT's words."""
    score = sacrebleu.corpus_bleu(translations, [references], lowercase=True, tokenize="intl")
    return score.score / 100


def test_bleu_is_that_of_mlperf(tmp_path):
    """Every translation is its reference with each seventh token left out."""
    lines = {name: read_lines(str(path)) for name, path in NEWS.items()}
    write(tmp_path, lines)
    (tmp_path / VOCABULARY.name).write_bytes(VOCABULARY.read_bytes())
    benchmark = make("transformer", str(tmp_path), eval_lengths=(256,))
    benchmark.open("eval")
    shorter = (np.delete(tokens, range(6, tokens.size, 7)) for tokens in benchmark.eval_pairs[1])
    rows = [{"id": np.array([i]), "tokens": tokens[None]} for i, tokens in enumerate(shorter)]
    score = benchmark.score(iter(rows))["BLEU"]
    translations = benchmark.translations(iter(rows))
    assert score == pytest.approx(sacrebleu_of(translations, lines["de"]), abs=1e-12)
    assert score == pytest.approx(BLEU, abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("count", [24, pytest.param(3003, marks=pytest.mark.slow)])
def test_evaluation_scores_the_text_that_it_writes(tmp_path, count):
    """The model knows the most frequent words; the penalty makes it repeat them: BLEU is not 0."""
    pairs = zip(*(read_lines(str(path)) for path in NEWS.values()), strict=True)
    chosen = [pair for pair in pairs if count == 3003 or max(map(len, pair)) < 60][:count]
    lines = dict(zip(("en", "de"), map(list, zip(*chosen, strict=True)), strict=True))
    prepare.make("text", write(tmp_path, lines))
    for path in tmp_path.glob("newstest2014.*"):
        path.rename(tmp_path / "data" / path.name)
    lengths = (64, 256) if count == 3003 else (32,)
    sizes = {"row_length": 64, "input_streams": 1, "eval_lengths": lengths, "length_penalty": 5.0}
    steps = dict.fromkeys(("train_steps", "steps_per_eval", "steps_per_checkpoint"), "12")
    overrides = TINY["transformer"] | sizes | steps | {"base_learning_rate": 0.05}
    config = settings("transformer", str(tmp_path / "data"), tmp_path / "run", **overrides)
    train_and_evaluate(config)
    score = evaluate.evaluate(config, "latest", 0)["BLEU"]

    table = (tmp_path / "run" / "eval" / "translations.tsv").read_text().split("\n")[1:-1]
    sources, translations, references, *_ = zip(*(row.split("\t") for row in table), strict=True)
    assert [*sources] == lines["en"] and [*references] == lines["de"]
    assert score == pytest.approx(sacrebleu_of(translations, lines["de"]), abs=1e-12)
    assert score > 0

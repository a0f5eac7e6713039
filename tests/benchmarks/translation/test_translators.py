"""Tiny translators: runs, resuming, scores, the tool that translates, mistakes in a config."""

import importlib
import io
import pathlib
import re
import shutil
import sys
from typing import Any

import jax
import numpy as np
import pytest
import sacrebleu
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

import benchmarks
import predict
import train
from benchmarks.translation import transformer
from benchmarks.translation.vocabulary import EOS
from common.errors import UserError
from engine import evaluate
from engine.plan import read_settings
from tests.conftest import opened
from tests.test_train import assert_same_state, fresh_signals, rows, state_on_disk  # noqa: F401

NAMES = ("transformer", "gnmt")
TINY: dict[str, dict[str, Any]] = {
    "transformer": {
        **{"row_length": 12, "eval_lengths": (4, 9), "extra_length": 2, "beam_size": 2},
        **{"num_layers": 1, "width": 16, "mlp_width": 16, "num_heads": 2, "precision": "float32"},
        **{"shuffle_buffer_size": 48, "input_streams": 4},
    },
    "gnmt": {
        **{"bucket_lengths": (9, 18), "eval_lengths": (9, 18), "max_length": 12, "beam_size": 2},
        **{"num_encoder_layers": 2, "num_decoder_layers": 2, "width": 8, "precision": "float32"},
        **{"init_scale": 0.5, "attention_gain": 1.0},
    },
}
RUN: dict[str, Any] = {
    **{"train_batch_size": 8, "eval_batch_size": 8, "train_steps": "4", "warmup_steps": "2"},
    **{"steps_per_eval": "4", "steps_per_checkpoint": "2", "log_step_count_steps": "1"},
    **{"base_learning_rate": 0.01, "target": 1.0, "dropout": 0.3},
}
# Of 2026, float32 on a CPU. A drift of the data's order, the dropout, the initial weights, the loss
# or the optimizer would change them.
GOLDEN = {
    "transformer": [3.187019, 3.163398, 3.168043, 3.018276],
    "gnmt": [28.155771, 15.600379, 28.222357, 14.029807],
}
RECORDS = dict.fromkeys(("train_source", "train_target", "eval_source", "eval_target"), "")


def configure(name: str, data: str, overrides: dict[str, Any]) -> Any:
    config = importlib.import_module(f"configs.{name}").get_config()
    config.update({"data_dir": data, "train_batch_size": 8, **TINY[name], **overrides})
    return config.lock()


def settings(name: str, data: str, workdir: Any, **overrides: Any) -> Any:
    return read_settings(configure(name, data, RUN | overrides), str(workdir))


def make(name: str, data: str, **overrides: Any) -> Any:
    cache = f"{data}/index" if name == "transformer" else ""
    return benchmarks.load(configure(name, data, overrides), cache)


@pytest.fixture(scope="session")
def data(tiny_sentences, tiny_bpe):
    """The folder of each benchmark's data."""
    return {"transformer": tiny_sentences, "gnmt": tiny_bpe}


@pytest.fixture
def folder(tiny_sentences, tmp_path):
    """A copy of the Transformer's data that a test may change."""
    return shutil.copytree(tiny_sentences, tmp_path / "data")


# --- Runs.


@pytest.fixture(scope="module", params=NAMES)
def trained(request, tmp_path_factory, data):
    """(name, workdir, data) of a run of 4 steps."""
    name, workdir = request.param, str(tmp_path_factory.mktemp("trained"))
    train.train_and_evaluate(settings(name, data[name], workdir))
    return name, workdir, data[name]


@pytest.mark.long
def test_golden_losses(trained):
    name, workdir, _ = trained
    losses = [row["loss"] for row in rows(workdir) if row["split"] == "train"]
    np.testing.assert_allclose(losses, GOLDEN[name], rtol=1e-4)


@pytest.mark.long
def test_a_resumed_run_is_the_same_to_the_bit(trained, tmp_path):
    """The checkpoint of step 2 is in the middle of an epoch; there is dropout."""
    name, workdir, data = trained
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    train.train_and_evaluate(settings(name, data, tmp_path))
    assert_same_state(state_on_disk(str(tmp_path), 4), state_on_disk(workdir, 4))


def typed(monkeypatch, capfdbinary, text: bytes, *flags: str) -> Any:
    """What the tool prints for a text on its standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    predict.main(["-", "--format=text", *flags])
    return capfdbinary.readouterr()


@pytest.mark.long
def test_evaluation_and_the_tool_translate_alike(trained, monkeypatch, capfdbinary):
    """Whatever the other lines are; an empty line stays empty. Filler lines are not translated."""
    name, workdir, data = trained
    scores = evaluate.evaluate(settings(name, data, workdir), "latest", 0)
    assert 0 <= scores["BLEU"] < 1 and scores["TER"] > 0
    (during,) = (row for row in rows(workdir) if row["split"] == "eval")
    assert "chrF" in scores and not {"chrF", "TER"} & set(during)  # it would stop at its target
    written = pathlib.Path(workdir, "eval")
    texts = (written / "translations.txt").read_text().split("\n")
    assert len(texts) == 24 and texts.pop() == ""
    assert "of 23 translations equal" in (written / "sentences.txt").read_text()
    table = (written / "translations.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[1] for line in table] == texts
    sources = [line.split("\t")[0] for line in table]
    if name == "gnmt":  # the table shows whole words
        path = pathlib.Path(data, "newstest2014.tok.bpe.32000.padded.en")
        sources = path.read_text().split("\n")[:23]
    text = "\ufeff\n" + "\n".join(f" {source}\r" for source in sources[::-1]) + "\n"
    flags = f"--workdir={workdir}", "--batch-size=5"
    printed = typed(monkeypatch, capfdbinary, text.encode(), *flags)
    assert printed.out.decode().split("\n") == ["", *texts[::-1], ""]
    printed = typed(monkeypatch, capfdbinary, b"a b c\nplain words\nthat nobody cut\n", flags[0])
    assert (b"5 words are not in the vocabulary" in printed.err) == (name == "gnmt")
    assert b"WARNING" not in printed.err


# --- Loss, batches and predictions.


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_dropout_and_loss_do_not_depend_on_the_cut_into_devices(name, data):
    benchmark = opened(make(name, data[name], dropout=0.5))
    batch = next(benchmark.train_batches(8, 0, 1, 0))
    batch.pop("host_seconds", None)
    params, _ = jax.jit(benchmark.init)(jax.random.key(0))

    @jax.jit
    def loss(batch, key):
        terms, metrics, _ = benchmark.loss(params, {}, batch, jax.random.key(key))
        return terms["cross_entropy"], next(iter(metrics.values()))

    halves = [{k: v[part] for k, v in batch.items()} for part in (slice(0, 4), slice(4, 8))]
    both, parts = loss(batch, 0), [loss(half, 7) for half in halves]
    np.testing.assert_allclose(np.sum(parts, axis=0), both, rtol=1e-6)
    (total, examples), (_, tokens) = both
    assert int(tokens) == np.count_nonzero(batch["targets"]) < batch["targets"].size
    assert int(examples) == (int(tokens) if name == "transformer" else 8)
    (other, _), _ = loss(batch | {"dropout": batch["dropout"] + 1}, 0)
    assert abs(float(other) / float(total) - 1) > 1e-4


@pytest.mark.long
def test_the_end_of_the_sentence_may_not_count(tiny_bpe):
    benchmark = opened(make("gnmt", tiny_bpe, counts_eos=False))
    batch = next(benchmark.train_batches(8, 0, 1, 0))
    params, _ = jax.jit(benchmark.init)(jax.random.key(0))
    _, metrics, _ = benchmark.loss(params, {}, batch, jax.random.key(0))
    assert int(metrics["token_loss"][1]) == np.count_nonzero(batch["targets"] > EOS)


@pytest.mark.parametrize("sizes", [(3, 1), (9, 9)])
def test_a_translation_is_as_long_as_its_source_allows(sizes, tiny_sentences, monkeypatch):
    """At most extra_length words more than the source has; none for padding."""
    benchmark, limits = opened(make("transformer", tiny_sentences, extra_length=3)), []

    def search(step, cache, limit, rules):
        limits.append((limit.tolist(), rules.beam_size, rules.max_length))
        shape = len(limit), rules.beam_size, rules.max_length
        return np.arange(np.prod(shape), dtype=np.int32).reshape(shape), None

    monkeypatch.setattr(transformer.finished_beams, "search", search)
    monkeypatch.setattr(type(benchmark.network), "apply", lambda *_, **__: None)
    monkeypatch.setattr(type(benchmark.network), "init_cache", lambda *_: None)
    inputs = np.zeros((3, 9), np.int32)
    for row, size in enumerate(sizes):
        inputs[row, :size] = 5
    outputs = benchmark.predict({}, {}, {"id": np.arange(3), "inputs": inputs})
    assert limits == [([sizes[0] + 3, sizes[1] + 3, 0], 2, 12)]
    assert outputs["tokens"].tolist() == [list(range(k, k + 12)) for k in (0, 24, 48)]


def test_sentences_are_sorted_into_few_shapes(tiny_sentences):
    benchmark = opened(make("transformer", tiny_sentences), "eval")
    batches = list(benchmark.eval_batches(8, 0, 1))
    shapes = [batch["inputs"].shape for batch in batches]
    assert shapes == sorted(shapes) and {shape[1] for shape in shapes} == {4, 9}
    lengths = np.concatenate([(batch["inputs"] > 0).sum(1)[batch["mask"] > 0] for batch in batches])
    assert (np.diff(lengths) >= 0).all()


def test_records_of_the_transformer_are_read_as_pairs(tiny_sentences):
    benchmark = make("gnmt", tiny_sentences, **RECORDS)
    assert (benchmark.open("train"), benchmark.open("eval")) == (90, 23)
    batch = next(benchmark.train_batches(8, 0, 1, 0))
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
        words = inputs[inputs > EOS].tolist()
        assert targets[targets > EOS].tolist() == words[::-1]  # as the data were made


def test_the_memory_that_a_host_needs(tiny_sentences):
    benchmark = opened(make("transformer", tiny_sentences))
    batches = 8 * 24 * 12 * 6 * 4 // 3  # eight of 24 rows with six int32 leaves, over three hosts
    key, held = ("train_batch_size", "row_length"), benchmark.held_bytes(3)
    assert benchmark.host_bytes("train", 24, 3) == {key: batches, ("shuffle_buffer_size",): held}
    assert benchmark.host_bytes("eval", 24, 3) == {(): 2 * 23 * 9 * 4}


def test_sizes_that_are_not_declared_are_those_of_wmt():
    both = [make("transformer", "", num_train_rows=n, num_eval_sentences=n // 9) for n in (0, 90)]
    sizes = [[one.nominal_examples(split) for split in ("train", "eval")] for one in both]
    assert sizes == [[566_340, 3_003], [90, 10]]


# --- Scores and references.


def lines(folder: Any) -> list[str]:
    return pathlib.Path(folder, "references.txt").read_text().splitlines()


def perfect(benchmark: Any, folder: str, wrong: int = 0) -> Any:
    """What `predict` would return of a perfect model, in an order of its own; some are empty."""
    outputs = []
    for i, line in enumerate(lines(folder)):
        tokens = [] if i < wrong else [*benchmark.vocabulary.encode(line), EOS]
        tokens = np.array([tokens + [0] * (12 - len(tokens))])
        outputs.append({"id": np.array([i]), "tokens": tokens})
    return iter([outputs[i] for i in np.random.default_rng(0).permutation(len(outputs))])


def test_a_perfect_translation(tiny_sentences):
    benchmark = opened(make("transformer", tiny_sentences))
    scores = benchmark.score(perfect(benchmark, tiny_sentences))
    assert scores["BLEU"] == pytest.approx(1) and scores["exact"] == 1
    assert 0.3 < benchmark.score(perfect(benchmark, tiny_sentences, wrong=5))["BLEU"] < 0.95
    worst, _, shown = benchmark.uses.exhibits(perfect(benchmark, tiny_sentences, wrong=1))
    files = shown.files
    assert [row[0] for row in worst.rows] == ["0.0"]
    assert len(shown.rows) == 12 and shown.rows[1][2] == "the same"
    assert files["translations.txt"].decode().splitlines() == ["", *lines(tiny_sentences)[1:]]
    assert "22 of 23 translations equal" in files["sentences.txt"].decode()
    (source, _, reference, exact) = files["translations.tsv"].decode().splitlines()[1].split("\t")
    assert source.split() == reference.split()[::-1] and exact == "0"


def test_the_groups_are_thirds_by_the_length_of_the_source(tiny_sentences):
    benchmark = opened(make("transformer", tiny_sentences), "eval")
    draw, outputs = np.random.default_rng(1), list(perfect(benchmark, tiny_sentences))
    for output in outputs[::2]:
        tokens = output["tokens"]
        output["tokens"] = tokens[:, draw.permutation(np.count_nonzero(tokens > EOS))]
    lengths = [sum(token > EOS for token in ids) for ids in benchmark.eval_pairs[0].tolist()]
    texts = {int(o["id"][0]): benchmark.decode(o["tokens"][0].tolist()) for o in outputs}
    groups = benchmark.group_scores(iter(outputs))
    assert len(groups) == 3 and sum(count for _, count in groups.values()) == 23
    assert list(groups) == sorted(groups, key=lambda name: int(name.split()[2]))
    for name, (score, count) in groups.items():
        least, most = (int(word) for word in re.findall(r"\d+", name))
        some = [i for i, length in enumerate(lengths) if least <= length <= most]
        assert name == f"sources of {least} to {most} tokens" and count == len(some) >= 5
        assert {lengths[i] for i in some} >= {least, most}
        truth = [lines(tiny_sentences)[i] for i in some]
        sentences = [texts[i] for i in some]
        corpus = sacrebleu.corpus_bleu(sentences, [truth], lowercase=True, tokenize="intl")
        assert score == pytest.approx(corpus.score / 100)
    assert any(0 < score < 1 for score, _ in groups.values())  # four words in a row are rare


def test_the_groups_have_the_words_of_all_references(tiny_sentences, monkeypatch):
    """Most are Chinese, but none of the longest."""
    benchmark = opened(make("transformer", tiny_sentences), "eval")
    lengths = np.count_nonzero(benchmark.eval_pairs[0] > EOS, axis=1)
    english = "he didn't go, she didn't go", "he did go, she didn't go"
    texts = [english if n > np.median(lengths) else ["第三次会议在三月举行。"] * 2 for n in lengths]
    benchmark.references, translations = ([pair[i] for pair in texts] for i in (0, 1))
    monkeypatch.setattr(benchmark, "translations", lambda rows: translations)
    first, *_, last = (score for score, _ in benchmark.group_scores(iter([])).values())
    zh, intl = (
        sacrebleu.corpus_bleu([english[1]], [[english[0]]], tokenize=words).score / 100
        for words in ("zh", "intl")
    )
    assert first == pytest.approx(1) and last == pytest.approx(zh)
    assert abs(zh - intl) > 0.01


@pytest.mark.parametrize("stops", [False, True])
def test_other_scores_of_the_rows_of_all_hosts_are_those_of_sacrebleu(stops, tiny_sentences):
    """A run that stops at its target, as MLPerf's, has only BLEU."""
    benchmark = opened(make("transformer", tiny_sentences, stop_at_target=stops))
    draw, outputs = np.random.default_rng(0), {}
    for output in perfect(benchmark, tiny_sentences, wrong=2):
        tokens = output["tokens"][0]
        outputs[int(output["id"][0])] = tokens[draw.random(len(tokens)) > 0.2]
    gathered = []
    for host in range(3):
        for batch in benchmark.eval_batches(6, host, 3):
            ids = batch["id"][batch["mask"] > 0]
            texts = [outputs[i] for i in ids.tolist()]
            gathered += [{"id": ids[j : j + 1], "tokens": texts[j][None]} for j in range(len(ids))]
    texts = [benchmark.decode(outputs[i].tolist()) for i in range(23)]
    correct = {
        "chrF": CHRF().corpus_score(texts, [lines(tiny_sentences)]).score / 100,
        "TER": TER().corpus_score(texts, [lines(tiny_sentences)]).score / 100,
    }
    assert min(correct.values()) > 0.05
    scores = benchmark.score(iter(gathered))
    complete = scores | {name: pytest.approx(value) for name, value in correct.items()}
    assert benchmark.all_scores(iter(gathered)) == complete
    assert scores.get("chrF") == (None if stops else pytest.approx(correct["chrF"]))
    shown = ["BLEU", *["chrF"] * (not stops), "exact", "length_ratio"]
    assert [*benchmark.headline(scores)] == shown


def test_the_share_of_translations_that_keep_their_placeholders(folder):
    """Of the sentences whose reference keeps them; without any there is no such score."""
    sources = ["a %s", "<b>c</b> d", "e", "{x} f", "g &amp; h"]  # the last one's reference differs
    (folder / "my.en").write_text("".join(f"{line}\n" for line in sources))
    (folder / "my.de").write_text("%s a\nd <b>c</b>\ne\nf {x}\nh g\n")
    keys = {"eval_source": "my.en", "eval_references": "my.de", "eval_lengths": (9, 90)}
    benchmark = opened(make("transformer", str(folder), **keys), "eval")
    assert benchmark.sources == sources and "placeholders_kept" in benchmark.score_names
    for lines, kept in [(["%s", "c d", "%s e", "f{x}", ""], 2), (sources, 3), ([""] * 5, 0)]:
        rows = [
            {"id": np.array([i]), "tokens": np.array([benchmark.vocabulary.encode(line)])}
            for i, line in enumerate(lines)
        ]
        scores = benchmark.score(iter(rows))
        assert scores["placeholders_kept"] == kept / 3
        assert benchmark.headline(scores)["placeholders_kept"] == kept / 3
    plain = opened(make("transformer", str(folder)), "eval")
    assert "placeholders_kept" not in plain.score_names


def test_references_are_decoded_where_there_is_no_file(folder, tiny_bpe):
    references = lines(folder)
    (folder / "references.txt").unlink()
    assert opened(make("transformer", str(folder)), "eval").references == references
    benchmark = make("gnmt", tiny_bpe, eval_references="", num_eval_sentences=23)
    assert benchmark.open("eval") == 23 and len(benchmark.references) == 23
    assert "BLEU is against the decoded targets" in benchmark.run_notes(0, evaluating=True)[0]
    assert opened(make("gnmt", tiny_bpe)).run_notes(0, evaluating=True) == []


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_references_are_lines_of_bytes(folder, end):
    """A carriage return or U+2028 inside of a line ends no line; white space around it goes."""
    references = ["a\rb", "c\u2028d", *lines(folder)[2:]]
    data = "\n".join(f" {line}\t" for line in references) + end
    (folder / "newstest2014.de").write_bytes(b"not this one\n")
    (folder / "references.txt").write_bytes(data.encode())
    assert opened(make("transformer", str(folder)), "eval").references == references


def write_newstest(folder, sources=("a b c", "d e", "c"), references=("c b a", "e d", "c")):
    for language, texts in (("en", sources), ("de", references)):
        (folder / f"newstest2014.{language}").write_text("".join(f" {line}\n" for line in texts))


def test_text_is_evaluated_where_sources_and_references_lie(folder):
    """Also beside records with references of their own, which have another number of lines."""
    write_newstest(folder)
    benchmark = make("transformer", str(folder))
    assert benchmark.open("eval") == 3 and benchmark.references == ["c b a", "e d", "c"]
    assert benchmark.eval_pairs[0][:, :4].tolist() == [[2, 3, 4, 1], [5, 6, 1, 0], [4, 1, 0, 0]]
    assert benchmark.check("eval") == [] and benchmark.run_notes(0, evaluating=True) == []
    assert "eval text" in benchmark.identity("eval").content
    assert [b["inputs"].shape for b in benchmark.eval_batches(2, 0, 1)] == [(2, 4), (2, 4)]
    assert make("transformer", str(folder), eval_source="").open("eval") == 23
    (folder / "my.en").write_text("a b\n" * 23)
    named = make("transformer", str(folder), eval_source="my.en")
    assert named.open("eval") == 23 and named.references == lines(folder)
    assert (named.eval_pairs[0] == named.eval_pairs[0][0]).all()


def test_the_set_that_is_scored_is_named(folder):
    for path in folder.glob("toy-dev*"):
        path.rename(folder / "wmt32k-encoded-dev-00001-of-00001")
    (folder / "references.txt").unlink()
    (note,) = opened(make("transformer", str(folder)), "eval").run_notes(0, evaluating=True)
    assert "wmt32k-encoded-dev-00001-of-00001 (newstest2013" in note
    assert "target=0.25 of the recipe for WMT is one of newstest2014: put newstest2014.en" in note


@pytest.mark.parametrize(
    ("line", "words"), [("das Haus ist alt", "intl"), ("第三次会议在三月举行。", "zh")]
)
def test_the_log_names_the_words_of_the_score(folder, caplog, line, words):
    """sacrebleu's signature belongs to a score; chrF stands beside it."""
    (folder / "references.txt").write_text(f"{line}\n" * 23, "utf-8")
    caplog.set_level("INFO", logger="tpu_suite")
    benchmark = opened(make("transformer", str(folder)), "eval")
    assert benchmark.references == [line] * 23
    assert f"sacrebleu: BLEU nrefs:1|case:lc|eff:no|tok:{words}|smooth:exp" in caplog.text
    scores = benchmark.score(iter([]))  # of the recipe that stops at its target, as MLPerf does
    assert ("chrF" in scores) == (words == "zh")


# --- Mistakes.


def check_refused(name, data, overrides, words):
    with pytest.raises(UserError, match=words) as caught:
        benchmark = make(name, str(data), **overrides)
        for split in ("train", "eval"):
            benchmark.open(split)
        next(benchmark.train_batches(overrides.get("train_batch_size", 8), 0, 1, 0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("gnmt", {"num_train_pairs": 91}, "num_train_pairs=91, but .* has 90 pairs of at most 18"),
        ("gnmt", {"eval_references": "", "num_eval_sentences": 0}, "lines that only fill it up"),
        ("transformer", {"eval_references": "typo.txt"}, "eval_references='typo.txt': there is no"),
        (
            "transformer",
            {"eval_source": "references.txt", "eval_references": ""},
            "references.txt has no references: set config.eval_references",
        ),
        ("transformer", {"vocabulary_size": 99}, "vocabulary_size=99, but .* has 27 entries"),
        ("transformer", {"num_train_rows": 91}, "num_train_rows=91, but the train split has 90"),
        ("transformer", {"num_eval_sentences": 5}, "sentences=5, but the eval split has 23"),
        ("transformer", {"eval_lengths": (4, 6)}, "config.eval_lengths"),
        ("transformer", {"num_heads": 3}, "config.num_heads=3: config.width=16"),
    ],
)
def test_mistakes_in_a_config(name, data, overrides, words):
    check_refused(name, data[name], overrides, words)


def test_mistakes_in_text_to_evaluate(folder):
    write_newstest(folder, sources=("a", "b c d e f g h i j k", "c"))
    check_refused("transformer", folder, {}, "newstest2014.en, line 2: the sentence has 11 tokens")
    write_newstest(folder, references=("a", "b"))
    check_refused("transformer", folder, {}, "2014.de has 2 lines, and there are 3 sentences")
    check_refused("transformer", folder, {"num_eval_sentences": 23}, "=23, but .*2014.en has 3")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("vocab.toy.subwords", None, "no vocabulary in .*vocab"),
        ("vocab.other", b"<unk>\na\nb\nc\nq\n", "vocabulary_file='vocab.*' matches 2 files that"),
        ("references.txt", b"one\n" * 24, "references.txt has 24 lines, and there are 23 sentence"),
        ("references.txt", b"a\n\xfc\n", "references.txt, line 2 is not UTF-8"),
    ],
)
def test_mistakes_in_the_data(folder, file, content, words):
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    check_refused("transformer", folder, {}, words)

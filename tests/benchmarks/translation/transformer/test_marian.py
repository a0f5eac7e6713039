"""Models of OPUS-MT: the vocabulary, the network, the search and the folder, against NumPy.

With transformers installed the same is compared with MarianMTModel and MarianTokenizer.
"""

import json
import logging
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from safetensors import numpy as safetensors

import benchmarks
import predict
from benchmarks.translation.transformer import marian
from benchmarks.translation.vocabulary import EOS, PAD, Marian, load_vocabulary, marian_archive
from common.errors import ConfigError, DataError, UserError
from configs import finetune
from engine.checkpoint import model_source
from scripts import prepare
from tests.benchmarks.translation.transformer import marian_fixture
from tests.benchmarks.translation.transformer.marian_fixture import TEXTS, write_folder
from tests.test_main import ROOT, environment
from tests.test_main import run as command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("marian") / "opus"
    write_folder(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    config = finetune.get_config("opus_mt")
    config.precision, config.beam_size = "float32", 4
    return model_source.load(str(folder), recipe=lambda _: config)


def vocabulary_of(model) -> Marian:
    return model.benchmark.vocabulary


def test_the_settings_are_those_of_the_folder(folder, model):
    config = model.config
    sizes = config.num_layers, config.width, config.mlp_width, config.num_heads
    assert sizes == (2, 16, 24, 2) and (config.variant, config.activation) == ("marian", "swish")
    assert model.benchmark.languages == ("de", "en") == model.benchmark.uses.languages
    assert model.benchmark.vocabulary_size == len(json.loads((folder / "vocab.json").read_text()))


def test_pieces_of_both_languages(folder, model):
    vocabulary, ids = vocabulary_of(model), json.loads((folder / "vocab.json").read_text())
    for side, lines, encode in zip(
        ("source", "target"), TEXTS, (vocabulary.encode, vocabulary.encode_target), strict=True
    ):
        pieces = sentencepiece.SentencePieceProcessor(str(folder / f"{side}.spm"))
        for line in lines:
            wanted = [ids.get(name, ids["<unk>"]) for name in pieces.encode(line, out_type=str)]
            assert [vocabulary.marian_ids[i] for i in encode(line)] == wanted
    for line in TEXTS[1]:
        assert vocabulary.decode([*vocabulary.encode_target(line), EOS, 7]) == line
    assert vocabulary.marian_ids[:2] == [ids["<pad>"], ids["</s>"]]
    # The code of a target language is one piece; text cannot spell the end.
    assert vocabulary.encode(">>fr<< Ein Hund")[0] == vocabulary.pieces.index(">>fr<<")
    assert vocabulary.encode(">>fr<<Ein")[1:] == vocabulary.encode("Ein")
    assert EOS not in vocabulary.encode("</s>") and PAD not in vocabulary.encode("<pad>")
    assert vocabulary.unknown in vocabulary.encode("Ж")


def test_the_archive_is_the_same_for_the_same_pieces(folder, tmp_path):
    data = marian_archive(str(folder))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    ids = json.loads((folder / "vocab.json").read_text())
    (other / "vocab.json").write_text(json.dumps(dict(reversed(ids.items())), indent=3))
    assert marian_archive(str(other)) == data
    (tmp_path / Marian.NAME).write_bytes(data)
    loaded = load_vocabulary(str(tmp_path / Marian.NAME))
    assert loaded.digest == load_vocabulary(f"{folder}/vocab.json").digest
    assert loaded.languages == ("de", "en")


def logits_of(model, source: list[int], target: list[int]) -> np.ndarray:
    """The logits of our network in Marian's order, for our ids with EOS."""
    rows: Any = {}
    for side, ids in (("inputs", source), ("targets", target)):
        row = np.array([ids], np.int32)
        rows |= {side: row, f"{side}_segmentation": np.ones_like(row)}
        rows[f"{side}_position"] = np.arange(len(ids), dtype=np.int32)[None]
    params = jax.tree.map(jnp.asarray, model.params)
    features = jax.jit(lambda: model.benchmark.network.apply({"params": params}, rows, None))()
    scores = np.asarray(features)[0] @ params["embedding"].T + params["logits_bias"]
    return np.asarray(scores)[:, np.argsort(vocabulary_of(model).marian_ids)]


def test_the_logits_are_those_of_numpy(folder, model):
    vocabulary = vocabulary_of(model)
    arrays = safetensors.load_file(folder / "model.safetensors")
    source, target = vocabulary.encode(TEXTS[0][1]), vocabulary.encode_target(TEXTS[1][1])
    theirs = ([vocabulary.marian_ids[i] for i in [*ids, EOS]] for ids in (source, target))
    wanted = marian_fixture.logits(arrays, *theirs)
    actual = logits_of(model, [*source, EOS], [*target, EOS])
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_the_score_of_a_translation_is_its_mean_log_probability(folder, model):
    vocabulary = vocabulary_of(model)
    arrays = safetensors.load_file(folder / "model.safetensors")
    source = [*vocabulary.encode(TEXTS[0][0]), EOS]
    row = np.zeros((1, 32), np.int32)
    row[0, : len(source)] = source
    params = jax.tree.map(jnp.asarray, model.params)
    tokens, scores = jax.jit(model.benchmark.n_best, static_argnums=2)(params, row, 4)
    for ids, score in zip(np.asarray(tokens)[0], np.asarray(scores)[0], strict=True):
        theirs = [vocabulary.marian_ids[i] for i in ids if i != PAD]
        found = marian_fixture.logits(arrays, [vocabulary.marian_ids[i] for i in source], theirs)
        logp = found - np.log(np.exp(found).sum(-1, keepdims=True))
        total = logp[np.arange(len(theirs)), theirs].sum()
        np.testing.assert_allclose(score, total / len(theirs), rtol=1e-4)


def test_the_gradient_moves_every_array_but_the_start(model):
    benchmark, vocabulary = model.benchmark, vocabulary_of(model)
    params = jax.tree.map(jnp.asarray, model.params)
    target = np.array([[*vocabulary.encode_target(TEXTS[1][0]), EOS]], np.int32)
    batch: Any = {"dropout": np.zeros(1, np.int32), "id": np.zeros(1, np.int32)}
    for side in ("inputs", "targets"):
        batch |= {side: target, f"{side}_segmentation": np.ones_like(target)}
        batch[f"{side}_position"] = np.arange(target.shape[1], dtype=np.int32)[None]

    def loss(params):
        sums = benchmark.loss(params, {}, batch, jax.random.key(0))[0]["cross_entropy"]
        return sums[0] / sums[1]

    gradients = jax.jit(jax.grad(loss))(params)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    assert not [path for path, leaf in leaves if not np.asarray(leaf).any()]
    # Word 0 is only the start, which is zeros in published models and for other programs.
    assert not np.asarray(gradients["embedding"])[PAD].any()


@pytest.mark.long
def test_import_predict_and_the_same_folder_again(folder, tmp_path, capsys):
    paths = f"--config.init_from={folder}", f"--workdir={tmp_path}/imported"
    done = command("--mode=import", *paths, config="configs/finetune.py:opus_mt")
    assert done.returncode == 0 and "de to en" in done.stdout, done.stderr
    assert (tmp_path / "imported" / Marian.NAME).exists()
    answers = []
    for flag in (f"--workdir={tmp_path}/imported", f"--model={folder}"):
        assert predict.main([TEXTS[0][0], flag, "--format=json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1] and answers[0][0]["translations"][0]["text"]
    flags = "--format=hf", f"--workdir={tmp_path}/imported", f"--out={tmp_path}/again"
    words = [sys.executable, "main.py", "--mode=export", *flags]
    subprocess.run(words, cwd=ROOT, env=environment(), check=True, capture_output=True)
    for name, wanted in safetensors.load_file(folder / "model.safetensors").items():
        actual = safetensors.load_file(tmp_path / "again" / "model.safetensors")[name]
        np.testing.assert_array_equal(actual, wanted)
    assert marian_archive(str(tmp_path / "again")) == marian_archive(str(folder))
    assert marian.foreign_settings(str(tmp_path / "again" / "model.safetensors")) == (
        marian.foreign_settings(str(folder / "model.safetensors"))
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_embedding": False}, "scale_embedding is False"),
        ({"normalize_before": True}, "normalize_before is True"),
        ({"decoder_layers": 1}, "encoder_layers and decoder_layers are 2 and 1"),
        ({"activation_function": "tanh"}, "activation_function is 'tanh'"),
        ({"decoder_start_token_id": 0}, "decoder_start_token_id"),
        ({"eos_token_id": 2}, "eos_token_id=2"),
    ],
)
def test_other_networks_are_refused(changes, message, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "x")
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=message):
        model_source.load(str(tmp_path / "x"), recipe=lambda _: finetune.get_config("opus_mt"))


def test_text_in_the_other_direction_is_refused(folder, tmp_path):
    for tag, lines in zip(("de", "en"), TEXTS, strict=True):
        (tmp_path / f"train.{tag}").write_text("\n".join(f"{i} {lines[i % 3]}" for i in range(99)))
    flags = [f"--vocabulary={folder}", f"--out={tmp_path}/out"]
    sides = f"--train_source={tmp_path}/train.en", f"--train_target={tmp_path}/train.de"
    with pytest.raises(UserError, match="the text is en to de.*is for de to en"):
        prepare.make("text", [*sides, *flags])
    turned = f"--train_source={tmp_path}/train.de", f"--train_target={tmp_path}/train.en"
    prepare.make("text", [*turned, *flags])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["languages"] == ["de", "en"] and manifest["vocabulary"]["kind"] == "marian"
    digest = load_vocabulary(f"{folder}/vocab.json").digest
    assert manifest["vocabulary"]["sha256"] == digest


def test_a_model_of_several_languages_wants_a_code(folder, tmp_path, capsys):
    several = tmp_path / "several"
    shutil.copytree(folder, several)
    ids = json.loads((folder / "vocab.json").read_text())
    ids[">>it<<"] = ids.pop([*ids][5])
    (several / "vocab.json").write_text(json.dumps(ids))
    assert predict.main(["Ein Hund", f"--model={several}"]) == 1
    assert ">>it<<" in capsys.readouterr().err
    assert predict.main([">>fr<<Ein Hund", f"--model={several}"]) == 0


@pytest.mark.parametrize("keys", [{"activation": "relu"}, {"variant": "tensor2tensor"}])
def test_a_key_that_contradicts_the_folder_is_refused(keys, folder):
    with pytest.raises(ConfigError, match=f"config.{next(iter(keys))}="):
        model_source.load(str(folder), recipe=lambda _: finetune.get_config("opus_mt"), keys=keys)


def test_text_of_another_vocabulary_is_refused(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    shutil.copy(folder / "source.spm", other / "target.spm")
    config = finetune.get_config("opus_mt")
    config.update(num_layers=2, width=16, mlp_width=24, num_heads=2, data_dir=str(other))
    config.vocabulary_file = "vocab.json"
    benchmark = benchmarks.load(config.lock(), "")
    with pytest.raises(DataError, match=f"--vocabulary={folder}"):
        benchmark.uses.read_foreign(f"{folder}/model.safetensors")


@pytest.mark.parity
def test_logits_beams_and_text_are_those_of_transformers(folder, model, caplog):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    caplog.set_level(logging.ERROR)
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    theirs = transformers.MarianMTModel.from_pretrained(folder).eval()
    vocabulary, length = vocabulary_of(model), 48
    search = jax.jit(model.benchmark.n_best, static_argnums=2)
    params = jax.tree.map(jnp.asarray, model.params)
    for text, translation in zip(*TEXTS, strict=True):
        source = [*vocabulary.encode(text), EOS]
        target = [*vocabulary.encode_target(translation), EOS]
        inputs = tokenizer(text, return_tensors="pt")
        labels = tokenizer(text_target=translation, return_tensors="pt").input_ids
        for ids, wanted in ((source, inputs.input_ids), (target, labels)):
            assert [vocabulary.marian_ids[i] for i in ids] == wanted[0].tolist()
        assert vocabulary.decode(target) == tokenizer.decode(labels[0], skip_special_tokens=True)
        with torch.no_grad():
            wanted = theirs(**inputs, labels=labels).logits[0].numpy()
            found = theirs.generate(
                **inputs,
                num_beams=4,
                length_penalty=1.0,
                max_length=length + 51,
                forced_eos_token_id=None,
                bad_words_ids=[[vocabulary.size - 1]],
                return_dict_in_generate=True,
                output_scores=True,
            )
        np.testing.assert_allclose(logits_of(model, source, target), wanted, atol=1e-5)
        row = np.zeros((1, length), np.int32)
        row[0, : len(source)] = source
        tokens, scores = search(params, row, 1)
        best = [vocabulary.marian_ids[i] for i in np.asarray(tokens)[0, 0] if i != PAD]
        if best[-1] == vocabulary.marian_ids[EOS]:  # else the two end at other lengths
            assert best == found.sequences[0, 1:].tolist()
            np.testing.assert_allclose(scores[0, 0], found.sequences_scores[0], atol=1e-4)

"""BLEU against published figures, calculation by hand, and tensor2tensor's rules."""

import collections
import math
import random
import unicodedata

import numpy as np
import pytest

from benchmarks.translation import evaluation


def split_pairs(text, first, second, form):
    """Puts spaces into neighbours of two kinds, from left to right; a pair takes both of them."""
    out, i = "", 0
    while i < len(text):
        if i + 1 < len(text) and first(text[i]) and second(text[i + 1]):
            out += form.format(text[i], text[i + 1])
            i += 2
        else:
            out += text[i]
            i += 1
    return out


def words(text):
    """The rules of tensor2tensor's bleu_tokenize."""

    def is_punctuation(char):
        return unicodedata.category(char).startswith("P")

    def is_no_digit(char):
        return unicodedata.category(char) != "Nd"

    text = split_pairs(text.lower(), is_no_digit, is_punctuation, "{} {} ")
    text = split_pairs(text, is_punctuation, is_no_digit, " {} {}")
    symbols = {char for char in text if unicodedata.category(char).startswith("S")}
    return "".join(f" {char} " if char in symbols else char for char in text).split()


def plain(hypotheses, references):
    """BLEU of tensor2tensor's rules: smoothed, and without n-grams that do not exist."""
    matches, totals, lengths = [0] * 4, [0] * 4, [0, 0]
    for pair in zip(hypotheses, references, strict=True):
        tokens = [words(text) for text in pair]
        for side in (0, 1):
            lengths[side] += len(tokens[side])
        for n in range(1, 5):
            counts = [
                collections.Counter(tuple(row[i : i + n]) for i in range(len(row) - n + 1))
                for row in tokens
            ]
            matches[n - 1] += (counts[0] & counts[1]).total()
            totals[n - 1] += counts[0].total()
    smooth, logs = 1, 0.0
    for match, total in zip(matches, totals, strict=True):
        smooth *= 1 if match else 2
        logs += math.log(match / total if match else 1 / (smooth * total)) if total else 0
    return math.exp(logs / 4) * min(1, math.exp(1 - lengths[1] / max(lengths[0], 1)))


# bleu_hook_test.py of tensor2tensor; ids stand for words.
T2T = [
    ([[1, 2, 3]], [[1, 2, 3]], 1.0),
    ([[1, 2, 3, 4]], [[5, 6, 7, 8]], 0.0798679),
    ([[1, 2, 1, 3], [5, 6, 7, 4]], [[1, 2, 1, 13], [12, 6, 7, 4, 8, 9, 10]], 0.3436),
]


def sentences(rows):
    return [" ".join(f"w{i}" for i in row) for row in rows]


@pytest.mark.parametrize(("translations", "references", "value"), T2T)
def test_the_plain_score_is_that_of_tensor2tensor(translations, references, value):
    assert plain(sentences(translations), sentences(references)) == pytest.approx(value, abs=1e-4)
    assert words("hi, “there”") == ["hi", ",", "“", "there", "”"]


def test_published_values_and_calculation_by_hand():
    _, (wrong, other, _), (translations, references, value) = T2T
    scores = evaluation.bleu(sentences(translations), sentences(references))
    assert scores["BLEU"] == pytest.approx(value, abs=1e-4)
    assert (scores["exact"], scores["length_ratio"]) == (0.0, 8 / 11)
    shares = [scores[f"precision_{n}"] for n in range(1, 5)]
    assert shares == pytest.approx([6 / 8, 4 / 6, 2 / 4, 1 / 4])  # 0 of 2 count as half of one
    assert list(scores)[0] == "BLEU"
    assert scores["BLEU"] == pytest.approx(math.exp(1 - 11 / 8) * (6 / 8 * 4 / 6 / 8) ** 0.25)
    # Papineni et al. 2002, section 2.1: a word counts as often as the reference has it.
    papineni = evaluation.bleu(["the the the the the the the"], ["The cat is on the mat"])
    assert papineni["precision_1"] == pytest.approx(2 / 7)
    assert evaluation.bleu(sentences(wrong), sentences(other))["BLEU"] == 0.0


def test_case_does_not_count_except_in_exact():
    scores = evaluation.bleu(["Am 3. Mai, um 9 Uhr.", "x"], ["am 3. mai, um 9 uhr.", "x"])
    assert (scores["BLEU"], scores["exact"], scores["length_ratio"]) == (pytest.approx(1), 0.5, 1)


ALPHABET = "aabbcC  .,-'\"3712%$€°+=“”„ßÄéжЖ漢٣¿!_#/‑–…·\u00a0\u202f"


def test_random_text_scores_as_tensor2tensor_would():
    draw = random.Random(0)

    def noisy(text):
        return "".join(draw.choice(ALPHABET) if draw.random() < 0.1 else char for char in text)

    for _ in range(60):
        references = [
            "".join(draw.choices(ALPHABET, k=draw.randrange(8, 60))).strip() for _ in range(5)
        ]
        translations = [noisy(text)[: draw.randrange(6, 60)].strip() for text in references]
        ours = evaluation.bleu(translations, references)
        assert ours["BLEU"] == pytest.approx(plain(translations, references))


def test_empty_text():
    assert evaluation.chrf_and_ter([], [], ["chrF", "TER"]) == {"chrF": 0, "TER": 0}
    assert evaluation.chrf_and_ter([""], ["ein Wort"], ["chrF", "TER"]) == {"chrF": 0, "TER": 1}
    assert set(evaluation.bleu([], []).values()) == {0.0}
    assert evaluation.bleu([""], ["ein Wort"])["BLEU"] == 0.0
    scores = evaluation.bleu(["ein Wort"], [""])
    assert (scores["BLEU"], scores["length_ratio"]) == (0.0, 2.0)  # as if of one word
    some = ["", "der Zug nach Bern fährt um acht Uhr"]
    scores = evaluation.bleu(some, ["das fehlt", some[1]])
    assert scores["BLEU"] == pytest.approx(math.exp(1 - 10 / 8))
    assert scores["exact"] == 0.5


SIGNATURES = {
    "BLEU": "nrefs:1|case:lc|eff:no|tok:intl|smooth:exp|version:2.",
    "chrF": "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.",
    "TER": "nrefs:1|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:2.",
}


def test_the_signatures():
    for name, settings in SIGNATURES.items():
        assert evaluation.signature(name).startswith(settings)


CHINESE = ["第3次会议在三月举行。", "我们用 GPU 训练模型。", "软件已经更新。"]
WITHOUT_BLANKS = [
    ("zh", CHINESE[::2]),  # without Latin letters, of which whole words count
    ("zh", ["第三次會議在三月舉行。", "軟體已經更新の。"]),
    ("char", ["第三回の会議は三月です。", "データを読み込みます。"]),
    ("char", ["세 번째 회의는 삼월에 열립니다.", "GPU를 사용합니다."]),
    (
        "char",
        ["การประชุมครั้งที่สามจัดขึ้นในเดือนมีนาคม", "ສະບາຍດີທຸກຄົນ", "ថ្ងៃនេះអាកាសធាតុល្អ", "ဒီနေ့ရာသီဥတုကောင်းတယ်"],
    ),
]


def ngram_score(hypotheses, references):
    """BLEU of letters, by hand; no precision may be 0."""
    logs = 0.0
    for n in range(1, 5):
        matches = total = 0
        for pair in zip(hypotheses, references, strict=True):
            counts = [
                collections.Counter(text[i : i + n] for i in range(len(text) - n + 1))
                for text in (side.replace(" ", "") for side in pair)
            ]
            matches, total = matches + (counts[0] & counts[1]).total(), total + counts[0].total()
        logs += math.log(matches / total)
    return math.exp(logs / 4)


@pytest.mark.parametrize(("words", "texts"), WITHOUT_BLANKS)
def test_texts_without_blanks_have_their_own_words(words, texts):
    scores = evaluation.bleu(texts, texts)
    assert (scores["BLEU"], scores["exact"]) == (pytest.approx(1), 1)
    assert evaluation.tokenizer(texts) == words
    assert f"|tok:{words}" in evaluation.signature("BLEU", words)
    wrong = [text[:-2] + text[-1] + text[-2] for text in texts]
    assert evaluation.bleu(wrong, texts)["BLEU"] == pytest.approx(ngram_score(wrong, texts))


def test_a_few_letters_of_another_script_change_no_words():
    """A part of the texts is scored as all of them; names and quotes decide nothing."""
    assert evaluation.tokenizer(["Li Ming (李明) wohnt in Peking (北京).", "Ja."]) == "intl"
    assert evaluation.tokenizer(["Привет, как дела?", "नमस्ते, आप कैसे हैं?"]) == "intl"
    assert (
        evaluation.tokenizer(["安装 TensorFlow 驱动", "Kubernetes 集群", "JavaScript 教程"]) == "zh"
    )
    assert evaluation.tokenizer(["", "3.5 %", "---"]) == "intl"
    assert evaluation.bleu(["a b c d"], ["a b c d"], "zh")["BLEU"] == pytest.approx(1)
    assert evaluation.bleu(["会议在三月"], ["会议在三月"], "intl")["BLEU"] == 0.0
    assert evaluation.chrf_and_ter(CHINESE, [*CHINESE[:2], "软件已更新。"], ["TER"])["TER"] < 0.1


@pytest.mark.parametrize("shards", [1, 2])
def test_every_sentence_once_in_the_shortest_batches(shards):
    lengths = [9, 2, 4, 2, 5, 3, 8]
    sentences = np.array([[7] * n + [0] * (12 - n) for n in lengths])
    parts = [evaluation.batches(sentences, (4, 8, 12), 4, i, shards) for i in range(shards)]
    widths = []
    seen = []
    for group in zip(*parts, strict=True):
        widths.append({row["inputs"].shape for row in group})
        for row in group:
            real = row["id"][row["mask"] > 0].tolist()
            seen += real
            width = row["inputs"].shape[1]
            np.testing.assert_array_equal(row["inputs"][: len(real)], sentences[real, :width])
    assert widths == [{(4 // shards, 4)}, {(4 // shards, 12)}]
    assert seen == [1, 3, 5, 2, 4, 6, 0]  # by length, of equal ones the first


def test_mlperfs_log_has_a_fraction_or_per_cent():
    scores = {"BLEU": 0.25}
    assert [evaluation.logged_bleu(scores, form) for form in ("v0.5", "mllog")] == [25, 0.25]


def test_texts_are_found_and_read(tmp_path):
    (tmp_path / "a.de").write_bytes(b" x \ny\x0bz\n\n")
    (tmp_path / "b.sgm").write_bytes(b"<seg> p </seg>\n<seg>q</seg>")
    paths = evaluation.find_text(f"{tmp_path}/", f"a.de, none,{tmp_path}/b.sgm", "key")
    assert paths == [f"{tmp_path}/a.de", f"{tmp_path}/b.sgm"]
    assert [evaluation.read_lines(path) for path in paths] == [["x", "y\x0bz", ""], ["p", "q"]]
    assert evaluation.find_text(str(tmp_path), "none, other", "key") == []
    with pytest.raises(evaluation.DataError, match="config.key='none': there is no such file"):
        evaluation.find_text(str(tmp_path), "none", "key")

"""Translates lines of text with CTranslate2: python translate.py < sentences.txt > out.txt

It needs the files beside it and the package ctranslate2; if one of them is a model of sentencepiece
(.model, .spm), that package as well. The result is that of predict.py: the sentence of the best
score, a logarithm of the probability over a penalty of the length.
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import sys

CHUNK = 1024  # lines that are read before the first is translated
PATIENCE = 2  # the search ends after so many times `beams` translations
TINY = 1e-9  # CTranslate2 ends the search in another way where lengths have no penalty


class Subwords:
    """tensor2tensor's: a token is a run of letters and digits, or a run of other characters."""

    def __init__(self, entries):
        self.known = set(entries[2:]) - {""}
        self.letters = {c for entry in entries for c in entry} | set("\\_u;0123456789")
        self.longest = max(map(len, self.known))

    def split(self, text):
        """The subwords of a text. A blank between two words is not written."""
        runs = re.findall(r"[^\W_]+|[\W_]+", text)
        runs = [x for i, x in enumerate(runs) if x != " " or i in (0, len(runs) - 1)]
        pieces = []
        for run in runs:
            try:
                pieces += self.cut(run, self.letters)
            except KeyError:  # a letter that is in longer subwords only
                pieces += self.cut(run, {x for x in self.known if len(x) == 1})
        return pieces

    def cut(self, run, letters):
        """A token in the longest subwords; other letters are written as their numbers."""
        run = run.replace("\\", "\\\\").replace("_", "\\u")
        run = "".join(c if c in letters and c != "\n" else f"\\{ord(c)};" for c in run) + "_"
        start = 0
        while start < len(run):
            ends = range(min(len(run), start + self.longest), start, -1)
            end = next((end for end in ends if run[start:end] in self.known), None)
            if end is None:
                raise KeyError(run[start])
            yield run[start:end]
            start = end

    def join(self, pieces):
        """The text of subwords: the inverse of `split`."""
        text, was_word = "", False
        for escaped in filter(None, "".join(pieces).split("_")):
            run = re.sub(r"\\\\|\\u|\\0*([0-9]+);", self.letter, escaped)
            text += " " * (was_word and run[0].isalnum()) + run
            was_word = run[0].isalnum()
        return text

    def letter(self, match):
        if match[1] is None:
            return {"\\u": "_"}.get(match[0], "\\")
        code = int(match[1][:8])
        return chr(code) if code < 0xD800 or 0xE000 <= code < 0x110000 else "\u3013"


class Pieces:
    """Those of a sentencepiece model, or of one for each language."""

    def __init__(self, models, known, unknown):
        from sentencepiece import SentencePieceProcessor

        self.models = [SentencePieceProcessor(model_file=str(path)) for path in models]
        self.known, self.unknown = set(known), unknown

    def split(self, text):
        code = (re.match(">>.*?<<", text) or [""])[0] if self.models[1:] else ""  # of a language
        pieces = self.models[0].encode(text.removeprefix(code), out_type=str)
        pieces = [code] * bool(code) + pieces
        return [piece if piece in self.known else self.unknown for piece in pieces]

    def join(self, pieces):
        text = self.models[-1].decode(pieces)
        return text.replace("\u2581", " ").strip() if self.models[1:] else text


class Translator:
    def __init__(self, folder, **options):
        """Options are those of ctranslate2.Translator, such as compute_type="int8"."""
        import ctranslate2

        folder = pathlib.Path(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.rules, self.end = config["translate"], config["eos_token"]
        models = [folder / name for name in self.rules["sentencepiece"]]
        known = json.loads((folder / "shared_vocabulary.json").read_text(encoding="utf-8"))
        self.text = Pieces(models, known, config["unk_token"]) if models else Subwords(known)
        self.start = config["decoder_start_token"]
        if options.get("device", "cpu") == "cpu":  # each core has sentences of its own
            cores = os.cpu_count() or 1
            if hasattr(os, "sched_getaffinity"):  # without a container's quota, which is a file
                cores = len(os.sched_getaffinity(0))
            options = {"inter_threads": cores, "intra_threads": 1, **options}
        self.model = ctranslate2.Translator(str(folder), **options)

    def __call__(self, lines):
        """[(translation, score)] of lines; ("", None) for an empty or a too long one."""
        results, lengths = [("", None)] * len(lines), {}
        pieces = [self.text.split(line) for line in lines]
        for i, line in enumerate(lines):
            if line and len(pieces[i]) < self.rules["max_tokens"]:  # the end is one more
                lengths.setdefault(len(pieces[i]), []).append(i)
            elif line:
                print(f"too long: {line[:40]} ...", file=sys.stderr)
        found = [
            (numbers, self.search([pieces[i] for i in numbers], length))
            for length, numbers in lengths.items()
        ]
        for numbers, translations in found:
            for i, each in zip(numbers, translations, strict=True):
                results[i] = self.best(each.result())
        return results

    def join(self, pieces):
        return self.text.join(pieces).replace("\n", " ")

    def search(self, sentences, length):
        """Begins to translate sentences with so many pieces; returns a future of each."""
        beams = self.rules["beams"]
        return self.model.translate_batch(
            sentences,
            asynchronous=True,
            beam_size=beams,
            patience=PATIENCE,
            num_hypotheses=round(beams * PATIENCE) if beams > 1 else 1,
            length_penalty=self.rules["alpha"] or TINY,
            min_decoding_length=0,
            max_decoding_length=length + 1 + self.rules["extra_length"],
            max_input_length=0,
            max_batch_size=1024,
            batch_type="tokens",
            return_scores=True,
            return_end_token=True,
            end_token=[self.end, self.start],  # predict.py never chooses the start
        )

    def best(self, found):
        """(translation, score) with predict.py's penalty of what CTranslate2 has found."""
        ranked = []
        for pieces, score in zip(found.hypotheses, found.scores, strict=True):
            logp = score * len(pieces) ** (self.rules["alpha"] or TINY)
            # The word that pads is none; what has not ended counts only if nothing has.
            kind = self.start not in pieces, pieces[-1:] == [self.end]
            ranked.append((*kind, self.score(logp, len(pieces)), pieces))
        _, has_ended, score, pieces = max(ranked)
        return self.join(pieces[: len(pieces) - has_ended]), score

    def score(self, logp, size):
        """The score of a translation, from its log(probability) and its tokens."""
        offset = self.rules["offset"]  # 5 is GNMT's
        return logp / ((offset + size) / (offset + 1)) ** self.rules["alpha"]


def main():
    parser = argparse.ArgumentParser()
    types = "float32", "int8", "float16"
    parser.add_argument("--compute_type", choices=types, default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    translate = Translator(pathlib.Path(__file__).parent, **vars(parser.parse_args()))
    while lines := [*itertools.islice(sys.stdin.buffer, CHUNK)]:
        texts = (line.decode(errors="replace").strip().removeprefix("\ufeff") for line in lines)
        for text, _ in translate([*texts]):
            sys.stdout.buffer.write(f"{text}\n".encode())
        sys.stdout.flush()


if __name__ == "__main__":
    main()

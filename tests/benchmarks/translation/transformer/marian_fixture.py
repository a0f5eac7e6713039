"""The folder of a tiny MarianMTModel with random weights, and its network written out in NumPy."""

import json
import pathlib
from typing import Any

import numpy as np
import sentencepiece
from safetensors import numpy as safetensors

WIDTH, HIDDEN, HEADS, LAYERS = 16, 24, 2, 2
TEXTS = (
    ["Ein Hund läuft.", "Zwei Männer sitzen auf einer Bank.", "Das Haus ist alt und rot."],
    ["A dog runs.", "Two men are sitting on a bench.", "The house is old and red."],
)
PIECES = 50, 55  # of the models of sentencepiece


def write_folder(folder: pathlib.Path, **described: Any) -> dict[str, np.ndarray]:
    """Writes the files with the names and the order of transformers; returns the arrays."""
    folder.mkdir()
    names = ["</s>", "<unk>"]
    for side, size, lines in zip(("source", "target"), PIECES, TEXTS, strict=True):
        stem = folder / side
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines * 9),
            model_prefix=str(stem),
            vocab_size=size,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        stem.with_suffix(".model").rename(stem.with_suffix(".spm"))
        stem.with_suffix(".vocab").unlink()
        model = sentencepiece.SentencePieceProcessor(str(stem.with_suffix(".spm")))
        pieces = (model.id_to_piece(i) for i in range(model.vocab_size()))
        names += [name for name in pieces if name not in (*names, "<s>")]
    names += [">>fr<<", "<pad>"]
    ids = {name: i for i, name in enumerate(names)}
    pad = ids["<pad>"]
    config: dict[str, Any] = {
        "model_type": "marian",
        "d_model": WIDTH,
        "vocab_size": len(ids),
        "activation_function": "swish",
        "scale_embedding": True,
        "pad_token_id": pad,
        "eos_token_id": 0,
        "decoder_start_token_id": pad,
    }
    for stack in ("encoder", "decoder"):
        config |= {f"{stack}_layers": LAYERS, f"{stack}_ffn_dim": HIDDEN}
        config |= {f"{stack}_attention_heads": HEADS}
    languages = {"source_lang": "de", "target_lang": "en"}
    texts = {"config": config | described, "vocab": ids, "tokenizer_config": languages}
    for name, value in texts.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    arrays = random_arrays(len(ids))
    safetensors.save_file(arrays, folder / "model.safetensors")
    return arrays


def random_arrays(words: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)

    def normal(*shape: int, mean: float = 0.0) -> np.ndarray:
        return draw.normal(mean, 0.3, shape).astype(np.float32)

    arrays = {"model.shared.weight": normal(words, WIDTH), "final_logits_bias": normal(1, words)}
    for stack in ("encoder", "decoder"):
        for i in range(LAYERS):
            sizes = {"fc1": (HIDDEN, WIDTH), "fc2": (WIDTH, HIDDEN)}
            norms = ["self_attn_layer_norm", "final_layer_norm"]
            for part in ("self_attn", "encoder_attn")[: 1 + (stack == "decoder")]:
                norms += [f"{part}_layer_norm"]
                sizes |= {f"{part}.{p}_proj": (WIDTH, WIDTH) for p in ("q", "k", "v", "out")}
            prefix = f"model.{stack}.layers.{i}."
            for name, shape in sizes.items():
                arrays[f"{prefix}{name}.weight"] = normal(*shape)
                arrays[f"{prefix}{name}.bias"] = normal(shape[0])
            for name in norms:
                arrays[f"{prefix}{name}.weight"] = normal(WIDTH, mean=1.0)
                arrays[f"{prefix}{name}.bias"] = normal(WIDTH)
    return arrays


def logits(arrays: dict[str, np.ndarray], source: list[int], target: list[int]) -> np.ndarray:
    """float64[n, words] after the start and each of the `target` but the last; Marian's ids."""
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    table = arrays["model.shared.weight"]

    def dense(x, name):
        return x @ arrays[f"{name}.weight"].T + arrays[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * arrays[f"{name}.weight"] + arrays[f"{name}.bias"]

    def attention(x, memory, name, causal):
        queries, keys, values = (
            dense(of, f"{name}.{p}_proj").reshape(len(of), HEADS, -1).swapaxes(0, 1)
            for p, of in (("q", x), ("k", memory), ("v", memory))
        )
        scores = queries @ keys.swapaxes(1, 2) / np.sqrt(WIDTH // HEADS)
        if causal:
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        context = shares / shares.sum(-1, keepdims=True) @ values
        return dense(context.swapaxes(0, 1).reshape(x.shape), f"{name}.out_proj")

    def embed(ids):
        angles = np.arange(len(ids))[:, None] / 10000 ** (np.arange(WIDTH // 2) / (WIDTH // 2))
        return table[ids] * np.sqrt(WIDTH) + np.concatenate([np.sin(angles), np.cos(angles)], 1)

    def run(x, stack, memory=None):
        for i in range(LAYERS):
            prefix = f"model.{stack}.layers.{i}."
            y = attention(x, x, f"{prefix}self_attn", memory is not None)
            x = norm(x + y, f"{prefix}self_attn_layer_norm")
            if memory is not None:
                y = attention(x, memory, f"{prefix}encoder_attn", False)
                x = norm(x + y, f"{prefix}encoder_attn_layer_norm")
            y = dense(x, f"{prefix}fc1")
            x = norm(x + dense(y / (1 + np.exp(-y)), f"{prefix}fc2"), f"{prefix}final_layer_norm")
        return x

    memory = run(embed(source), "encoder")
    features = run(embed([len(table) - 1, *target[:-1]]), "decoder", memory)
    return features @ table.T + arrays["final_logits_bias"]

"""The models of OPUS-MT: the folders of MarianMTModel in Hugging Face's transformers, in and out.

Such a folder has config.json, the weights, and the files of a `Marian` vocabulary. The arrays
compute the `marian` variant of the network. Ids are in another order there: PAD is the last one.
"""

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from benchmarks.translation.vocabulary import EOS, PAD, Marian, marian_archive
from benchmarks.uses import Imported
from common import foreign
from common.errors import ConfigError, DataError
from common.foreign import files
from common.foreign.files import Foreign

TYPE = "marian"  # `model_type` in config.json
_TABLE, _BIAS = "model.shared.weight", "final_logits_bias"
# Other names of the table, and constants; transformers does not need them.
_COPIES = ("lm_head.weight", *(f"model.{s}.embed_tokens.weight" for s in ("encoder", "decoder")))
_CONSTANTS = tuple(f"model.{s}.embed_positions.weight" for s in ("encoder", "decoder"))
# What config.json must say, and what it means where it says nothing.
_REQUIRED = {
    "scale_embedding": (True, False),
    "share_encoder_decoder_embeddings": (True, True),
    "tie_word_embeddings": (True, True),
    "normalize_before": (False, False),
    "normalize_embedding": (False, False),
    "add_final_layer_norm": (False, False),
}
_SIZES = {  # our keys, and theirs for encoder and decoder
    "num_layers": "{}_layers",
    "mlp_width": "{}_ffn_dim",
    "num_heads": "{}_attention_heads",
}
_ACTIVATIONS = {"swish": "swish", "silu": "swish", "relu": "relu", "gelu": "gelu"}
_LAYERS = {  # of our arrays: names there, with several where one of ours is split
    "attention/query_key_value": tuple(f"self_attn.{part}_proj" for part in "qkv"),
    "attention/out": ("self_attn.out_proj",),
    "attention_norm": ("self_attn_layer_norm",),
    "cross_attention/query": ("encoder_attn.q_proj",),
    "cross_attention/key_value": tuple(f"encoder_attn.{part}_proj" for part in "kv"),
    "cross_attention/out": ("encoder_attn.out_proj",),
    "cross_norm": ("encoder_attn_layer_norm",),
    "mlp/in": ("fc1",),
    "mlp/out": ("fc2",),
    "mlp_norm": ("final_layer_norm",),
}


def foreign_settings(file: str) -> tuple[dict[str, Any], list[tuple[str, str]]] | None:
    """The keys of the config that a folder decides; None if `file` is of another model."""
    if not foreign.vocabulary_folder(file):  # other files are not read for it
        return None
    described = files.peek(file).beside.get("config.json", {})
    if described.get("model_type") != TYPE:
        return None
    where = f"{os.path.dirname(file)}/config.json"
    for key, (wanted, default) in _REQUIRED.items():
        if (value := described.get(key, default)) != wanted:
            raise DataError(f"{where}: {key} is {value}, and only {wanted} is read")
    if described.get("decoder_start_token_id") != described.get("pad_token_id"):
        raise DataError(f"{where}: decoder_start_token_id is not pad_token_id, as it must be")
    values: dict[str, Any] = {"variant": "marian", "width": described.get("d_model")}
    for key, name in _SIZES.items():
        sizes = [described.get(name.format(stack)) for stack in ("encoder", "decoder")]
        if sizes[0] != sizes[1]:
            names = " and ".join(name.format(stack) for stack in ("encoder", "decoder"))
            raise DataError(f"{where}: {names} are {sizes[0]} and {sizes[1]}; they must be equal")
        values[key] = sizes[0]
    activation = described.get("activation_function")
    if activation not in _ACTIVATIONS:
        raise DataError(
            f"{where}: activation_function is {activation!r}, not one of {', '.join(_ACTIVATIONS)}"
        )
    return values | {"activation": _ACTIVATIONS[activation]}, []


def read(benchmark: Any, file: str) -> Imported:
    """Reads the weights in a folder; DataError if the benchmark's data have another vocabulary."""
    folder = os.path.dirname(file)
    vocabulary = Marian(marian_archive(folder), folder)
    if benchmark.vocabulary.digest != vocabulary.digest:
        raise DataError(
            f"{benchmark.vocabulary.path} is not the vocabulary of {folder}: prepare the text "
            f"again with --vocabulary={folder}"
        )
    for key, value in (foreign_settings(file) or ({},))[0].items():
        if value != (own := getattr(benchmark.settings, key)):
            raise ConfigError(f"config.{key}={own!r}, but {folder} has {value!r}: leave it out")
    source = files.read(file)
    ids = [source.beside["config.json"].get(f"{name}_token_id") for name in ("pad", "eos")]
    if ids != vocabulary.marian_ids[:2]:
        raise DataError(
            f"{folder}/config.json has pad_token_id={ids[0]} and eos_token_id={ids[1]}, and "
            f"vocab.json {vocabulary.marian_ids[0]} and {vocabulary.marian_ids[1]}"
        )
    params, _ = jax.eval_shape(benchmark.init, jax.random.key(0))
    named: Any = flatten_dict(params, sep="/")
    shapes = {path: x.shape for path, x in named.items()}
    layout = functools.partial(_theirs, vocabulary)
    arrays = _arrays(source, vocabulary.size)
    values = files.adapt(file, arrays, shapes, layout)
    for path in ("embedding", "logits_bias"):
        values[path][vocabulary.size :] = 0  # these rows are no words
    count = sum(array.size for array in arrays.values())
    metadata = {
        "vocabulary": {"size": vocabulary.size, "digest": vocabulary.digest},
        "imported": {"path": file, "format": source.format, "sha256": source.sha256},
    }
    languages = " to ".join(filter(None, vocabulary.languages)) or "languages that it does not name"
    summary = (
        f"{file} ({source.format}): MarianMTModel, {languages}, {count:,} parameters, "
        f"SHA-256 {source.sha256[:12]}"
    )
    beside = {Marian.NAME: vocabulary.data}
    return Imported(file, unflatten_dict(values, sep="/"), {}, metadata, summary, beside)


def _arrays(source: Foreign, words: int) -> dict[str, np.ndarray]:
    """The arrays of a file without what is there twice; DataError if copies differ."""
    arrays = {name: array for name, array in source.arrays.items() if name not in _CONSTANTS}
    copies = {name: arrays.pop(name) for name in _COPIES if name in arrays}
    table = arrays.setdefault(_TABLE, next(iter(copies.values()), np.zeros((0, 0))))
    for name, copy in copies.items():
        if not np.array_equal(copy, table):
            raise DataError(f"{source.path}: {name} is not {_TABLE}; only tied tables are read")
    if len(table) != words:
        raise DataError(
            f"{source.path}: {_TABLE} has {len(table):,} rows, and vocab.json {words:,} words"
        )
    arrays.setdefault(_BIAS, np.zeros((1, words), np.float32))
    return arrays


def _theirs(vocabulary: Marian, path: str, array: np.ndarray) -> Mapping[str, np.ndarray]:
    """An array of ours as MarianMTModel has it: {name: array}, several where it is split there."""
    if path in ("embedding", "logits_bias"):
        rows = array[np.argsort(vocabulary.marian_ids)]
        return {_TABLE: rows} if path == "embedding" else {_BIAS: rows[None]}
    layer, _, rest = path.partition("/")
    part, _, leaf = rest.rpartition("/")
    stack, _, number = layer.partition("_")
    names = _LAYERS[part]
    end = "bias" if leaf == "bias" else "weight"
    parts = np.split(array, len(names), -1)
    return {
        f"model.{stack}.layers.{number}.{name}.{end}": each.T if leaf == "kernel" else each
        for name, each in zip(names, parts, strict=True)
    }


def folder(
    settings: Any, vocabulary: Marian, params: Any
) -> tuple[dict[str, np.ndarray], dict[str, bytes]]:
    """A model as such a folder: its arrays by name, and the files beside the weights."""
    arrays: dict[str, np.ndarray] = {}
    for path, array in flatten_dict(params, sep="/").items():
        arrays |= _theirs(vocabulary, path, np.asarray(array, np.float32))
    pad, eos = vocabulary.marian_ids[PAD], vocabulary.marian_ids[EOS]
    ids = {"decoder_start_token_id": pad, "pad_token_id": pad, "eos_token_id": eos}
    described: dict[str, Any] = {
        "architectures": ["MarianMTModel"],
        "model_type": TYPE,
        "d_model": settings.width,
        "activation_function": settings.activation,
        "vocab_size": vocabulary.size,
        "dropout": settings.dropout,
        "max_position_embeddings": 512,
        **{key: wanted for key, (wanted, _) in _REQUIRED.items()},
        **ids,
    }
    for key, name in _SIZES.items():
        described |= {name.format(s): getattr(settings, key) for s in ("encoder", "decoder")}
    search = {"num_beams": settings.beam_size, "length_penalty": settings.length_penalty}
    search |= {"bad_words_ids": [[pad]], "max_length": 512}
    objects = {"config.json": described, "generation_config.json": search | ids}
    texts = {name: json.dumps(value, indent=2).encode() for name, value in objects.items()}
    return {name: np.ascontiguousarray(x) for name, x in arrays.items()}, {
        **texts,
        **vocabulary.contents,
    }

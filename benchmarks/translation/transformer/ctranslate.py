"""The Transformer in the form of CTranslate2, a program that translates fast on CPUs."""

import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.translation.transformer import models
from benchmarks.translation.use import TranslatorUses
from benchmarks.translation.vocabulary import EOS, PAD, SentencePiece, Subwords
from common.errors import ConfigError, UserError
from common.exportable import Example, ExportableTranslator

_MAX_TOKENS = 2048  # of a sentence, its end included, as predict.py takes them
_EXAMPLES = 16  # sentences that an export is checked with


class TransformerUses(TranslatorUses):
    """The uses of a Transformer."""

    def ctranslate2(self, params: Any) -> ExportableTranslator:
        benchmark: Any = self._benchmark
        settings, vocabulary = benchmark.settings, benchmark.vocabulary

        def write(folder: str) -> None:
            if not isinstance(vocabulary, Subwords | SentencePiece):
                raise ConfigError(
                    f"--format=ctranslate2: {vocabulary.path} is a vocabulary of {vocabulary.kind},"
                    " whose text needs a tokenizer; use one of subwords or sentencepiece"
                )
            tokens = vocabulary.entries
            if twice := [name for name, number in Counter(tokens).items() if number > 1]:
                raise ConfigError(
                    f"--format=ctranslate2: {vocabulary.path} has {twice[0]!r} twice, and "
                    "CTranslate2 knows words by their names; use --format=stablehlo"
                )
            name = pathlib.Path(vocabulary.path).name
            pathlib.Path(folder, name).write_bytes(vocabulary.data)
            max_tokens = max(settings.eval_lengths[-1], _MAX_TOKENS)
            rules = {
                "beams": settings.beam_size,
                "alpha": settings.length_penalty,
                "extra_length": settings.extra_length,
                "max_tokens": max_tokens,
                "sentencepiece": [name] if isinstance(vocabulary, SentencePiece) else [],
            }
            unknown = tokens[PAD if vocabulary.unknown is None else vocabulary.unknown]
            positions = max_tokens + settings.extra_length
            save(benchmark.network, params, tokens, unknown, positions, rules, folder)

        return ExportableTranslator(write, partial(self._examples, params))

    def _examples(self, params: Any) -> list[Example]:
        """Some sentences to evaluate, or of drawn words, and their translations."""
        vocabulary: Any = self._benchmark.vocabulary
        tokens = vocabulary.entries
        try:
            self._benchmark.read("eval")
            ids = self._benchmark.eval_pairs[0][:_EXAMPLES]
        except UserError:  # the data may have gone
            ids = self.drawn()
        sources = [vocabulary.decode(row) for row in ids.tolist()]
        encoded = [*map(self.encode, filter(None, sources))]
        rows = np.zeros((len(encoded), max(map(len, encoded))), np.int32)
        for row, each in zip(rows, encoded, strict=True):
            row[: len(each)] = each
        found = jax.jit(self.n_best, static_argnums=2)(params, rows, 1)
        found, scores = (np.asarray(x)[:, 0] for x in found)
        return [
            Example(
                source=vocabulary.decode(each),
                source_pieces=[tokens[i] for i in each[:-1]],
                translation=self.text(best),
                pieces=[tokens[i] for i in best[best > EOS]],
                score=float(score),
                is_cut=self.is_cut(best),
            )
            for each, best, score in zip(encoded, found, scores, strict=True)
        ]


def save(
    network: models.Transformer,
    params: Any,
    tokens: Sequence[str],
    unknown: str,
    positions: int,
    rules: Mapping[str, Any],
    folder: str,
) -> None:
    """Writes model.bin, config.json and the vocabulary into an existing local folder, in float32.

    Args:
      tokens: the name of each id of the vocabulary; no two are equal.
      unknown: the one that stands for all that has none.
      positions: how many tokens a sentence may have.
      rules: goes into config.json as "translate", for the program beside it.
    """
    from ctranslate2.specs import common_spec, transformer_spec

    params, variant = jax.tree.map(np.asarray, params), network.variant
    activations = {"relu": common_spec.Activation.RELU, "swish": common_spec.Activation.SWISH}
    spec: Any = transformer_spec.TransformerSpec.from_config(
        network.layers,
        network.heads,
        pre_norm=not variant.post_norm,
        activation=activations[network.activation],
    )
    table = params["embedding"][: len(tokens)]  # the rows below are no words
    encodings = models.positional_encoding(positions, network.width, variant.ends_at_slowest)
    for name, stack in ("encoder", spec.encoder), ("decoder", spec.decoder):
        embeddings = stack.embeddings[0] if name == "encoder" else stack.embeddings
        embeddings.weight, stack.position_encodings.encodings = table, encodings
        for i, layer in enumerate(stack.layer):
            _fill(layer, params[f"{name}_{i}"])
        if not variant.post_norm:
            _fill_norm(stack.layer_norm, params[f"{name}_norm"])
    spec.decoder.projection.weight = table
    if variant.has_biases:
        spec.decoder.projection.bias = params["logits_bias"][: len(tokens)]
    spec.decoder.start_from_zero_embedding = variant.has_biases
    spec.register_source_vocabulary(list(tokens))
    spec.register_target_vocabulary(list(tokens))
    config = spec.config
    config.layer_norm_epsilon = variant.epsilon
    config.add_source_eos, config.eos_token = True, tokens[EOS]
    config.decoder_start_token = config.bos_token = tokens[PAD]
    config.unk_token = unknown
    config.add_attribute("translate", dict(rules))
    spec.validate()
    spec.optimize()
    spec.save(folder)


def _fill(layer: Any, params: Any) -> None:
    """Sets the weights of one layer of the encoder or the decoder."""
    parts = params["attention"]
    _fill_norm(layer.self_attention.layer_norm, params["attention_norm"])
    for linear, name in zip(layer.self_attention.linear, ("query_key_value", "out"), strict=True):
        _fill_linear(linear, parts[name])
    if "cross_attention" in params:
        parts = params["cross_attention"]
        _fill_norm(layer.attention.layer_norm, params["cross_norm"])
        for linear, name in zip(layer.attention.linear, ("query", "key_value", "out"), strict=True):
            _fill_linear(linear, parts[name])
    _fill_norm(layer.ffn.layer_norm, params["mlp_norm"])
    _fill_linear(layer.ffn.linear_0, params["mlp"]["in"])
    _fill_linear(layer.ffn.linear_1, params["mlp"]["out"])


def _fill_linear(spec: Any, params: Any) -> None:
    spec.weight = np.ascontiguousarray(params["kernel"].T)
    if "bias" in params:
        spec.bias = params["bias"]


def _fill_norm(spec: Any, params: Any) -> None:
    spec.gamma, spec.beta = params["scale"], params["bias"]

"""The Transformer in the form of CTranslate2, a program that translates fast on CPUs."""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.translation.transformer import models
from benchmarks.translation.use import TranslatorUses
from benchmarks.translation.vocabulary import EOS, PAD, Marian, SentencePiece, Subwords
from common.errors import ConfigError, UserError
from common.exportable import Translated

_MAX_TOKENS = 2048  # of a sentence, its end included, as predict.py takes them
_EXAMPLES = 16  # sentences that an export is checked with


class CTranslateUses(TranslatorUses):
    """The uses of a translator that CTranslate2 computes."""

    @property
    def formats(self) -> Sequence[str]:
        return ("ctranslate2",)

    def write_ctranslate2(self, params: Any, folder: str) -> list[Translated]:
        benchmark: Any = self._benchmark
        settings, vocabulary = benchmark.settings, benchmark.vocabulary
        files = {pathlib.Path(vocabulary.path).name: vocabulary.data}
        if isinstance(vocabulary, Marian):
            files = {name: vocabulary.contents[name] for name in Marian.FILES[:2]}
        elif not isinstance(vocabulary, Subwords | SentencePiece):
            raise ConfigError(
                f"--format=ctranslate2: {vocabulary.path} is a vocabulary of {vocabulary.kind}, "
                "whose text needs a tokenizer; use one of subwords or sentencepiece"
            )
        for name, content in files.items():
            pathlib.Path(folder, name).write_bytes(content)
        max_tokens = max(settings.eval_lengths[-1], _MAX_TOKENS)
        spec = _spec(benchmark.network, params, vocabulary.size, max_tokens + settings.extra_length)
        names = vocabulary.pieces
        spec.register_source_vocabulary(names)
        spec.register_target_vocabulary(names)
        config = spec.config
        config.add_source_eos, config.eos_token = True, names[EOS]
        config.decoder_start_token = config.bos_token = names[PAD]
        config.unk_token = names[PAD if vocabulary.unknown is None else vocabulary.unknown]
        rules = {
            "beams": settings.beam_size,
            "alpha": settings.length_penalty,
            "extra_length": settings.extra_length,
            "max_tokens": max_tokens,
            "offset": 0 if settings.variant == "marian" else 5,
            "sentencepiece": [] if isinstance(vocabulary, Subwords) else [*files],
        }
        config.add_attribute("translate", rules)  # for the script
        spec.validate()
        spec.optimize()
        spec.save(folder)
        return self._examples(params)

    def _examples(self, params: Any) -> list[Translated]:
        """Sentences to evaluate, or of drawn words, and their translations."""
        vocabulary: Any = self._benchmark.vocabulary
        try:
            self._benchmark.read("eval")
            ids = self._benchmark.eval_pairs[0][:_EXAMPLES]
        except UserError:  # the data may have gone
            ids = self.drawn()
        sources = [*filter(None, map(vocabulary.decode, ids.tolist()))]
        encoded = [*map(self.encode, sources)]
        rows = np.zeros((len(encoded), max(map(len, encoded))), np.int32)
        for row, each in zip(rows, encoded, strict=True):
            row[: len(each)] = each
        found = jax.jit(self.n_best, static_argnums=2)(params, rows, 1)
        found, scores = (np.asarray(x)[:, 0] for x in found)
        return [
            Translated(
                (source, [vocabulary.pieces[i] for i in each[:-1]]),
                (self.text(best), [vocabulary.pieces[i] for i in best[best > EOS]]),
                float(score),
                self.is_cut(best),
            )
            for source, each, best, score in zip(sources, encoded, found, scores, strict=True)
        ]


def _spec(network: models.Transformer, params: Any, size: int, positions: int) -> Any:
    """CTranslate2's form of a network that knows `size` words and so many positions."""
    from ctranslate2.specs import common_spec, transformer_spec

    params, variant = jax.tree.map(np.asarray, params), network.variant
    spec: Any = transformer_spec.TransformerSpec.from_config(
        network.layers,
        network.heads,
        pre_norm=not variant.post_norm,
        activation=common_spec.Activation[network.activation.upper()],
    )
    spec.config.layer_norm_epsilon = variant.epsilon
    table = params["embedding"][:size]  # the rows below are no words
    encodings = models.positional_encoding(positions, network.width, variant.ends_at_slowest)
    spec.encoder.embeddings[0].weight = spec.decoder.embeddings.weight = table
    spec.decoder.projection.weight = table
    if variant.has_biases:
        spec.decoder.projection.bias = params["logits_bias"][:size]
    for name, stack in ("encoder", spec.encoder), ("decoder", spec.decoder):
        stack.position_encodings.encodings = encodings
        for i, layer in enumerate(stack.layer):
            _fill(layer, params[f"{name}_{i}"])
        if not variant.post_norm:
            _fill_norm(stack.layer_norm, params[f"{name}_norm"])
    return spec


def _fill(layer: Any, params: Any) -> None:
    """Sets the weights of a layer."""
    own, ffn = layer.self_attention, layer.ffn
    parts: list[Any] = [
        (own, "attention", {"query_key_value": own.linear[0], "out": own.linear[1]}),
        (ffn, "mlp", {"in": ffn.linear_0, "out": ffn.linear_1}),
    ]
    if "cross_attention" in params:
        names = dict(zip(("query", "key_value", "out"), layer.attention.linear, strict=True))
        parts.append((layer.attention, "cross_attention", names))
    for part, name, linears in parts:
        _fill_norm(part.layer_norm, params[f"{name.replace('cross_attention', 'cross')}_norm"])
        for key, linear in linears.items():
            linear.weight = np.ascontiguousarray(params[name][key]["kernel"].T)
            linear.bias = params[name][key].get("bias", linear.bias)


def _fill_norm(spec: Any, params: Any) -> None:
    spec.gamma, spec.beta = params["scale"], params["bias"]

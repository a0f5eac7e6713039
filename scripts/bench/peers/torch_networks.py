"""The Transformer and NeuMF of PyTorch's own layers, for scripts.bench.score.

A network is a `torch.nn.Module` from a training batch, {name: tensor}, to the loss, a scalar. Its
method `tree` returns its tensors as our parameters: with the same names and shapes, so that they
compute the same. The first weights are drawn as programs in PyTorch draw them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.translation.transformer.models import positions
from benchmarks.translation.vocabulary import PAD


def transformer(torch: Any, benchmark: Any) -> Any:
    """`torch.nn.Transformer` on the packed rows of a `benchmarks.translation.transformer`.

    As in ours, attention has no biases, and one table embeds both languages and gives the logits.
    """
    nn, keys, words = torch.nn, benchmark.settings, benchmark.vocabulary_size
    width, heads = keys.width, keys.num_heads

    def stack(side: str, attentions: tuple[str, ...], **more: Any) -> Any:
        options = {"layer_norm_eps": 1e-6, "batch_first": True, "norm_first": True}
        layer_of = getattr(nn, f"Transformer{side}Layer")
        layer = layer_of(width, heads, keys.mlp_width, keys.dropout, **options)
        for name in attentions:
            plain = nn.MultiheadAttention(width, heads, keys.dropout, bias=False, batch_first=True)
            setattr(layer, name, plain)
        norm = nn.LayerNorm(width, 1e-6)
        return getattr(nn, f"Transformer{side}")(layer, keys.num_layers, norm, **more)

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            encoder = stack("Encoder", ("self_attn",), enable_nested_tensor=False)
            decoder = stack("Decoder", ("self_attn", "multihead_attn"))
            stacks = {"custom_encoder": encoder, "custom_decoder": decoder}
            self.stacks = nn.Transformer(width, heads, batch_first=True, **stacks)
            self.table, self.dropout = nn.Embedding(words, width), nn.Dropout(keys.dropout)
            nn.init.normal_(self.table.weight, std=width**-0.5)
            self.register_buffer("waves", torch.tensor(positions(keys.row_length, width)))

        def forward(self, batch: Mapping[str, Any]) -> Any:
            source, target = batch["inputs_segmentation"], batch["targets_segmentation"]
            targets, place = batch["targets"].long(), batch["targets_position"]
            before = nn.functional.pad(targets[:, :-1], (1, 0)).masked_fill(place == 0, PAD)
            features = self.stacks(
                self._embed(batch["inputs"], batch["inputs_position"]),
                self._embed(before, place),
                src_mask=_mask(torch, source, source, heads),
                tgt_mask=_mask(torch, target, target, heads, causal=True),
                memory_mask=_mask(torch, target, source, heads),
            )
            logits = nn.functional.linear(features, self.table.weight).float()
            # PyTorch's smoothing gives the target a share too.
            smoothing = keys.label_smoothing * words / (words - 1)
            flat = logits.flatten(0, 1), targets.flatten()
            return nn.functional.cross_entropy(*flat, ignore_index=PAD, label_smoothing=smoothing)

        def _embed(self, ids: Any, place: Any) -> Any:
            return self.dropout(self.table(ids) * math.sqrt(width) + self.waves[place])

        def tree(self) -> Any:
            rows = -words % 128  # of our table; they are no words
            tree = {"embedding": nn.functional.pad(self.table.weight, (0, 0, 0, rows))}
            for side in ("encoder", "decoder"):
                layers = getattr(self.stacks, side)
                tree |= {f"{side}_{i}": _layer(layer) for i, layer in enumerate(layers.layers)}
                tree[f"{side}_norm"] = _norm(layers.norm)
            return tree

    return Translator()


def _mask(torch: Any, queries: Any, keys: Any, heads: int, causal: bool = False) -> Any:
    """float32[b * heads, Lq, Lk] from segments int32[b, L]: -inf where a query must not see a key.

    Padding sees all keys, so that no row of the softmax is nan.
    """
    seen = (queries[:, :, None] == keys[:, None, :]) | (queries == 0)[:, :, None]
    seen = seen.tril() if causal else seen
    mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)
    return mask.repeat_interleave(heads, 0)


def _dense(layer: Any) -> Any:
    return {"kernel": layer.weight.T, **({} if layer.bias is None else {"bias": layer.bias})}


def _norm(layer: Any) -> Any:
    return {"scale": layer.weight, "bias": layer.bias}


def _layer(layer: Any) -> Any:
    """Our parameters of a layer of the encoder or of the decoder."""
    attention, norms = layer.self_attn, [layer.norm1, layer.norm2]
    tree = {
        "attention": {"query_key_value": {"kernel": attention.in_proj_weight.T}},
        "mlp": {"in": _dense(layer.linear1), "out": _dense(layer.linear2)},
    }
    tree["attention"]["out"] = _dense(attention.out_proj)
    if hasattr(layer, "multihead_attn"):
        cross = layer.multihead_attn
        query, key_value = (x.T for x in cross.in_proj_weight.tensor_split([cross.embed_dim]))
        parts = {"query": {"kernel": query}, "key_value": {"kernel": key_value}}
        tree["cross_attention"] = {**parts, "out": _dense(cross.out_proj)}
        tree["cross_norm"], norms = _norm(norms[1]), [norms[0], layer.norm3]
    return tree | {"attention_norm": _norm(norms[0]), "mlp_norm": _norm(norms[1])}


def ncf(torch: Any, benchmark: Any) -> Any:
    """NeuMF on the pairs of a `benchmarks.ncf`.

    The tables begin with 0.01 times normal numbers, as in He et al.'s program and its ports.
    """
    nn, keys, sizes = torch.nn, benchmark.settings, benchmark.metadata
    factors, widths = keys.gmf_dim, tuple(keys.mlp_layers)

    class NeuMF(nn.Module):
        def __init__(self):
            super().__init__()
            width = factors + widths[0] // 2
            self.users = nn.Embedding(sizes["num_users"], width)
            self.items = nn.Embedding(sizes["num_items"], width)
            pairs = zip(widths[:-1], widths[1:], strict=True)
            self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairs)
            self.logit = nn.Linear(factors + widths[-1], 1)
            for table in (self.users, self.items):
                nn.init.normal_(table.weight, std=0.01)
            for layer in (*self.layers, self.logit):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

        def forward(self, batch: Mapping[str, Any]) -> Any:
            user, item = self.users(batch["user"]), self.items(batch["item"])
            hidden = torch.cat([user[:, factors:], item[:, factors:]], -1)
            for layer in self.layers:
                hidden = layer(hidden).relu()
            joined = torch.cat([user[:, :factors] * item[:, :factors], hidden], -1)
            logits, labels = self.logit(joined)[:, 0].float(), batch["label"].float()
            return nn.functional.binary_cross_entropy_with_logits(logits, labels)

        def tree(self) -> Any:
            tree = {f"mlp_{i}": _dense(layer) for i, layer in enumerate(self.layers)}
            tables = {"users": self.users, "items": self.items}
            tree |= {name: {"embedding": table.weight} for name, table in tables.items()}
            return tree | {"logit": _dense(self.logit)}

    return NeuMF()


# By config.benchmark.
NETWORKS: Mapping[str, Callable[[Any, Any], Any]] = {"transformer": transformer, "ncf": ncf}

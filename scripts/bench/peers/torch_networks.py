"""ResNet, Transformer, GNMT and NeuMF built from PyTorch's layers, for `on_torch`.

A network is a `torch.nn.Module` from a training batch, {name: tensor}, to the loss, a scalar. The
first weights are drawn as programs in PyTorch draw them. tests/scripts/bench/test_peers.py compares
the translators' losses with our models' losses for the same weights.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import models
from benchmarks.translation.transformer.models import positions
from benchmarks.translation.vocabulary import EOS, PAD


def resnet(torch: Any, benchmark: Any) -> Any:
    """The ResNet v1.5 of a `benchmarks.resnet`, on images uint8[b, h, w, 3]."""
    nn, keys, spec = torch.nn, benchmark.settings, benchmark.input_spec
    sizes, block = models.DEPTHS[keys.model.resnet_depth]
    is_wide, filters = block is models.BottleneckBlock, keys.model.num_filters
    stages = trunk(torch, sizes, is_wide, filters, (1, 2, 2, 2))
    channels = filters * 2 ** (len(sizes) - 1) * (4 if is_wide else 1)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(keys.regularisation.dropout)]
    head.append(nn.Linear(channels, benchmark.classes))

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*stages.values(), *head)
            self.normalize = normalize(torch, spec.mean, spec.std)

        def forward(self, batch: Mapping[str, Any]) -> Any:
            images = batch["image"]
            images = torch.where(batch["flip"][:, None, None, None], images.flip(2), images)
            logits = self.layers(self.normalize(images)).float()
            smoothing = keys.objective.label_smoothing
            labels = batch["label"].long()
            return nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)

    return Classifier()


def normalize(torch: Any, mean: Sequence[float], std: Sequence[float]) -> Any:
    """The module from images [b, h, w, 3] to (images - mean) / std [b, 3, h, w], channels last."""

    class Normalize(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, values in (("mean", mean), ("std", std)):
                self.register_buffer(name, torch.tensor(values).view(3, 1, 1))

        def forward(self, images: Any) -> Any:
            return (images.permute(0, 3, 1, 2) - self.mean) / self.std

    return Normalize()


def trunk(
    torch: Any, sizes: Sequence[int], is_wide: bool, filters: int, strides: Any, norm: Any = None
) -> dict[str, Any]:
    """A ResNet v1.5 without its head: {"stem", "stage1", ...}, a `torch.nn.Module` each.

    `is_wide` is whether its blocks have bottlenecks, `norm` their `BatchNorm2d`.
    """
    nn = torch.nn
    norm = norm or nn.BatchNorm2d

    def unit(channels: int, features: int, side: int, stride: int = 1) -> list[Any]:
        conv = nn.Conv2d(channels, features, side, stride, side // 2, bias=False)
        return [conv, norm(features, eps=models.EPSILON)]

    class Block(nn.Module):
        def __init__(self, channels: int, filters: int, stride: int):
            super().__init__()
            features = 4 * filters if is_wide else filters
            first = unit(channels, filters, 1) if is_wide else []
            middle = unit(filters if is_wide else channels, filters, 3, stride)
            last = unit(filters, features, 1 if is_wide else 3)
            relu = [nn.ReLU(inplace=True)]
            self.branch = nn.Sequential(*first, *relu[: len(first)], *middle, *relu, *last)
            is_same = stride == 1 and channels == features
            self.shortcut = nn.Sequential(*(() if is_same else unit(channels, features, 1, stride)))

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.branch(x) + self.shortcut(x))

    stem = [*unit(3, filters, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    stages, channels = {"stem": nn.Sequential(*stem)}, filters
    for stage, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        width, blocks = filters * 2**stage, []
        for number in range(size):
            blocks.append(Block(channels, width, 1 if number else stride))
            channels = 4 * width if is_wide else width
        stages[f"stage{stage + 1}"] = nn.Sequential(*blocks)
    return stages


def transformer(torch: Any, benchmark: Any) -> Any:
    """`torch.nn.Transformer` on the packed rows of a `benchmarks.translation.transformer`.

    As in our model, attention has no biases, and one table embeds both languages and gives the
    logits.
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

    return Translator()


def _mask(torch: Any, queries: Any, keys: Any, heads: int, causal: bool = False) -> Any:
    """float32[b * heads, Lq, Lk] from segments int32[b, L]: -inf where a query must not see a key.

    Padding sees all keys, so that no row of the softmax is nan.
    """
    seen = (queries[:, :, None] == keys[:, None, :]) | (queries == 0)[:, :, None]
    seen = seen.tril() if causal else seen
    mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)
    return mask.repeat_interleave(heads, 0)


def gnmt(torch: Any, benchmark: Any) -> Any:
    """The network of a `benchmarks.translation.gnmt`, with a `torch.nn.LSTM` for each layer.

    `compiled` are its modules that torch.compile takes on a GPU: it cannot take LSTMs.
    """
    nn, keys, words = torch.nn, benchmark.settings, benchmark.vocabulary_size
    width, counted = keys.width, PAD if keys.counts_eos else EOS

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = (nn.Linear(width, width, bias=False) for _ in range(2))
            self.direction, self.bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))
            self.gain = nn.Parameter(torch.tensor(keys.attention_gain))

        def forward(self, query: Any, values: Any, hidden: Any) -> Any:
            """Of queries [b, T, H] and values [b, S, H]; `hidden` bool[b, S] are no words."""
            direction = self.gain * self.direction / self.direction.norm()
            inside = self.query(query)[:, :, None] + (self.key(values) + self.bias)[:, None]
            scores = (inside.tanh() @ direction).masked_fill(hidden[:, None], -math.inf)
            return scores.softmax(-1) @ values

    class Classifier(nn.Linear):
        def forward(self, features: Any, targets: Any) -> Any:
            """The loss of features [T, b, H] and targets int64[b, T]."""
            labels = targets.masked_fill(targets <= counted, PAD).T.flatten()
            logits = super().forward(features).float().flatten(0, 1)
            how = {"label_smoothing": keys.label_smoothing, "reduction": "sum"}
            total = nn.functional.cross_entropy(logits, labels, ignore_index=PAD, **how)
            return total / len(targets)

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(words, width)
            self.classifier = Classifier(width, words, keys.projection_bias)
            sizes = [width, 2 * width, *[width] * (keys.num_encoder_layers - 2)]
            lstm = [nn.LSTM(n, width, bidirectional=not i) for i, n in enumerate(sizes)]
            self.encoder, self.attention = nn.ModuleList(lstm), Attention()
            sizes = [width, *[2 * width] * (keys.num_decoder_layers - 1)]
            self.decoder = nn.ModuleList(nn.LSTM(n, width) for n in sizes)
            self.dropout = nn.Dropout(keys.dropout)
            self.compiled = [self.attention, self.classifier]
            for x in self.parameters():
                nn.init.uniform_(x, -keys.init_scale, keys.init_scale)
            nn.init.zeros_(self.attention.bias)
            nn.init.constant_(self.attention.gain, keys.attention_gain)

        def forward(self, batch: Mapping[str, Any]) -> Any:
            inputs, targets = batch["inputs"], batch["targets"].long()
            hidden, rnn = inputs == PAD, nn.utils.rnn
            packed = rnn.pack_padded_sequence(
                self.dropout(self.table(inputs.T)), batch["length"], enforce_sorted=False
            )
            x, _ = rnn.pad_packed_sequence(self.encoder[0](packed)[0], total_length=len(inputs.T))
            for i, layer in enumerate(self.encoder[1:], 1):
                y, _ = layer(self.dropout(x))
                x = x + y if i > 1 else y
            values, before = x.transpose(0, 1), nn.functional.pad(targets.T[:-1], (0, 0, 1, 0))
            x, _ = self.decoder[0](self.dropout(self.table(before)))
            context = self.attention(x.transpose(0, 1), values, hidden).transpose(0, 1)
            for i, layer in enumerate(self.decoder[1:], 1):
                y, _ = layer(self.dropout(torch.cat([x, context], -1)))
                x = x + y if i > 1 else y
            return self.classifier(x, targets)

        def inputs(self, batch: Mapping[str, Any], device: str) -> Mapping[str, Any]:
            """The lengths of the sentences stay on the host, as PyTorch wants them."""
            both = {side: torch.tensor(batch[side]).to(device) for side in ("inputs", "targets")}
            return {**both, "length": torch.tensor((batch["inputs"] != PAD).sum(1))}

    return Translator()


def ncf(torch: Any, benchmark: Any) -> Any:
    """NeuMF on the pairs of a `benchmarks.ncf`.

    The tables begin with 0.01 times normal numbers, as in He et al.'s program and its ports.
    """
    nn, keys = torch.nn, benchmark.settings
    factors, widths = keys.gmf_dim, tuple(keys.mlp_layers)

    class NeuMF(nn.Module):
        def __init__(self):
            super().__init__()
            width = factors + widths[0] // 2
            self.users = nn.Embedding(benchmark.model.num_users, width)
            self.items = nn.Embedding(benchmark.model.num_items, width)
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

    return NeuMF()

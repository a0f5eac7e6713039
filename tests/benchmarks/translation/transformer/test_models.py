"""The Transformer: published sizes, packed rows, decoding step by step, and a copy in PyTorch."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.translation import reductions
from benchmarks.translation.transformer import losses, models
from common.hashing import keep_mask

WORDS, WIDTH, HEADS, LAYERS = 37, 16, 2, 2
SIDES = "inputs", "targets"


def tiny(**changes: Any) -> Any:
    sizes = {"vocab_size": WORDS, "width": WIDTH, "mlp_width": 24, "heads": HEADS}
    others = {"layers": LAYERS, "dtype": jnp.float32, "dropout": 0.0}
    return models.Transformer(**{**sizes, **others, **changes})


def sentences(count, seed=0):
    """Pairs (source, target) of up to 7 words and EOS."""
    draw = np.random.default_rng(seed)

    def sentence():
        return [*draw.integers(2, WORDS, draw.integers(1, 7)), 1]

    return [(sentence(), sentence()) for _ in range(count)]


def packed(rows, length, gap=0) -> Any:
    """The six arrays of rows, each a list of pairs, with `gap` zeros between sentences."""
    arrays = {
        side + kind: np.zeros((len(rows), length), np.int32)
        for side in SIDES
        for kind in ("", "_segmentation", "_position")
    }
    for row, pairs in enumerate(rows):
        for side, texts in zip(SIDES, zip(*pairs, strict=True), strict=True):
            start = 0
            for number, text in enumerate(texts, 1):
                span = row, slice(start, start + len(text))
                arrays[side][span] = text
                arrays[f"{side}_segmentation"][span] = number
                arrays[f"{side}_position"][span] = np.arange(len(text))
                start += len(text) + gap
    return arrays


def weights(model, seed=0, dtype: Any = np.float32) -> Any:
    """Random parameters in which every array matters: norms and biases as well."""
    rows, draw = packed([sentences(1)], 8), np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), rows, None))

    def values(path, leaf):
        size = {"kernel": leaf.shape[0] ** -0.5, "embedding": WIDTH**-0.5}.get(path[-1].key, 0.1)
        return (draw.normal(0, size, leaf.shape) + (path[-1].key == "scale")).astype(dtype)

    return jax.tree_util.tree_map_with_path(values, shapes)


def scores(model, params, rows, seeds=None):
    """(logits, loss of each token)."""

    @jax.jit
    def run(params, rows, seeds):
        features, table = model.apply(params, rows, seeds), params["params"]["embedding"]
        loss = losses.smoothed_cross_entropy(features, table, rows["targets"], WORDS)
        return losses.logits(features, table, WORDS), loss

    return run(params, rows, seeds)


def test_the_number_of_parameters_is_the_published_one():
    rows = packed([sentences(1)], 8)
    key = jax.random.key(0)
    for words in (33708, 32768):
        model = models.Transformer(words)
        tree = jax.eval_shape(lambda: model.init(key, rows, None))["params"]  # noqa: B023
        count = sum(x.size for x in jax.tree.leaves(tree))
        padded = tree["embedding"].shape[0]
        assert padded % 128 == 0 and 0 <= padded - words < 128
        assert count - 1024 * padded == 176_287_744
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(tree))


@pytest.mark.long
def test_initial_weights():
    """Xavier's bound for each kernel of its own, also where several are one product."""
    x, key = jnp.zeros((1, 2, 64)), jax.random.key(1)
    own: Any = models.MultiHeadAttention(4, 0.0, jnp.float32, 64)
    cross: Any = models.MultiHeadAttention(4, 0.0, jnp.float32, 64, cross=True)
    mask = np.ones((1, 2, 2), bool)

    @jax.jit
    def kernels():
        three = own.init(key, x, None, mask, None, 0)["params"]["query_key_value"]["kernel"]
        return three, cross.init(key, x, x, mask, None, 0)["params"]["key_value"]["kernel"]

    three, two = kernels()
    for kernel in (*np.split(three, 3, 1), *np.split(two, 2, 1)):
        bound = math.sqrt(6 / 128)
        assert kernel.shape == (64, 64)
        assert 0.98 * bound < np.abs(kernel).max() <= bound
        np.testing.assert_allclose(np.std(kernel), bound / math.sqrt(3), rtol=0.03)
    rows = packed([sentences(1)], 8)
    params = tiny(layers=0, width=64, heads=4).init(key, rows, None)["params"]
    np.testing.assert_allclose(np.std(params["embedding"]), 1 / 8, rtol=0.03)


def test_positions_are_those_of_the_formula():
    table = models.positional_encoding(300, 1024)
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table[0], np.repeat([0.0, 1.0], 512))
    for p in (1, 17, 299):
        for i in (0, 1, 255, 511):
            angle = p * 10.0 ** (-4 * i / 511)
            assert abs(table[p, i] - math.sin(angle)) < 1e-7
            assert abs(table[p, 512 + i] - math.cos(angle)) < 1e-7
    pairs = [[math.sin(1), math.sin(1e-4), math.cos(1), math.cos(1e-4)], [math.sin(1), math.cos(1)]]
    for width, row in zip((4, 2), pairs, strict=True):
        np.testing.assert_allclose(models.positional_encoding(2, width)[1], row, rtol=1e-6)


def test_attention_is_that_of_numpy():
    """Both heads of 4 columns of each part of the kernels, with and without the encoder's keys."""
    draw = np.random.default_rng(3)
    x, features = draw.normal(size=(2, 1, 3, 8)).astype(np.float32)
    mask = np.array([[[1, 0, 1], [0, 1, 1], [1, 1, 1]]], bool)
    for cross in (False, True):
        model: Any = models.MultiHeadAttention(2, 0.0, jnp.float32, 8, cross=cross)
        arguments = (x, features if cross else None, mask, None, 0)
        shapes = jax.eval_shape(lambda m=model, g=arguments: m.init(jax.random.key(0), *g))
        params = jax.tree.map(lambda p: draw.normal(size=p.shape).astype(np.float32), shapes)
        own = {name: leaf["kernel"] for name, leaf in params["params"].items()}
        joined = [own["query"], own["key_value"]] if cross else [own["query_key_value"]]
        q, k, v = np.split(np.concatenate(joined, 1), 3, 1)
        keys, actual = features if cross else x, []
        for head in (slice(0, 4), slice(4, 8)):
            weights = np.exp((x @ q)[0, :, head] @ (keys @ k)[0, :, head].T / 2) * mask[0]
            actual.append(weights / weights.sum(1, keepdims=True) @ (keys @ v)[0, :, head])
        expected = np.concatenate(actual, 1) @ own["out"]
        np.testing.assert_allclose(
            model.apply(params, *arguments)[0], expected, rtol=1e-4, atol=1e-4
        )


def test_a_sentence_sees_nothing_but_itself():
    """The gradient of one sentence's features by the embeddings of all words of the row.

    Each position has a word of its own, so that the table's gradient tells them apart.
    """
    rows, model = packed([sentences(3)], 32), tiny(vocab_size=100)
    params = weights(model)
    table = np.random.default_rng(0).normal(size=(128, WIDTH)).astype(np.float32)
    params["params"]["embedding"] = table
    used = {side: rows[f"{side}_segmentation"][0] for side in SIDES}
    rows["inputs"][0] = np.where(used["inputs"] > 0, 2 + np.arange(32), 0)
    rows["targets"][0] = np.where(used["targets"] > 0, 40 + np.arange(32), 0)

    def total(params):
        features = model.apply(params, rows, None)[0]
        return jnp.sum(features[used["targets"] == 2] ** 3)

    gradient = np.abs(jax.jit(jax.grad(total))(params)["params"]["embedding"]).max(1)
    words = set(np.flatnonzero(gradient > 1e-9))
    sources = {2 + int(i) for i in np.flatnonzero(used["inputs"] == 2)}
    # The last target is only predicted; the first one is predicted from 0, which starts a sentence.
    targets = {40 + int(i) for i in np.flatnonzero(used["targets"] == 2)[:-1]}
    assert words == {0} | sources | targets


@pytest.mark.parametrize("gap", [0, 2])
def test_a_packed_sentence_is_the_same_as_alone(gap):
    pairs, model = sentences(5), tiny()
    params = weights(model)
    together = packed([pairs[:3], pairs[3:]], 32, gap)
    alone = packed([[pair] for pair in pairs], 32)
    both = {name: np.concatenate([together[name], alone[name]]) for name in alone}
    logits, loss = map(np.asarray, scores(model, params, both))
    (logits, logits_alone), (loss, loss_alone) = (np.split(x, [2]) for x in (logits, loss))
    assert np.isfinite(logits).all()
    for number, (_, target) in enumerate(pairs):
        row, segment = (0, number + 1) if number < 3 else (1, number - 2)
        tokens = together["targets_segmentation"][row] == segment
        count = len(target)
        for mine, other in ((logits, logits_alone), (loss, loss_alone)):
            np.testing.assert_allclose(
                mine[row][tokens], other[number][:count], rtol=2e-5, atol=2e-5
            )
    sums = [
        np.sum(np.where(x["targets"] > 0, y, 0)) for x, y in ((together, loss), (alone, loss_alone))
    ]
    np.testing.assert_allclose(*sums, rtol=1e-6)


def decoded(model, params, inputs, targets):
    """Logits [b, T, V] of the step by step decoder that reads the targets."""
    run = jax.jit(lambda *x: model.apply(*x, method="step"))
    memory = jax.jit(lambda p, x: model.apply(p, x, method="encode"))(params, inputs)
    beams, steps = targets.shape[1:]
    cache = model.apply(params, memory, beams, steps, method="init_cache")
    ids, actual = np.zeros(targets.shape[:2], np.int32), []
    for position in range(steps):
        logits, cache = run(params, ids, np.int32(position), cache, memory)
        actual.append(logits)
        ids = targets[:, :, position]
    return np.stack(actual, 2)


def test_the_cached_decoder_is_the_one_that_is_taught():
    pairs, model = sentences(3, seed=4), tiny()
    params, beams, steps = weights(model), 2, 9
    inputs = packed([[pair] for pair in pairs], 10)["inputs"]
    targets = np.random.default_rng(0).integers(2, WORDS, (3, beams, steps)).astype(np.int32)
    actual = decoded(model, params, inputs, targets)
    taught = [
        [(source, text)]
        for (source, _), texts in zip(pairs, targets, strict=True)
        for text in texts
    ]
    wanted = np.asarray(scores(model, params, packed(taught, 10))[0])[:, :steps]
    np.testing.assert_allclose(actual, wanted.reshape(actual.shape), rtol=1e-4, atol=1e-5)
    assert actual.dtype == np.float32
    assert (actual[..., WORDS:] == -1e9).all()


def test_no_leaf_for_the_encoder_has_an_axis_of_beams():
    model = tiny()
    params, inputs = weights(model), packed([[p] for p in sentences(3)], 10)["inputs"]

    @jax.eval_shape
    def leaves():
        memory = model.apply(params, inputs, method="encode")
        return memory, model.apply(params, memory, 4, 6, method="init_cache")

    memory, cache = leaves
    assert {x.shape for x in jax.tree.leaves(memory)} == {(3, 10), (3, HEADS, WIDTH // HEADS, 10)}
    assert all(x.shape[:3] == (3, 4, 6) for x in jax.tree.leaves(cache))


def recorded(monkeypatch):
    """{site: (rate, shape)} of the dropouts of the models that are traced from now on."""
    sites, dropout, attend = {}, models.dropout, models.attend

    def note(site, rate, shape):
        assert sites.setdefault(site, (rate, shape)) == (rate, shape)

    def noting_dropout(x, rate, seeds, site):
        note(site, rate, x.shape)
        return dropout(x, rate, seeds, site)

    def noting_attend(query, key, value, mask, dropped, tokens_last):
        b, heads, _, length = query.shape
        note(dropped[2], dropped[0], (b, heads, length, key.shape[-1]))
        return attend(query, key, value, mask, dropped, tokens_last)

    monkeypatch.setattr(models, "dropout", noting_dropout)
    monkeypatch.setattr(models, "attend", noting_attend)
    return sites


def test_every_place_has_a_dropout_of_its_own(monkeypatch):
    sites = recorded(monkeypatch)
    model, rows = tiny(dropout=0.25), packed([sentences(2)], 20)
    jax.eval_shape(lambda: model.init(jax.random.key(0), rows, np.zeros(1, np.int32)))
    encoder = {10 * i + k for i in (1, 2) for k in (0, 1, 4, 5)}
    decoder = {1000 + 10 * i + k for i in (1, 2) for k in range(6)}
    assert set(sites) == {0, 1000} | encoder | decoder  # other numbers would be other draws
    rates, shapes = zip(*sites.values(), strict=True)
    assert set(rates) == {0.25}
    assert shapes.count((1, HEADS, 20, 20)) == 3 * LAYERS  # probabilities
    assert shapes.count((1, 20, 24)) == 2 * LAYERS  # hidden layers
    assert shapes.count((1, 20, WIDTH)) == 2 + 5 * LAYERS  # embeddings and sub-layers


def test_the_form_for_cpus_is_the_same_function(monkeypatch):
    """Of three rows, which attention cannot cut into two parts, and with dropout."""
    rows, seeds = packed([sentences(2, i) for i in range(3)], 20), np.arange(3, dtype=np.int32)
    actual = []
    with jax.enable_x64(True):
        model = tiny(dropout=0.2, layers=1, dtype=jnp.float64)
        params = weights(model, dtype=np.float64)

        def loss(params):
            return jnp.sum(jnp.sin(model.apply(params, rows, seeds)))

        for kind in ("", "cpu"):
            for module in (models, reductions):
                monkeypatch.setattr(module, "device_kind", lambda kind=kind: kind)
            actual.append(jax.jit(lambda x: jax.value_and_grad(loss)(x))(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), *actual)


@pytest.mark.long
def test_remat_changes_no_value():
    rows, seeds = packed([sentences(2), sentences(2, 1)], 20), np.array([1, 2], np.int32)
    actual = []
    for remat in (False, True):
        model = tiny(remat=remat, dropout=0.1, layers=1)
        params = weights(model)

        def loss(params, model=model):
            features = model.apply(params, rows, seeds)
            table = params["params"]["embedding"]
            return losses.smoothed_cross_entropy(features, table, rows["targets"], WORDS).sum()

        actual.append(jax.jit(jax.value_and_grad(loss))(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *actual)


# A copy in PyTorch, for machines that have it.


def torch_network(torch, params, rows, masks):
    """The logits; `masks` multiply where the model has a dropout, by the number of its site."""
    functional, head = torch.nn.functional, WIDTH // HEADS

    def drop(x, site):
        return x * masks[site] if masks else x

    def norm(x, layer):
        return functional.layer_norm(x, (WIDTH,), layer["scale"], layer["bias"], 1e-6)

    def attend(query, key, value, allowed, site):
        query, key, value = (
            x.reshape(*x.shape[:2], HEADS, head).transpose(1, 2) for x in (query, key, value)
        )
        actual = query @ key.transpose(-1, -2) / math.sqrt(head)
        actual = actual.masked_fill(~allowed[:, None], -1e9).softmax(-1)
        return (drop(actual, site) @ value).transpose(1, 2).flatten(2)

    def block(x, layer, memory, own, other, site):
        q, k, v = (
            norm(x, layer["attention_norm"]) @ layer["attention"]["query_key_value"]["kernel"]
        ).split(WIDTH, -1)
        y = attend(q, k, v, own, site) @ layer["attention"]["out"]["kernel"]
        x = x + drop(y, site + 1)
        if memory is not None:
            cross = layer["cross_attention"]
            q = norm(x, layer["cross_norm"]) @ cross["query"]["kernel"]
            k, v = (memory @ cross["key_value"]["kernel"]).split(WIDTH, -1)
            y = attend(q, k, v, other, site + 2) @ cross["out"]["kernel"]
            x = x + drop(y, site + 3)
        y = norm(x, layer["mlp_norm"]) @ layer["mlp"]["in"]["kernel"] + layer["mlp"]["in"]["bias"]
        y = drop(y.relu(), site + 4) @ layer["mlp"]["out"]["kernel"] + layer["mlp"]["out"]["bias"]
        return x + drop(y, site + 5)

    def embed(ids, position, site):
        frequency = 10000 ** (-torch.arange(WIDTH // 2).double() / (WIDTH // 2 - 1))
        angle = position[..., None] * frequency
        waves = torch.cat([angle.sin(), angle.cos()], -1).float().double()
        return drop(params["embedding"][ids] * math.sqrt(WIDTH) + waves, site)

    segments = {side: rows[f"{side}_segmentation"] for side in SIDES}
    pairs = {
        (a, b): (segments[a][:, :, None] == segments[b][:, None]) & (segments[b][:, None] > 0)
        for a in SIDES
        for b in SIDES
    }
    x = embed(rows["inputs"], rows["inputs_position"], 0)
    for i in range(LAYERS):
        x = block(x, params[f"encoder_{i}"], None, pairs["inputs", "inputs"], None, 10 * (i + 1))
    memory = norm(x, params["encoder_norm"])
    before = functional.pad(rows["targets"], (1, 0))[:, :-1]
    before = before.masked_fill(rows["targets_position"] == 0, 0)
    own = pairs["targets", "targets"].tril()
    x = embed(before, rows["targets_position"], 1000)
    for i in range(LAYERS):
        layer, other = params[f"decoder_{i}"], pairs["targets", "inputs"]
        x = block(x, layer, memory, own, other, 1000 + 10 * (i + 1))
    return norm(x, params["decoder_norm"]) @ params["embedding"][:WORDS].T


@pytest.mark.parity
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_logits_loss_and_gradients_are_those_of_pytorch(rate, monkeypatch):
    torch = pytest.importorskip("torch")
    rows = packed([sentences(3), sentences(2, 1)], 24, gap=2)
    seeds: Any = np.array([7, -2], np.int32) if rate else None
    with jax.enable_x64(True):
        model = tiny(dtype=jnp.float64, dropout=rate)
        params = weights(model, dtype=np.float64)
        sites = recorded(monkeypatch)

        def loss(params):
            features, table = model.apply(params, rows, seeds), params["params"]["embedding"]
            each = losses.smoothed_cross_entropy(features, table, rows["targets"], WORDS)
            value = jnp.sum(each * (rows["targets"] > 0)) / np.sum(rows["targets"] > 0)
            return value, losses.logits(features, table, WORDS)[..., :WORDS]

        evaluate = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, logits), gradients = evaluate(params)
    masks = {
        site: torch.tensor(np.array(keep_mask(shape, rate, jnp.asarray(seeds), site)) / (1 - rate))
        for site, (_, shape) in sites.items()
        if rate
    }
    theirs = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), params)["params"]
    tensors = {name: torch.tensor(x).long() for name, x in rows.items()}
    actual = torch_network(torch, theirs, tensors, masks)
    real = rows["targets"] > 0  # a position that sees no key gets 0 here, and a mean there
    wanted = actual.detach().numpy()[real]
    np.testing.assert_allclose(np.asarray(logits)[real], wanted, rtol=1e-10, atol=1e-10)
    soft = torch.full((*actual.shape,), 0.1 / (WORDS - 1), dtype=torch.float64)
    soft.scatter_(-1, tensors["targets"][..., None], 0.9)
    each = (soft * (soft.log() - actual.log_softmax(-1))).sum(-1)
    total = each[tensors["targets"] > 0].mean()
    np.testing.assert_allclose(value, total.item(), rtol=1e-11)
    total.backward()
    for path, mine in jax.tree_util.tree_leaves_with_path(gradients["params"]):
        other = theirs
        for part in path:
            other = other[part.key]
        scale = np.abs(mine).max()
        np.testing.assert_allclose(mine, other.grad.numpy(), rtol=1e-8, atol=1e-10 * scale + 1e-14)

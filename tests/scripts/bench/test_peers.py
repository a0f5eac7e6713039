"""scripts/bench/peers: with the same weights and data, a peer computes the same loss as ours."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.translation.transformer.losses import normalizing_constant
from common.errors import ConfigError
from common.layers import space_to_depth
from engine import sharding
from engine.plan import Programs, read_settings
from scripts.bench import peers
from scripts.bench.peers import step as steps
from tests.helpers import stable_weights, torch_trees


def programs(name: str, **changes: Any) -> Any:
    """The programs of a recipe with small sizes, in float32 and without data."""
    module, _, argument = name.partition(":")
    get_config = importlib.import_module(f"configs.{module}").get_config
    config = get_config(argument) if argument else get_config()
    config.update({"precision": "float32", "eval_batch_size": 8, "data_dir": "", **changes})
    return Programs.make(read_settings(config.lock()))


def loaded(name: str, **changes: Any) -> tuple[Any, peers.Peer]:
    """A benchmark and its peer."""
    made = programs(name, **changes)
    return made.benchmark, peers.load(made.settings.config, made.benchmark)


def initial(benchmark: Any) -> Any:
    """(params, model state) drawn by their names, so that no gamma or bias is 0."""

    def draw(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return stable_weights.weights(name, name.rpartition("/")[2], x.shape, np.prod(x.shape[:-1]))

    abstract = jax.eval_shape(benchmark.init, jax.random.key(1))
    return jax.tree_util.tree_map_with_path(draw, abstract)


def both(benchmark: Any, peer: peers.Peer, ours: Any, theirs: Any, batches: Any) -> Any:
    """((loss, model state) of ours, of the peer); `batches` are ours and the peer's."""
    key = jax.random.key(0, impl="rbg")
    terms, _, changed = jax.jit(benchmark.loss)(*ours, batches[0], key)
    loss, (_, state) = jax.jit(peer.loss)(*theirs, batches[1], key)
    total = sum(float(part / weight) for part, weight in terms.values())
    return (total, changed), (float(loss), state)


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.shape, tree)


@pytest.mark.long
@pytest.mark.parametrize("depth", [18, 50])
def test_resnet(depth):
    sizes = {"resnet_depth": depth, "num_filters": 8, "image_size": 32, "train_batch_size": 8}
    benchmark, peer = loaded("fake_imagenet", **sizes)
    params, state = initial(benchmark)
    assert shapes(params) == shapes(jax.eval_shape(peer.init, jax.random.key(0))[0])
    rng = np.random.default_rng(1)
    batch = {
        "image": rng.integers(0, 256, (8, 32, 32, 3), np.uint8),
        "label": np.arange(8, dtype=np.int32),
        **{"id": np.arange(8, dtype=np.int32), "flip": np.zeros(8, bool)},
    }
    spec = benchmark.input_spec
    pixels = (batch["image"].astype(np.float32) - spec.mean) / spec.std
    theirs = {"image": jnp.asarray(pixels, jnp.float32), "label": batch["label"]}
    (ours, changed), (loss, stats) = both(
        *(benchmark, peer, (params, state), (params, state["batch_stats"])), (batch, theirs)
    )
    penalty = 0.5e-4 * sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(params) if x.ndim > 1)
    assert loss == pytest.approx(ours + penalty, rel=1e-5)
    for mine, other in zip(jax.tree.leaves(changed), jax.tree.leaves(stats), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-4, atol=2e-5)


@pytest.mark.long
def test_ssd():
    sizes = {"num_classes": 10, "num_train_images": 64, "num_eval_images": 8}
    benchmark, peer = loaded("ssd_digits", **sizes, train_batch_size=8)
    (params, state), mapped = initial(benchmark), {}
    counts = benchmark.settings.maps.default_boxes.boxes_per_cell
    for name, arrays in params.items():
        if not name.startswith("head"):
            mapped[name] = arrays
            continue
        number = int(name.removeprefix("head"))
        for kind, part in (("box", slice(0, 4)), ("class", slice(4, None))):
            mapped[f"{kind}{number}"] = {
                key: (x := value.reshape(*value.shape[:-1], counts[number - 1], -1)[..., part])
                .reshape(*x.shape[:-2], -1)
                for key, value in arrays.items()
            }  # fmt: skip
    assert shapes(mapped) == shapes(jax.eval_shape(peer.init, jax.random.key(0))[0])
    (spec,) = peer.specs(4)
    rng, most = np.random.default_rng(2), spec["boxes"].shape[1]
    boxes = np.sort(rng.uniform(0, 1, (4, most, 2, 2)), axis=2).reshape(4, most, 4)
    classes = rng.integers(0, 11, (4, most))
    classes[:, 5:] = 0
    batch = {
        "image": rng.integers(0, 256, spec["image"].shape, np.uint8),
        **{"boxes": boxes.astype(np.float32), "classes": classes.astype(np.int32)},
        "augment": np.arange(4, dtype=np.int32),
    }
    (ours, changed), (loss, stats) = both(
        *(benchmark, peer, (params, state), (mapped, state["batch_stats"])), (batch, batch)
    )
    assert loss == pytest.approx(ours, rel=1e-5)
    for mine, other in zip(jax.tree.leaves(changed), jax.tree.leaves(stats), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_mask_rcnn():
    sizes = {"num_train_images": 64, "num_eval_images": 8, "image_shape": (128, 128)}
    sizes |= {"proposals_before_nms": 50, "proposals_after_nms": 40, "region_samples": 24}
    sizes |= {"image_long": 128, "bn_statistics": "frozen", "mask_features": (16,)}
    # Whole numbers as coordinates: of the anchors that fit a box equally well, both take the first.
    sizes |= {"anchor_ratios": (1.0,)}
    benchmark, peer = loaded("mask_rcnn_digits", **sizes, train_batch_size=8)
    params, state = initial(benchmark)
    assert shapes(params) == shapes(jax.eval_shape(peer.init, jax.random.key(0))[0])
    (spec,) = peer.specs(2)
    rng, most = np.random.default_rng(5), spec["boxes"].shape[1]
    corners = rng.integers(0, 80, (2, most, 2))
    classes = rng.integers(1, 11, (2, most))
    classes[:, 6:] = 0
    batch = {
        "image": rng.integers(0, 256, spec["image"].shape, np.uint8),
        "boxes": np.concatenate([corners, corners + rng.integers(10, 40, (2, most, 2))], -1),
        **{"classes": classes.astype(np.int32), "draw": np.array([3, 4], np.int32)},
        # In padding all logits are equal but for rounding, which would choose the proposals.
        "size": np.full((2, 2), 128, np.float32),
        # Full or empty: where a mask ends, its interpolation is exactly 0.5, but for rounding.
        "masks": np.repeat(255 * rng.integers(0, 2, (2, most, 1), np.uint8), 28 * 28 // 8, 2),
    }
    batch["boxes"] = batch["boxes"].astype(np.float32)
    blocks = {**batch, "image": space_to_depth.rearrange(jnp.asarray(batch["image"]))}
    (ours, _), (loss, _) = both(
        *(benchmark, peer, (params, state), (params, state["batch_stats"])), (blocks, batch)
    )
    assert loss == pytest.approx(ours, rel=1e-5)


def rows(length: int, words: int, **leaves: Any) -> Any:
    """Four rows of one sentence each, of different lengths, as both translators take them."""
    rng = np.random.default_rng(3)
    batch = {"dropout": np.arange(4, dtype=np.int32), **leaves}
    for side, sizes in (("inputs", (length, 5, 3, 7)), ("targets", (4, length, 6, 2))):
        place = np.arange(length)
        real = (place < np.array(sizes)[:, None]).astype(np.int32)
        batch[side] = rng.integers(2, words, (4, length)).astype(np.int32) * real
        batch[side][np.arange(4), np.array(sizes) - 1] = 1  # the end of the sentence
        batch[f"{side}_segmentation"] = real
        batch[f"{side}_position"] = place.astype(np.int32) * real
    return batch


def attended(ours: Any, heads: int) -> Any:
    """Our kernels [width, n * width] as those of flax's attention."""
    width = len(ours["out"]["kernel"])
    if "query_key_value" in ours:
        kernels = np.split(np.asarray(ours["query_key_value"]["kernel"]), 3, 1)
    else:
        joined = np.split(np.asarray(ours["key_value"]["kernel"]), 2, 1)
        kernels = [ours["query"]["kernel"], *joined]
    names = ("query", "key", "value")
    cut = {n: {"kernel": x.reshape(width, heads, -1)} for n, x in zip(names, kernels, strict=True)}
    return cut | {"out": {"kernel": ours["out"]["kernel"].reshape(heads, -1, width)}}


TRANSFORMER: dict[str, Any] = {
    "num_layers": 2,
    "width": 16,
    "mlp_width": 32,
    "num_heads": 2,
    "dropout": 0.0,
    "vocabulary_size": 50,
    "num_train_rows": 64,
    "num_eval_sentences": 8,
    "row_length": 8,
    "train_batch_size": 8,
}
GNMT: dict[str, Any] = {
    "num_encoder_layers": 3,
    "num_decoder_layers": 3,
    "width": 16,
    "dropout": 0.0,
    "vocabulary_size": 50,
    "num_train_pairs": 64,
    "num_eval_sentences": 8,
    "bucket_lengths": (8,),
    "train_batch_size": 8,
}


@pytest.mark.long
def test_transformer():
    benchmark, peer = loaded("transformer", **TRANSFORMER)
    params, _ = initial(benchmark)
    mapped = {"embedding": {"embedding": params["embedding"][:50] * 4}}  # ours times sqrt(width)
    for name, arrays in params.items():
        if name.endswith("_norm"):
            mapped[name] = arrays
        elif name != "embedding":
            layer = {k: v for k, v in arrays.items() if k.endswith("_norm")} | arrays["mlp"]
            kinds = [k for k in arrays if k.endswith("attention")]
            mapped[name] = layer | {kind: attended(arrays[kind], 2) for kind in kinds}
    assert shapes(mapped) == shapes(jax.eval_shape(peer.init, jax.random.key(0))[0])
    batch = rows(8, 50)
    (ours, _), (loss, _) = both(benchmark, peer, (params, {}), (mapped, {}), (batch, batch))
    assert loss == pytest.approx(ours, rel=1e-5)


@pytest.mark.long
def test_gnmt():
    benchmark, peer = loaded("gnmt", **GNMT)
    params, _ = initial(benchmark)
    asked = {k: params["attention"][k] for k in ("query", "key", "direction", "gain", "bias")}
    mapped = {
        "embedding": {"embedding": params["embedding"][:50]},
        "classifier": {k: x[..., :50] for k, x in params["classifier"].items()},
        "attention": asked,
    }
    for name, arrays in params.items():
        if name.startswith(("encoder", "decoder")):
            directions = len(arrays["kernel"])
            for i in range(directions):
                layer = {
                    "Dense_0": {"kernel": arrays["kernel"][i], "bias": arrays["bias"][i]},
                    "recurrent": arrays["recurrent_kernel"][i],
                }
                mapped[name if directions == 1 else f"{name}_{i}"] = layer
    assert shapes(mapped) == shapes(jax.eval_shape(peer.init, jax.random.key(0))[0])
    batch = rows(8, 50)
    (ours, _), (loss, _) = both(benchmark, peer, (params, {}), (mapped, {}), (batch, batch))
    assert loss == pytest.approx(ours, rel=1e-5)


def torch_loss(name, made, batch):
    """The loss of a network in PyTorch on a batch, and ours with its weights."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    networks = importlib.import_module("scripts.bench.peers.torch_networks")
    network = networks.NETWORKS[name](made.benchmark)
    for key, x in network.module.named_parameters():
        # Our attention has no biases.
        biases = key.endswith(("in_proj_bias", "out_proj.bias"))
        torch.nn.init.normal_(x, std=0.0 if biases else 0.3)
    tree = getattr(torch_trees, name)(torch, network.module)
    params = jax.tree.map(lambda x: x.detach().numpy(), tree)
    assert shapes(params) == shapes(jax.eval_shape(made.benchmark.init, jax.random.key(0))[0])
    ((ours, weight),) = made.benchmark.loss(params, {}, batch, None)[0].values()
    with torch.no_grad():
        return float(network.loss(*network.inputs(batch))), float(ours / weight)


@pytest.mark.parity
def test_the_transformer_in_pytorch():
    """Also in rows of two sentences and with padding."""
    batch = rows(8, 50)
    for side in ("inputs", "targets"):
        batch[f"{side}_segmentation"][:, 3:] *= 2
        batch[f"{side}_position"][:, 3:] -= 3
    made = programs("transformer", **TRANSFORMER)
    loss, ours = torch_loss("transformer", made, batch)
    assert loss == pytest.approx(ours + normalizing_constant(50, 0.1), rel=1e-5)


@pytest.mark.parity
def test_gnmt_in_pytorch():
    """Also in rows of different lengths."""
    loss, ours = torch_loss("gnmt", programs("gnmt", **GNMT), rows(8, 50))
    assert loss == pytest.approx(ours, rel=1e-5)


@pytest.mark.long
def test_a_step_learns_on_several_devices():
    """The state of a step is the next one's, and its parameters change."""
    sizes = {"resnet_depth": 18, "num_filters": 4, "image_size": 16, "num_label_classes": 4}
    made = programs("fake_imagenet", **sizes, train_batch_size=16)
    peer = peers.load(made.settings.config, made.benchmark)
    (lowered,) = steps.lower(made)
    step, state = (
        lowered[1].compile(),
        jax.jit(lambda key: steps.first(peer, key))(jax.random.key(0)),
    )
    state = jax.device_put(state, sharding.replicated(made.mesh))
    rng = np.random.default_rng(4)
    batch = {
        "image": rng.normal(size=(16, 16, 16, 3)).astype(np.float32),
        "label": np.arange(16, dtype=np.int32) % 4,
    }
    batch = jax.device_put(batch, sharding.batch_sharding(made.mesh))
    before, head = state.step, np.asarray(state.params["head"]["kernel"])
    for _ in range(3):  # the first step of the warm-up has a rate of 0
        state, metrics = step(state, batch)
        assert np.isfinite(metrics["loss"])
    assert int(state.step) == 3 and before.is_deleted()
    assert np.any(np.asarray(state.params["head"]["kernel"]) != head)


def test_a_benchmark_without_a_peer():
    with pytest.raises(ConfigError, match="ncf has none; these have: resnet, transformer"):
        peers.check({"benchmark": "ncf"})

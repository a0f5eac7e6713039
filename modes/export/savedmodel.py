"""Writes a network as TensorFlow's SavedModel, of TensorFlow's own operations.

Programs that jax2tf writes need the TensorFlow of its time; plain operations run in any.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ops.images import input_spec
from ops.images.input_spec import InputSpec
from ops.network import INPUT, Network, Step, same_padding
from ops.shards import tensorflow

_NEVER_LARGEST = np.finfo(np.float32).min  # -inf would spoil the scales of quantised models


def write(network: Network, spec: InputSpec, class_names: Sequence[str], folder: str) -> None:
    """Writes a model with the signatures of TensorFlow Serving's clients.

    Args:
      network: the steps from pixels to logits.
      spec: how an encoded image becomes pixels.
      class_names: of the logits; () are numbers instead.
      folder: the new folder, such as NAME/1.

    The signatures are:
      serving_default: `image_bytes` string[b], encoded images, -> `classes` int64[b],
        `probabilities` float32[b, K], `top5_names` string[b, 5], `top5_scores` float32[b, 5].
      images: `images` uint8[b, s, s, 3], RGB -> `logits` float32[b, K].
    """
    tf = tensorflow()
    compute = Compute(network)
    size, count = network.size, len(network.steps[-1].arrays["bias"])
    names = tf.constant(list(class_names) or [str(i) for i in range(count)])

    encoded = tf.TensorSpec([None], tf.string, "image_bytes")

    @tf.function(input_signature=[encoded], autograph=False)
    def classify(image_bytes: Any) -> Any:
        prepared = tf.map_fn(
            lambda image: input_spec.evaluated(image, spec, is_portable=True),
            image_bytes,
            fn_output_signature=tf.TensorSpec([size, size, 3], tf.uint8),
        )
        probabilities = tf.nn.softmax(compute(prepared))
        scores, indices = tf.math.top_k(probabilities, min(5, count))
        return {
            "classes": tf.argmax(probabilities, axis=-1),
            "probabilities": probabilities,
            "top5_names": tf.gather(names, indices),
            "top5_scores": scores,
        }

    pixels = tf.TensorSpec([None, size, size, 3], tf.uint8, INPUT)

    @tf.function(input_signature=[pixels], autograph=False)
    def logits(images: Any) -> Any:
        return {"logits": compute(images)}

    tf.saved_model.save(
        compute.module, folder, signatures={"serving_default": classify, "images": logits}
    )
    with contextlib.suppress(FileNotFoundError):  # a random number that no reader needs
        os.remove(f"{folder}/fingerprint.pb")


def runner(folder: str) -> Callable[[np.ndarray], np.ndarray]:
    """The function uint8[b, s, s, 3] -> logits of a SavedModel."""
    model = tensorflow().saved_model.load(folder)
    return lambda images: model.signatures["images"](images=images)["logits"].numpy()


def classifier(folder: str) -> Callable[[Sequence[bytes]], dict[str, np.ndarray]]:
    """The function of encoded images that a SavedModel serves, see `write`."""
    tf = tensorflow()
    model = tf.saved_model.load(folder)

    def classify(encoded: Sequence[bytes]) -> dict[str, np.ndarray]:
        results = model.signatures["serving_default"](image_bytes=tf.constant(list(encoded)))
        return {name: value.numpy() for name, value in results.items()}

    return classify


class Compute:
    """The network as a function of TensorFlow; `module` holds its constants.

    They are variables, because both signatures would otherwise have a copy.
    """

    def __init__(self, network: Network):
        self._network, self.module = network, tensorflow().Module()
        self.module.constants = {
            step.name: {k: self._variable(step.name, k, v) for k, v in step.arrays.items()}
            for step in network.steps
        }

    def __call__(self, images: Any) -> Any:
        """Logits float32[b, K] of images uint8[b, s, s, 3]."""
        results = {INPUT: tensorflow().cast(images, "float32")}
        for step in self._network.steps:
            inputs = [results[name] for name in step.inputs]
            results[step.name] = _apply(step, inputs, self.module.constants[step.name])
        return results[self._network.output]

    def _variable(self, step: str, key: str, value: np.ndarray) -> Any:
        return tensorflow().Variable(value, trainable=False, name=f"{step}/{key}")


def _apply(step: Step, inputs: Sequence[Any], constants: Mapping[str, Any]) -> Any:
    """The result of one step."""
    tf, x = tensorflow(), inputs[0]
    places = [[0, 0], *map(list, step.padding), [0, 0]]
    if step.kind == "depthwise":
        kernel, strides = constants["kernel"][..., tf.newaxis], [1, step.stride, step.stride, 1]
        return tf.nn.depthwise_conv2d(x, kernel, strides, places)
    if step.kind == "conv":
        return tf.nn.conv2d(x, constants["kernel"], step.stride, places) + constants["bias"]
    if step.kind == "affine":
        return x * constants["scale"] + constants["bias"]
    if step.kind == "group_norm":
        return _group_norm(step, x) * constants["scale"] + constants["bias"]
    if step.kind == "dense":
        return tf.linalg.matmul(x, constants["kernel"]) + constants["bias"]
    if step.kind in ("max_pool", "mean_pool"):
        return _pool(step, x)
    if step.kind == "global_mean":
        return tf.reduce_mean(x, axis=[1, 2])
    if step.kind == "gate":
        return x * inputs[1][:, tf.newaxis, tf.newaxis]
    return {"relu": tf.nn.relu, "sigmoid": tf.sigmoid, "add": tf.add}[step.kind](*inputs)


def _group_norm(step: Step, x: Any) -> Any:
    tf, (height, width, channels) = tensorflow(), x.shape[1:]
    groups = tf.reshape(x, [-1, height * width, step.groups, channels // step.groups])
    mean, variance = tf.nn.moments(groups, [1, 3], keepdims=True)
    return tf.reshape((groups - mean) * tf.math.rsqrt(variance + step.epsilon), tf.shape(x))


def _pool(step: Step, x: Any) -> Any:
    tf, padding = tensorflow(), "SAME"
    if step.padding != same_padding(x.shape[1], step.window, step.stride):
        assert step.kind == "max_pool"  # `mean_pool` has this padding alone
        places = [[0, 0], *map(list, step.padding), [0, 0]]
        x, padding = tf.pad(x, places, constant_values=_NEVER_LARGEST), "VALID"
    pool = tf.nn.max_pool2d if step.kind == "max_pool" else tf.nn.avg_pool2d
    return pool(x, step.window, step.stride, padding)

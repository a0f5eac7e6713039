"""Uses a ResNet: classifies, shows mistakes, exports, and reads other libraries' weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.resnet import architecture, records
from benchmarks.resnet.settings import Architecture
from benchmarks.resnet.use import exhibits, heat, weights
from benchmarks.resnet.use.export import Classifier
from benchmarks.uses import Classes, Exhibit, Imported
from common.errors import ConfigError
from common.exportable import ExportableClassifier
from common.foreign import files
from common.foreign.files import Foreign
from common.images.input_spec import InputSpec, prepare_image

if TYPE_CHECKING:
    from benchmarks.resnet import ImageClassifier


def foreign_settings(file: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The config's keys that another library's weights determine, with notes."""
    return weights.read_settings(files.peek(file))


def foreign_weights(source: Foreign, space_to_depth: bool) -> Imported:
    """The weights in a file as the ResNet that the file describes, with such a stem."""
    values, _ = weights.read_settings(source)
    keys = {"precision": "float32", "batch_norm": "plain", "bn_span": 1, "bn_momentum": 0.9}
    fields = {field.name for field in dataclasses.fields(Architecture)}
    keys |= {key: value for key, value in values.items() if key in fields}
    keys["space_to_depth"] = values.get("space_to_depth", space_to_depth)
    model = architecture.network(Architecture(**keys), values.get("num_label_classes", 1))
    init = functools.partial(model.init, train=False)
    shapes: Any = jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)))
    state = {name: tree for name, tree in shapes.items() if name != "params"}
    arrays = weights.translate(source, shapes["params"], state)
    return Imported(source.path, *arrays, *weights.describe(source, values))


class ClassifierUses(Classes):
    """The uses of a classifier."""

    commands = {
        "classify pictures": "python predict.py photo.jpg folder/ --workdir={workdir}",
        "give it away": "python main.py --mode=export --workdir={workdir}",
        "adapt it to other pictures": "python main.py --config=configs/finetune.py "
        "--config.init_from={workdir} --config.data_dir=DIR --workdir=NEW",
    }

    def __init__(self, benchmark: ImageClassifier, weights: tuple[Any, Any] | None = None):
        """`weights` are params and model_state, for the heat maps of the exhibits."""
        self._benchmark, self._weights = benchmark, weights

    def with_weights(self, params: Any, model_state: Any) -> ClassifierUses:
        return ClassifierUses(self._benchmark, (params, model_state))

    @property
    def num_classes(self) -> int:
        return self._benchmark.classes

    @property
    def several(self) -> bool:
        return self._benchmark.labels.name == "several"

    @property
    def input_spec(self) -> InputSpec:
        return self._benchmark.input_spec

    def data_meaning(self) -> Mapping[str, Any]:
        keys = self._benchmark.keys
        if (content := records.load_data_manifest(keys)) is None:
            return {}
        names, count = [*content.class_names], keys.num_label_classes
        offset = count == 1001 != len(names)  # the first class is TensorFlow's background
        names = [*[""] * offset, *names, *[""] * (count - offset - len(names))]
        return {"class_names": names, "labels": content.labels}

    def classify(self, params: Any, model_state: Any, images: jax.Array) -> dict[str, jax.Array]:
        return self._benchmark.classify(params, model_state, images)

    def heat_maps(
        self, params: Any, model_state: Any, images: jax.Array, classes: jax.Array
    ) -> jax.Array:
        """Grad-CAM; with `eval_flip` the mirror image's evidence is turned back and added."""
        inputs = self._benchmark.eval_inputs(images)
        variables = {"params": params, **model_state}
        times = len(inputs) // len(images)
        found = heat.evidence(self._benchmark.model, variables, inputs, jnp.tile(classes, times))
        if times == 2:
            found = found[: len(images)] + found[len(images) :, :, ::-1]
        return heat.shares(found, images.shape[1])

    def _heat(self, encoded: Sequence[bytes], classes: np.ndarray) -> np.ndarray:
        """The heat maps f32[n, size, size] of encoded images, some at once."""
        images = np.stack([prepare_image(data, self.input_spec) for data in encoded])
        parts = []
        for x in (images, classes):
            filled = np.resize(x, (-(-len(x) // self.at_once) * self.at_once, *x.shape[1:]))
            parts.append(filled.reshape(-1, self.at_once, *x.shape[1:]))

        @jax.jit
        def maps(weights: Any, parts: Any) -> jax.Array:
            return jax.lax.map(lambda part: self.heat_maps(*weights, *part), parts)

        found = np.asarray(maps(self._weights, parts))
        return found.reshape(-1, *found.shape[2:])[: len(images)]

    def exhibits(self, rows: Iterator[dict[str, np.ndarray]]) -> list[Exhibit]:
        heat = self._heat if self._weights else None
        photos = exhibits.Photos(self._benchmark.source("eval"), self.input_spec, heat)
        return self._benchmark.labels.exhibits(rows, photos)

    def portable(self, params: Any, model_state: Any) -> ExportableClassifier:
        """The forms of `Classifier`; its logits are computed in float32, without `eval_flip`."""
        trained = self._benchmark
        model = dataclasses.replace(trained.settings.model, precision="float32")
        objective = dataclasses.replace(trained.settings.objective, eval_flip=False)
        plain = dataclasses.replace(trained.settings, model=model, objective=objective)
        precise = type(trained)(plain, trained.cache_dir)
        variables = {"params": params, **model_state}
        classifier = Classifier(model, variables, trained.input_spec, self.several)
        return classifier.portable(
            jax.jit(lambda images: precise.classify(params, model_state, images)["logits"])
        )

    def read_foreign(self, file: str) -> Imported:
        """Reads weights of torchvision, timm, Hugging Face and TensorFlow."""
        benchmark, source = self._benchmark, files.read(file)
        values, notes = weights.read_settings(source)
        if (version := benchmark.settings.model.resnet_version) == "1":
            # The arrays of "1" and "1.5" are the same; a checkpoint of TensorFlow is silent.
            values |= {key: version for _, key in notes if key == "resnet_version"}
        for key in weights.ARCHITECTURE:
            if values[key] != (own := getattr(benchmark.settings.model, key, values[key])):
                raise ConfigError(f"config.{key}={own!r}, but {file} has {values[key]!r}")
        params, model_state = jax.eval_shape(benchmark.init, jax.random.key(0))
        arrays = weights.translate(source, params, model_state)
        return Imported(file, *arrays, *weights.describe(source, values))

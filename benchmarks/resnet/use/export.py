"""A trained ResNet in the forms that other programs read: an ONNX graph, and PyTorch's names."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import models
from benchmarks.resnet import variants
from benchmarks.resnet.architecture import MAX_POOLS
from benchmarks.resnet.settings import Architecture
from common.errors import ConfigError
from common.exportable import ExportableClassifier, TorchForm
from common.foreign import resnets
from common.images.input_spec import InputSpec
from common.onnx_graph import INPUT, PIXELS, Ends, Graph, Resnet
from common.trees import by_name

# The depths for which timm has an architecture: plain, D, SE, SE and D, and v2.
_TIMM = {
    (False, False): ("resnet{}", (18, 34, 50, 101, 152, 200)),
    (True, False): ("resnet{}d", (18, 34, 50, 101, 152, 200)),
    (False, True): ("seresnet{}", (18, 34, 50, 101, 152)),
    (True, True): ("seresnet{}d", (152, 200)),
}
_TIMM_V2 = ("resnetv2_{}", (18, 34, 50, 101, 152))
_TIMM_RS = ("resnetrs{}", (50, 101, 152, 200))  # SE and D, and no max-pool
_SAME = "the model pads its max-pool as TensorFlow does (config.max_pool='same'), PyTorch pads 1, 1"
_BACKGROUND = "the model has 1001 classes: the first is TensorFlow's background"


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A ResNet with its arrays."""

    keys: Architecture
    variables: Mapping[str, Any]  # `params` and `batch_stats`, NumPy arrays
    spec: InputSpec  # the pixels that the model takes
    several: bool = False  # whether a picture has any of the classes

    def portable(self, logits: Callable[[Any], Any]) -> ExportableClassifier:
        """The model's forms; `logits` computes its program."""
        spec = dataclasses.replace(self.spec, channels="RGB")  # the first layer is turned round
        several = self.several
        return ExportableClassifier(spec, self.classes, logits, self.draw, self._torch, several)

    @property
    def classes(self) -> int:
        return len(self.variables["params"]["head"]["bias"])

    def draw(self, graph: Graph) -> tuple[Ends, Ends]:
        """Adds the network to a graph of ONNX; returns its inputs and outputs."""
        graph.node("Cast", f"{INPUT}/float", [INPUT], to=graph.types.FLOAT)
        graph.node("Transpose", PIXELS, [f"{INPUT}/float"], perm=[0, 3, 1, 2])
        keys, spec = self.keys, self.spec
        layers = Resnet(
            graph,
            spec.size,
            by_name(self.variables["params"]),
            by_name(self.variables["batch_stats"]),
            models.EPSILON,
            is_version_1=keys.resnet_version == "1",
            is_bgr=spec.channels == "BGR",
            blur=(variants.BLUR_KERNEL, variants.MIN_BLUR_CHANNELS) if keys.blur_pool else None,
        )
        is_strided = re.compile(r"stage(?!1_)\d+_block1").fullmatch
        x = layers.backbone((spec.mean, spec.std), MAX_POOLS[keys.max_pool], is_strided)
        layers.dense(layers.global_mean("features", x), "head", "logits")
        pixels = {INPUT: (np.uint8, ["batch", spec.size, spec.size, 3])}
        outputs = {"logits": (np.float32, ["batch", self.classes])}
        if self.several:
            graph.node("Sigmoid", "probabilities", ["logits"])
            outputs["probabilities"] = outputs["logits"]
        return pixels, outputs

    @property
    def _is_bottleneck(self) -> bool:
        return models.DEPTHS[self.keys.resnet_depth][1] is models.BottleneckBlock

    @property
    def _projects_first(self) -> bool:
        return self.keys.stage1_projection and not self._is_bottleneck

    def _torch(self, class_names: tuple[str, ...]) -> TorchForm:
        """PyTorch's form: timm's where timm has the model, else transformers'."""
        params, state = self.variables["params"], {**self.variables}
        del state["params"]
        differences = [_SAME] if self.keys.max_pool == "same" else []
        differences += [_BACKGROUND] if self.classes == 1001 else []
        if name := self._timm_name():
            arrays, library = resnets.names(params, state), "timm"
            files = {"config.json": self._timm_config(name, class_names)}
        else:
            self._check_transformers()
            name, library = "ResNetForImageClassification", "transformers"
            arrays = resnets.names(params, state, resnets.HUGGING_FACE)
            files = {
                "config.json": self._transformers_config(class_names),
                "preprocessor_config.json": self._transformers_pixels(),
            }
        if self.spec.channels == "BGR":  # the stem is to take RGB
            stem = next(k for k, x in arrays.items() if x.ndim == 4 and x.shape[1] == 3)
            arrays[stem] = arrays[stem][:, ::-1]
        arrays = {k: np.ascontiguousarray(v, np.float32) for k, v in arrays.items()}
        # The batches that PyTorch's BatchNorm counts; transformers reports their absence.
        norms = [k.removesuffix("running_mean") for k in arrays if k.endswith("running_mean")]
        arrays |= {f"{norm}num_batches_tracked": np.zeros((), np.int64) for norm in norms}
        ways = [] if self.spec.antialias else ["without antialiasing"]
        ways += [] if self.spec.resize else ["after the crop instead of before it"]
        pixels = ""
        if ways:
            pixels = f"{library} resizes photos otherwise: the model has learnt from photos "
            pixels += f"resized {' and '.join(ways)}"
        return TorchForm(arrays, files, library, name, "; ".join(differences), pixels)

    def _timm_name(self) -> str:
        """The name of timm's architecture; "" where it has none."""
        keys, depth, params = self.keys, self.keys.resnet_depth, self.variables["params"]
        if keys.blur_pool or self._projects_first or keys.num_filters != 64:
            return ""
        if keys.resnet_version == "1" and self._is_bottleneck:
            return ""
        (form, depths), share = _TIMM[keys.deep_stem, bool(keys.squeeze_excite)], 1 / 16
        if keys.resnet_version == "2":
            form, depths = _TIMM_V2
        elif keys.max_pool == "conv":
            if not (keys.deep_stem and keys.squeeze_excite):
                return ""
            (form, depths), share = _TIMM_RS, 1 / 4
        blocks = [block for name, block in params.items() if name.startswith("stage")]
        fits = depth in depths and all(_is_squeezed(block, share) for block in blocks)
        return form.format(depth) if fits else ""

    def _check_transformers(self) -> None:
        """Raises ConfigError if transformers' ResNet does not have this architecture."""
        keys, names = self.keys, ["resnet_version", "deep_stem", "squeeze_excite", "num_filters"]
        rare = ["blur_pool"] if keys.blur_pool else []
        rare += ["stage1_projection"] if self._projects_first else []
        rare += ["max_pool"] if keys.max_pool == "conv" else []
        if keys.resnet_version == "2" or keys.deep_stem or keys.squeeze_excite or rare:
            parts = {name: getattr(keys, name) for name in (*names, *rare)}
            shown = ", ".join(f"{key}={value!r}" for key, value in parts.items())
            raise ConfigError(
                "--format=hf: neither timm nor transformers has a ResNet of depth "
                f"{keys.resnet_depth} with {shown}; use onnx, savedmodel or stablehlo"
            )

    def _timm_config(self, architecture: str, class_names: Sequence[str]) -> dict[str, Any]:
        spec, version_2 = self.spec, self.keys.resnet_version == "2"
        features = len(self.variables["params"]["head"]["kernel"])
        stem = "conv1.0" if self.keys.deep_stem else "conv1"
        return {
            "architecture": architecture,
            "num_classes": self.classes,
            "num_features": features,
            **self._problem_type,
            **({"label_names": list(class_names)} if class_names else {}),
            "pretrained_cfg": {
                "input_size": [3, spec.size, spec.size],
                "interpolation": spec.kernel,
                "crop_pct": _crop_share(spec),
                "crop_mode": "center",
                "mean": _shares(spec.mean),
                "std": _shares(spec.std),
                "num_classes": self.classes,
                "pool_size": [-(-spec.size // 32)] * 2,
                "first_conv": "stem.conv" if version_2 else stem,
                "classifier": "head.fc" if version_2 else "fc",
                "custom_load": False,
            },
        }

    @property
    def _problem_type(self) -> dict[str, str]:
        """The key of transformers' configs; without it, softmax is meant."""
        return {"problem_type": "multi_label_classification"} if self.several else {}

    def _transformers_config(self, class_names: Sequence[str]) -> dict[str, Any]:
        width, last = self.keys.num_filters, 4 if self._is_bottleneck else 1
        labels = class_names or [str(i) for i in range(self.classes)]
        return {
            "architectures": ["ResNetForImageClassification"],
            "model_type": "resnet",
            "num_channels": 3,
            "embedding_size": width,
            "hidden_sizes": [width * last * 2**i for i in range(4)],
            "depths": list(models.DEPTHS[self.keys.resnet_depth][0]),
            "layer_type": "bottleneck" if self._is_bottleneck else "basic",
            "hidden_act": "relu",
            **self._problem_type,
            "downsample_in_first_stage": False,
            "downsample_in_bottleneck": self.keys.resnet_version == "1",
            "id2label": {str(i): name for i, name in enumerate(labels)},
            "label2id": {name: i for i, name in enumerate(labels)},
        }

    def _transformers_pixels(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "image_processor_type": "BitImageProcessor",
            "do_resize": True,
            "size": {"shortest_edge": _shorter_side(spec)},
            "resample": 3 if spec.kernel == "bicubic" else 2,  # Pillow's numbers
            "do_center_crop": True,
            "crop_size": {"height": spec.size, "width": spec.size},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": _shares(spec.mean),
            "image_std": _shares(spec.std),
            "do_convert_rgb": True,
        }


def _is_squeezed(block: Mapping[str, Any], share: float) -> bool:
    """Whether squeeze and excitation has the width of this share of the channels, or is absent."""
    if "se_reduce" not in block:
        return True
    channels = len(block["se_expand"]["bias"])
    return len(block["se_reduce"]["bias"]) == variants.squeezed_units(channels, share)


def _shares(levels: Sequence[float]) -> list[float]:
    """Levels of 0..255 divided by 255, without the last digits, which are rounding noise."""
    return [round(level / 255, 12) for level in levels]


def _shorter_side(spec: InputSpec) -> int:
    """The shorter side before the crop; of a spec that crops first, about the same pixels."""
    return spec.resize or round(spec.size / 0.875)


def _crop_share(spec: InputSpec) -> float:
    """timm's crop_pct: timm resizes the shorter side to floor(size / crop_pct)."""
    side = _shorter_side(spec)
    share = spec.size / side
    return share if math.floor(spec.size / share) == side else spec.size / (side + 0.5)

"""From a photo to logits, as torchvision, timm and transformers compute them from the same file."""

import csv
import io
import json

import numpy as np
import pytest
from PIL import Image

import predict

CLASSES = 7
SHAPES = {"wide": (375, 500), "tall": (500, 333), "small": (97, 131), "large": (900, 1200)}


def photo(shape, mode="RGB"):
    """A smooth picture with some noise: a photo's file is about as large."""
    draw = np.random.default_rng(sum(shape))
    coarse = Image.fromarray(draw.integers(0, 256, (9, 12, 3), np.uint8))
    smooth = np.asarray(coarse.resize(shape[::-1], Image.Resampling.BICUBIC), np.float32)
    pixels = smooth + draw.normal(0, 8, smooth.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


@pytest.fixture
def files(tmp_path):
    """Photos of several shapes, one grey and one with all of its colour."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, shape in SHAPES.items():
        photo(shape).save(folder / f"{name}.jpg", quality=90)
    photo(SHAPES["wide"], "L").save(folder / "grey.jpg", quality=90)
    photo(SHAPES["tall"]).save(folder / "full.jpg", quality=95, subsampling=0)
    return sorted(folder.iterdir())


def drawn(torch, network):
    """The network with noise on all parameters, so that its logits differ."""
    generator = torch.Generator().manual_seed(0)
    for values in network.parameters():
        scale = values.std() if values.ndim > 1 else 0.2
        values.data += scale * torch.randn(values.shape, generator=generator)
    return network.eval()


def of_torchvision(torch, folder):
    torchvision = pytest.importorskip("torchvision")
    network = drawn(torch, torchvision.models.resnet18(num_classes=CLASSES))
    torch.save(network.state_dict(), folder / "model.pth")
    transform = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    return folder / "model.pth", lambda image: network(transform(image)[None])


def of_timm(torch, folder):
    timm = pytest.importorskip("timm")
    network = timm.create_model("resnet18.a1_in1k", pretrained=False, num_classes=CLASSES)
    network = drawn(torch, network)
    timm.models.save_for_hf(network, folder / "timm", safe_serialization=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))
    return folder / "timm", lambda image: network(transform(image)[None])


def of_transformers(torch, folder):
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic"
    )
    config.num_labels = CLASSES
    network = drawn(torch, transformers.ResNetForImageClassification(config))
    network.save_pretrained(folder / "hf")
    processor = transformers.ConvNextImageProcessor(
        size={"shortest_edge": 224}, crop_pct=0.875, resample=3
    )
    processor.save_pretrained(folder / "hf")
    return folder / "hf", lambda image: network(**processor(image, return_tensors="pt")).logits


@pytest.mark.parity
@pytest.mark.parametrize(
    ("library", "limit"),
    # transformers resizes with torch, whose pixels differ from Pillow's by a level here and there
    [(of_torchvision, 1e-5), (of_timm, 1e-5), (of_transformers, 3e-4)],
)
def test_logits_of_a_file_are_those_of_the_library(library, limit, files, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    model, compute = library(torch, tmp_path)
    out = tmp_path / "logits.csv"
    arguments = [*map(str, files), f"--model={model}", "--logits", f"--top_k={CLASSES}"]
    assert predict.main([*arguments, f"--out={out}"]) == 0
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    errors = {}
    for row, file in zip(rows, files, strict=True):
        with torch.no_grad():
            wanted = compute(Image.open(file).convert("RGB")).numpy()[0]
        ours = {int(row[f"index_{k}"]): float(row[f"logit_{k}"]) for k in range(1, CLASSES + 1)}
        difference = max(abs(ours[k] - wanted[k]) for k in range(CLASSES))
        errors[file.name] = float(difference / np.abs(wanted).max())
    print(json.dumps(errors))
    assert max(errors.values()) <= limit, errors

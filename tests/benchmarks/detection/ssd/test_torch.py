"""MLPerf's reference SSD, written in PyTorch from its public source, against its import."""

import jax
import numpy as np
import pytest

import benchmarks
from benchmarks.detection.ssd.settings import Maps
from common.keys import read_config
from configs import ssd
from tests.conftest import adopt_values

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
resnets = pytest.importorskip("torchvision.models.resnet")
pytestmark = pytest.mark.parity

CHANNELS, SHAPES = (256, 512, 512, 256, 256, 256), (4, 6, 6, 6, 4, 4)
LOGITS = 7


class Trunk(torch.nn.Module):
    """A ResNet-34 without its last stage, with stride 1 in the third."""

    def __init__(self):
        super().__init__()
        parts = list(resnets.resnet34(weights=None).children())
        self.layer1 = torch.nn.Sequential(*parts[:6])
        self.layer2 = torch.nn.Sequential(*parts[6:7])
        first = self.layer2[0][0]
        first.conv1.stride = first.downsample[0].stride = (1, 1)

    def forward(self, x):
        return self.layer2(self.layer1(x))


class Reference(torch.nn.Module):
    """The network; the names of its parts are the reference's."""

    def __init__(self):
        super().__init__()
        conv, relu = torch.nn.Conv2d, torch.nn.ReLU
        self.model = Trunk()
        rows = zip(CHANNELS, (256, 256, 128, 128, 128), CHANNELS[1:], (2, 2, 2, 1, 1), strict=False)
        self.additional_blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                *(conv(before, squeezed, 1), relu()),
                *(conv(squeezed, after, 3, padding=stride - 1, stride=stride), relu()),
            )
            for before, squeezed, after, stride in rows
        )
        sizes = [*zip(CHANNELS, SHAPES, strict=True)]
        self.loc = torch.nn.ModuleList(conv(c, 4 * n, 3, padding=1) for c, n in sizes)
        self.conf = torch.nn.ModuleList(conv(c, LOGITS * n, 3, padding=1) for c, n in sizes)

    def forward(self, x):
        """(deltas [b, 4, N], logits [b, C, N]), where N goes by map, shape, row and column."""
        maps = [self.model(x)]
        for block in self.additional_blocks:
            maps.append(block(maps[-1]))
        parts = [(self.loc, 4), (self.conf, LOGITS)]
        return [
            torch.cat([y(m).reshape(len(x), n, -1) for y, m in zip(layers, maps, strict=True)], 2)
            for layers, n in parts
        ]


def default_boxes():
    """float64[N, 4]: centre x, centre y, width, height, in the reference's order."""
    layout = read_config(Maps, ssd.get_config()).default_boxes
    ours = layout.boxes()
    first, parts = 0, []
    for side, shapes in zip(layout.feature_sizes, layout.boxes_per_cell, strict=True):
        part = ours[first : first + side * side * shapes].reshape(-1, shapes, 4)
        first += side * side * shapes
        parts.append(part.transpose(1, 0, 2).reshape(-1, 4)[:, [1, 0, 3, 2]])
    return np.concatenate(parts)


def decoded(deltas, logits):
    """(boxes [N, 4] x0, y0, x1, y1, probabilities [N, C]) of one image."""
    deltas, anchor = deltas.numpy().T.astype(float), default_boxes()
    centre = deltas[:, :2] * 0.1 * anchor[:, 2:] + anchor[:, :2]
    half = np.exp(deltas[:, 2:] * 0.2) * anchor[:, 2:] / 2
    return np.concatenate([centre - half, centre + half], 1), torch.softmax(logits, 0).numpy().T


def overlap(boxes, one):
    size = np.minimum(boxes[:, 2:], one[2:]) - np.maximum(boxes[:, :2], one[:2])
    both = size.clip(0).prod(1)
    return both / ((boxes[:, 2:] - boxes[:, :2]).prod(1) + (one[2:] - one[:2]).prod() - both)


def detections(boxes, scores):
    """[(score, class, box)] of an image, the best first, as the reference suppresses them."""
    found = []
    for number in range(1, LOGITS):
        order = np.argsort(scores[:, number])[-200:]
        order = order[scores[order, number] > 0.05]
        while len(order):
            best = order[-1]
            found.append((scores[best, number], number, boxes[best]))
            order = order[overlap(boxes[order], boxes[best]) < 0.5]
    return sorted(found, key=lambda row: -row[0])[:200]


def test_detections_are_the_reference_s(tmp_path):
    torch.manual_seed(0)
    network = Reference().eval()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.3, 0.7)
        for head in (*network.loc, *network.conf):
            head.weight.normal_(0, 0.05)
    path = str(tmp_path / "ssd300.pt")
    torch.save({"model": network.state_dict(), "label_map": {0: "background", 1: "a"}}, path)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 300, 300, 3)).astype(np.uint8)
    mean, std = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
    with torch.no_grad():
        images = ((torch.from_numpy(pixels) / 255 - mean) / std).permute(0, 3, 1, 2)
        deltas, logits = network(images.contiguous())
    config = ssd.get_config()
    config.precision = "float32"
    adopt_values(config, path, whole=True)
    benchmark = benchmarks.load(config.lock(), "")
    imported = benchmark.uses.read_foreign(path)
    assert imported is not None
    batch = {"image": pixels, "size": np.ones((2, 2), np.float32), "image_id": np.arange(2)}
    mine = jax.jit(benchmark.predict)(imported.params, imported.model_state, batch)
    mine = {name: np.asarray(values) for name, values in mine.items()}
    for i in range(2):
        rows = detections(*decoded(deltas[i], logits[i]))
        assert len(rows) == np.count_nonzero(mine["score"][i]) > 50
        assert min(row[2].min() for row in rows) < 0  # boxes reach beyond the image
        np.testing.assert_allclose(mine["score"][i][: len(rows)], [r[0] for r in rows], atol=1e-4)
        for score, number, box in rows[:-1]:  # equal scores may change places
            near = np.abs(mine["boxes"][i][:, [1, 0, 3, 2]] - box).max(1) < 1e-4
            near &= (np.abs(mine["score"][i] - score) < 1e-4) & (mine["class"][i] == number)
            assert near.any()

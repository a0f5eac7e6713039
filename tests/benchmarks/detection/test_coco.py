"""Annotations, outlines and scores: against numbers known by hand, and against pycocotools."""

import array
import contextlib
import io
import json
from typing import Any

import numpy as np
import pycocotools.mask
import pytest

from benchmarks.detection import coco, scoring
from common.errors import DataError

IDS = (7, 1_000_000, -3)  # of images; the last one has no objects
CATEGORIES = (90, 3, 12)  # with gaps, not in order
TRIANGLE = [0, 0, 4, 0, 4, 4]
RUNS = {"counts": [50, 50], "size": [10, 10]}
FAR = (2e9, 20.5, -11, float("inf"), "a", None)
coco_masks: Any = pycocotools.mask  # its types know neither polygons nor what it returns


def content():
    """Three images and five objects, one of them a crowd."""

    def row(number, image, category, box, **more):
        return {"id": number, "image_id": image, "category_id": category, "bbox": box} | more

    return {
        "info": {"year": 2017},
        "images": [
            {"id": i, "file_name": f"{i}.jpg", "height": 100, "width": 200, "license": 1}
            for i in IDS
        ],
        "categories": [{"id": i, "name": f"name {i}", "supercategory": "x"} for i in CATEGORIES],
        "annotations": [
            row(0, 7, 3, [10, 20, 40, 50], area=1500.0, iscrowd=0),  # 0: pycocotools' "no match"
            row(5, 7, 90, [100.5, 10, 50, 20.25], area=1012.5, iscrowd=0),
            row(6, 1_000_000, 3, [0, 0, 100, 100], area=10_000.0, iscrowd=0),
            row(8, 1_000_000, 3, [100, 0, 100, 100], area=5000.0, iscrowd=1),
            row(9, 1_000_000, 12, [3, 4, 10, 10]),  # neither area nor iscrowd
        ],
    }


def parse(data, **more):
    return coco.Annotations.parse(json.dumps(data).encode(), "a.json", **more)


def detection(image, category, box, confidence=0.9):
    return {"image_id": image, "category_id": category, "bbox": box, "score": confidence}


def perfect():
    return [
        detection(row["image_id"], row["category_id"], row["bbox"])
        for row in content()["annotations"]
        if not row.get("iscrowd")
    ]


def score(data, rows, kind="bbox"):
    """The scores of detections, which are dicts."""
    shape = "segmentation" if kind == "segm" else "bbox"
    keys = ("image_id", "category_id", "score", shape)
    columns = {key: [row[key] for row in rows] for key in keys}
    return scoring.quality(data, columns, kind).scores


def test_the_columns_of_a_file(tmp_path):
    path = tmp_path / "instances.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(content()).encode())  # as some editors save
    data = coco.Annotations.load(str(path))
    assert data.categories == ((3, "name 3"), (12, "name 12"), (90, "name 90"))
    assert data.image_ids.tolist() == list(IDS) and data.file_names[1] == "1000000.jpg"
    assert data.sizes.tolist() == [[100, 200]] * 3 and data.rows.tolist() == [0, 0, 1, 1, 1]
    assert data.category_ids.tolist() == [3, 90, 3, 3, 12]
    assert data.boxes[1].tolist() == [100.5, 10, 50, 20.25]
    assert data.areas.tolist() == [1500, 1012.5, 10_000, 5000, 100]
    assert data.crowd.tolist() == [False, False, False, True, False] and data.outlines == []


def test_a_perfect_detector_scores_one_and_an_empty_list_zero():
    """The objects are medium and large, and one is small; the crowd asks for no detection."""
    data = parse(content())
    ones = score(data, perfect())
    assert tuple(ones) == scoring.NAMES
    assert list(ones.values()) == pytest.approx([1] * 12)
    assert score(data, []) == dict.fromkeys(scoring.NAMES, 0.0)
    small = content()
    small["annotations"] = small["annotations"][:2]
    assert np.isnan(score(parse(small), [])["AP_large"])  # nothing large to find


def test_what_no_object_counts_for_is_not_defined_and_no_number():
    data = content()
    for row in data["annotations"]:
        row["iscrowd"] = 1
    scores = score(parse(data), perfect())
    assert np.isnan([*scores.values()]).all()
    assert [*scoring.headline(scores)] == ["mAP"]
    both = scores | {f"mask_{name}": value for name, value in scores.items()}
    assert [*scoring.headline(both)] == ["mAP", "mask_mAP"]
    one = scores | {"mAP": 0.5, "AP_small": 0.5}
    assert [*scoring.headline(one)] == ["mAP", "AP_small"]


def drawn(seed, images=30, per_image=6):
    """A set with 4 categories, and 20 detections per image near its objects."""
    draw = np.random.default_rng(seed)
    data = {"images": [], "categories": [{"id": c, "name": str(c)} for c in (2, 5, 17, 40)]}
    rows, found = [], []
    for i in range(images):
        image_id = int(1000 - 7 * i)
        data["images"].append({"id": image_id, "file_name": "x", "height": 300, "width": 300})
        for _ in range(int(draw.integers(0, per_image))):
            box = [*draw.uniform(0, 150, 2).round(2), *draw.uniform(2, 150, 2).round(2)]
            category = int(draw.choice([2, 5, 17]))  # 40 has no objects
            rows.append(
                {"id": len(rows) + 1, "image_id": image_id, "category_id": category, "bbox": box}
                | {"area": box[2] * box[3] * 0.8, "iscrowd": int(draw.uniform() < 0.1)}
            )
            for _ in range(4):
                near = (np.array(box) + draw.normal(0, 6, 4)).clip(1).tolist()
                kind = category if draw.uniform() < 0.7 else int(draw.choice([2, 5, 17, 40]))
                found.append(detection(image_id, kind, near, float(draw.uniform())))
    return data | {"annotations": rows}, found


def official(data, found, path):
    """pycocotools' own way, from a file."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    path.write_text(json.dumps(data))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(path))
        evaluation = COCOeval(truth, truth.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats


@pytest.mark.parametrize("seed", range(2))
def test_random_detections_score_as_with_pycocotools_itself(seed, tmp_path, capsys):
    data, found = drawn(seed)
    columns = {key: np.array([row[key] for row in found]) for key in found[0]}
    expected = official(data, [dict(row) for row in found], tmp_path / "a.json")
    capsys.readouterr()
    annotations = parse(data)
    result = scoring.quality(annotations, columns).scores
    np.testing.assert_array_equal(list(result.values()), expected)
    assert 0.05 < result["mAP"] < 0.9
    assert capsys.readouterr() == ("", "")
    print("said")  # the built-in is as it was
    assert capsys.readouterr().out == "said\n"


def test_numbers_that_are_not_finite_match_nothing():
    void = [
        detection(7, 3, [np.nan] * 4, 1.0),
        detection(7, 90, [1.0, 2.0, np.inf, 2.0], 1.0),
        detection(1_000_000, 3, [1, 1, 5, 5], np.nan),
    ]
    data = parse(content())
    assert score(data, void) == score(data, [])
    assert score(data, [*void, *perfect()])["mAP"] == 1


@pytest.mark.parametrize("row", [detection(8, 3, [1, 1, 5, 5]), detection(7, 4, [1, 1, 5, 5])])
def test_a_detection_of_another_set_is_refused(row):
    with pytest.raises(ValueError, match="does not fit the annotations a.json"):
        score(parse(content()), [row])


def squares():
    """The set with an outline for each object: polygons in both halves of the box, or runs."""
    data = content()
    for row in data["annotations"]:
        x, y, w, h = row["bbox"]
        parts = [(x, x + w / 4), (x + w / 2, x + w)]
        row["segmentation"] = [[a, y, b, y, b, y + h, a, y + h] for a, b in parts]
    half = 100 * 100  # pixels, column by column
    data["annotations"][3]["segmentation"] = {"counts": [half, half], "size": [100, 200]}
    return data


def test_masks_score_by_their_pixels():
    data = parse(squares(), masks=True)
    index = scoring.index(data)
    crowd = index.annToRLE(index.anns[4])
    assert coco_masks.toBbox(crowd).tolist() == [100, 0, 100, 100]
    assert coco_masks.area(crowd) == 100 * 100
    found = [
        {"image_id": row["image_id"], "category_id": row["category_id"], "score": 0.5}
        | {"segmentation": index.annToRLE(row)}
        for row in index.anns.values()
        if not row["iscrowd"]
    ]
    assert score(data, found, "segm")["mAP"] == pytest.approx(1)
    everything = coco_masks.encode(np.ones((100, 200), np.uint8, order="F"))
    full = {**found[0], "segmentation": everything}
    assert score(data, [full, *found[1:]], "segm")["mAP"] < 1


def change(key, i, **fields):
    def spoil(data):
        data[key][i] |= fields

    return spoil


def drop(key, i, name):
    def spoil(data):
        del data[key][i][name]

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data.pop("categories"), "no list 'categories'"),
        (lambda data: data["images"].clear(), "no images"),
        (change("images", 1, id=7), "image id 7 "),
        (change("images", 1, id=2**31), "image 1 .*2147483648"),
        (drop("images", 2, "file_name"), "image -3 .*file_name"),
        (change("images", 0, width=0), r"image 7 \(7.jpg\) .*100 and 0"),
        (change("annotations", 1, iscrowd="0"), "annotation 5 .*iscrowd '0'"),
        (change("annotations", 1, image_id=8), "annotation 5 .*image 8"),
        (change("annotations", 1, category_id=91), "annotation 5 .*category 91"),
        (change("annotations", 1, bbox=[1, 2, 3]), r"annotation 5 of image 7 .*bbox \[1, 2, 3\]"),
        (change("annotations", 1, bbox=[1, 2, 3, float("nan")]), "bbox"),
        (drop("annotations", 1, "bbox"), "annotation 5 .*bbox"),
        (lambda data: data["annotations"].insert(0, 3), r"annotation 0 \(counted from 0\)"),
    ],
)
def test_each_mistake_in_a_file_takes_one_line(spoil, message):
    data = content()
    spoil(data)
    with pytest.raises(DataError, match=message) as caught:
        parse(data)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("a.json")


def test_ids_have_32_bits():
    data = content()
    for row, number in zip(data["images"], (2**31 - 1, -(2**31), 0), strict=True):
        row |= {"id": number, "height": 1, "width": 2}
    data["annotations"] = []
    found = parse(data)
    assert found.image_ids.tolist() == [2**31 - 1, -(2**31), 0]
    assert found.sizes.tolist() == [[1, 2]] * 3 and found.boxes.shape == (0, 4)


def test_a_mistake_in_an_outline_is_found_where_outlines_are_read():
    data = squares()
    outline = data["annotations"][1].pop("segmentation")
    parse(data)
    with pytest.raises(DataError, match="annotation 5, of image 7, has no segmentation"):
        parse(data, masks=True)
    data["annotations"][1]["segmentation"] = outline
    outline[0][0] = 2e9
    with pytest.raises(DataError, match="annotation 5, of image 7, has .*2000000000.0"):
        parse(data, masks=True)


@pytest.mark.parametrize("data", [b"", b'{"images": [', b"<html>", b"\xff\xfe\x00", b"[" * 10**5])
def test_a_damaged_file_takes_one_line(data, tmp_path):
    path = tmp_path / "b.json"
    path.write_bytes(data)
    with pytest.raises(
        DataError, match="b.json(, line 1)? is (damaged or no JSON|not UTF-16)"
    ) as caught:
        coco.Annotations.load(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of an older NumPy
@pytest.mark.parametrize("seed", range(3))
def test_polygons_and_runs_become_the_pixels_of_pycocotools(seed):
    draw = np.random.default_rng(seed)
    height, width = map(int, draw.integers(5, 90, 2))
    parts = int(draw.integers(1, 4))
    polygons = [
        (draw.uniform(-0.1, 1.1, (int(draw.integers(3, 9)), 2)) * [width, height]).ravel().tolist()
        for _ in range(parts)
    ]
    runs = coco_masks.merge(coco_masks.frPyObjects(polygons, height, width))
    expected = coco_masks.decode(runs)
    assert expected.any()
    for outline in (
        polygons,
        coco.dense_outline(polygons),
        runs,
        runs | {"counts": runs["counts"].decode()},
    ):
        np.testing.assert_array_equal(coco.outline_mask(outline, height, width), expected)
    noise = np.asfortranarray((draw.uniform(size=(height, width)) < 0.5).astype(np.uint8))
    np.testing.assert_array_equal(coco.outline_mask(coco_masks.encode(noise), height, width), noise)
    flat = noise.T.ravel()  # column by column
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flat]))).tolist()
    counts = np.diff([0, *edges, flat.size]).tolist()
    as_list = {"counts": counts, "size": [height, width]}
    np.testing.assert_array_equal(coco.outline_mask(as_list, height, width), noise)


def polygon(*tail):
    """Two corners of a triangle, and more numbers."""
    return [[0, 0, 4, 0, *tail]]


@pytest.mark.parametrize(
    ("outline", "fault"),
    [
        ([TRIANGLE, array.array("d", [*TRIANGLE, 1, 3])], ""),
        ([[*TRIANGLE, 1, 11], [*TRIANGLE, -10, 20]], ""),  # beyond the picture, and near
        (RUNS, ""),
        (RUNS | {"counts": "0T3"}, ""),  # 0, 100
        (RUNS | {"counts": [10**12, 100 - 10**12]}, "whose runs do not add up to 10x10"),
        (RUNS | {"counts": [50, 20]}, "whose runs do not add up"),
        (RUNS | {"counts": [0.5, 99.5]}, "whose runs do not add up"),
        (RUNS | {"size": [10, 9]}, "size [10, 9] in 10x10"),
        ({"size": [10, 10]}, "without 'counts'"),
        ([], "no segmentation"),
        ([TRIANGLE, TRIANGLE[:4]], "3 or more points"),
        (polygon(4), "3 or more points"),
        *((polygon(4, v), f"{v!r:.30}, no number in or near its 10x10") for v in FAR),
    ],
)
def test_faults_of_outlines(outline, fault):
    """Those that would end the program in pycocotools as well."""
    found = coco.outline_error(outline, 10, 10)
    assert fault in found and bool(fault) == bool(found)


def test_damaged_runs_raise():
    with pytest.raises(ValueError, match="Invalid RLE"):
        coco.outline_mask({"counts": "abc", "size": [10, 10]}, 10, 10)


def annotations(*rows):
    """Two images, three categories, and objects (image, category, box, iscrowd)."""
    images = [{"id": i, "file_name": f"{i}.jpg", "height": 90, "width": 90} for i in (7, 8)]
    names = [{"id": i, "name": f"name {i}"} for i in (3, 5, 9)]
    keys = "image_id", "category_id", "bbox", "iscrowd"
    objects = [dict(zip(keys, row, strict=True)) for row in rows]
    content = {"images": images, "categories": names, "annotations": objects}
    return coco.Annotations.parse(json.dumps(content).encode(), "a.json")


A, B = [1, 2, 30, 40], [1, 2, 30, 41]


@pytest.mark.parametrize(
    ("rows", "texts"),
    [
        ([(7, 3, A, 0), (7, 3, B, 0), (7, 5, A, 0), (8, 3, A, 0), (8, 5, A, 1)], []),
        (
            [(7, 3, A, 1), (8, 5, A, 1)],
            ["all 2 objects of 2 categories, such as 3, are crowds (iscrowd 1)"],
        ),
        (
            [(7, 3, A, 0), (7, 9, A, 1), (8, 9, B, 1), (8, 5, A, 1)],
            ["all 3 objects of 2 categories, such as 5, are crowds (iscrowd 1)"],
        ),
        (
            [(7, 5, A, 0), (8, 3, A, 0), (8, 3, A, 0), (8, 3, A, 0), (7, 5, B, 0), (7, 5, B, 0)],
            ["3 of 6 boxes are copies of others, with the same image, category and bbox"],
        ),
        ([(7, 3, A, 1), (7, 3, A, 1)], ["all 2 objects of 1 category"]),  # copies spoil no score
    ],
)
def test_labels_that_cannot_be_meant(rows, texts):
    findings = coco.oddities(annotations(*rows))
    assert [status for status, *_ in findings] == ["warn"] * len(texts)
    for (_, text, fix), start in zip(findings, texts, strict=True):
        assert text.startswith(start) and fix
        assert "copies" not in text or f"first in {8 if len(rows) > 3 else 7}.jpg" in text


@pytest.mark.parametrize(
    ("sizes", "masks", "words"),
    [
        ([(20, 20)] * 40, False, []),
        ([(20, 20)] * 36 + [(20, 6)] * 4, False, ["4 of 40 objects", "SSD's 300x300"]),
        ([(20, 20)] * 36 + [(20, 6)] * 4, True, []),
        ([(1, 1)] * 40, True, ["40 of 40 objects", "Mask R-CNN's"]),
        ([(20, 20)] * 19, False, ["1 category has fewer than 20 objects: name 3 (19)"]),
    ],
)
def test_tiny_objects_and_rare_categories(sizes, masks, words):
    """An image of 900x300 becomes 300x300, or with masks 1333x444: one of 20x6 is 6.7x6 or 30x9."""
    images = [{"id": 7, "file_name": "7.jpg", "height": 900, "width": 300}]
    objects = [{"image_id": 7, "category_id": 3, "bbox": [1, 1, w, h]} for h, w in sizes]
    content = {"images": images, "categories": [{"id": 3, "name": "name 3"}]}
    content["annotations"] = objects
    parsed = coco.Annotations.parse(json.dumps(content).encode(), "a.json")
    findings = coco.weaknesses(parsed, masks)
    assert all(word in findings[0][1] for word in words) and len(findings) == bool(words)

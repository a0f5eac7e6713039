"""What lies where no preparation reads anything: labels of other tools, masks, classes in names."""

import collections
import json
import os
import re
import shlex
from collections.abc import Collection

from common import limits
from common.errors import one_line, parse_json, some
from common.images import photos
from common.preparation.folders import Folder
from common.preparation.splits import split_of

_EXPORT = "export them in COCO's form"
_CONVERT = "convert them to COCO's form"
_FORMS = (  # what a file is, a pattern of its first bytes, and what to do
    ("is a pointer of Git LFS, not the file", rb"\Aversion https://git-lfs", "type git lfs pull"),
    ("has labels of VIA", rb'"_via_|"region_attributes"|[",]region_shape_attributes', _EXPORT),
    ("has labels of Label Studio", rb'"(rectangle|polygon|brush)labels"|"from_name"', _EXPORT),
    ("has labels of CreateML", rb'"coordinates"\s*:\s*\{\s*"(x|y|width|height)"', _CONVERT),
    ("has labels of Datumaro", rb'"dm_format_version"|"items"\s*:\s*\[.*"label_id"', _EXPORT),
    ("has labels of VoTT", rb'"asset"\s*:\s*\{|"assets"\s*:\s*\{', "export them as Pascal VOC"),
    ("has labels of Supervisely", rb'"classTitle"|"geometryType"', _EXPORT),
    ("has labels of Labelbox", rb'"data_row"|"Labeled Data"|"featureId"', _CONVERT),
    ("has labels of SuperAnnotate", rb'"className"\s*:.*"points"', _EXPORT),
    ("has labels of SageMaker", rb'"source-ref"', _CONVERT),
    ("has labels of BDD100K", rb'"box2d"|"poly2d"', _CONVERT),
    ("has labels of Cityscapes", rb'"imgHeight"\s*:.*"objects"', _CONVERT),
    ("has COCO's panoptic segments", rb'"segments_info"', "boxes need the file of instances"),
    ("has COCO's captions", rb'"caption"\s*:', "boxes need the file of instances"),
    ("has polygons of the first LabelMe", rb"<annotation>.*<polygon>.*<pt>", _CONVERT),
)
_COCO = rb'"(images|annotations|categories)"\s*:\s*\['
_ENDINGS = (".json", ".jsonl", ".ndjson", ".manifest", ".csv", ".xml")
_MOST, _SMALL = 8, 200  # files that are looked at; bytes of a small one
_MASKS = r"annot|mask|labels?(/|$)|segm|ground_?truth|(^|_)gt"  # in the name of a folder
_MASK = r"(?i)_(masks?|gt|seg\w*|labels?|annot\w*|l)$"  # at the end of the name of an image
_CLASS = r"([^/]+?)(?:[^\w/]|_)*[0-9]+[^/]*$"  # what stands before the first number of a name


def labels(folder: Folder, completely: bool = False) -> list[str]:
    """Labels that no preparation reads: "FILE has labels of TOOL: FIX", once for each form.

    `completely` finds damage in COCO's form, too, which takes long.
    """
    names = [file.name for file in folder.files if file.size < _SMALL][:_MOST]
    names += sorted(folder.named(*_ENDINGS), key=lambda name: (name.count("/"), name))[:_MOST]
    result: dict[str, list[str]] = collections.defaultdict(list)
    for name in dict.fromkeys(names):
        head = folder.head(name)
        forms = (form for form in _FORMS if re.search(form[1], head, re.DOTALL))
        title, _, fix = next(forms, ("", b"", ""))
        problem = f"{title}: {fix}" if title else ""
        if completely and not title and name.lower().endswith(".json") and re.search(_COCO, head):
            problem = _coco_problem(folder.head(name, limits.ANNOTATION_BYTES))
        result[problem].append(name)
    result.pop("", None)
    more = {text: f" (and {len(names) - 1} more)" for text, names in result.items() if names[1:]}
    return [f"{names[0]}{more.get(text, '')} {text}" for text, names in result.items()]


def _coco_problem(data: bytes) -> str:
    """What is wrong with a file in COCO's form; '' if it is not known."""
    try:
        content = parse_json(data)
        if all("file_name" in row for row in content["images"]):
            return ""
        fix = "copy the last part of each coco_url to file_name"
        return f"has labels of LVIS, whose images have no file_name: {fix}"
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        return f"is damaged or cut short at {place} ({error.msg}): get it again"
    except (ValueError, TypeError, KeyError) as error:
        return f"is not in COCO's form ({one_line(error)}): export it again"


def masks(images: Collection[str], by_folder: bool = False) -> list[str]:
    """Images that are masks of others by their names, such as a_mask.png, or by their folders."""
    stems = {name: os.path.splitext(os.path.basename(name))[0] for name in images}
    bare = {name: re.sub(_MASK, "", stem) for name, stem in stems.items()}
    masked = {n for n in images if by_folder and re.search(_MASKS, os.path.dirname(n), re.I)}
    plain = {stems[name] for name in images if name not in masked}
    return [n for n in images if bare[n] in plain and (n in masked or bare[n] != stems[n])]


def explain(folder: Folder) -> str:
    """What images without a reading have instead of classes, and what to do; '' if nothing."""
    if unread := labels(folder, completely=True):
        return "; ".join(unread[:2])
    images = folder.named(*photos.SUFFIXES)
    if found := masks(images, by_folder=True):
        fix = "for classes of photos move them away; objects need outlines in COCO's form"
        return f"{len(found):,} masks, such as {found[0]}, which are not trained on: {fix}"
    images = [name for name in images if split_of(name) in ("", "train")] or images
    matches = [re.search(_CLASS, name) for name in images]
    classes = collections.Counter(match[1] for match in matches if match)
    words = all(re.search(r"[^\W\d_]", name) for name in classes)
    if None in matches or not words or len(classes) < 2 or 2 * len(classes) > len(images):
        return ""
    top = os.path.commonpath(map(os.path.dirname, images))
    command = f"imagenet --layout=folder --train={shlex.quote(folder.full(top))}"
    return (
        f"{some(classes)} in the names of the photos: if these are the classes, type "
        f"python -m scripts.prepare {command} --class={shlex.quote(_CLASS)} --out=DIR"
    )

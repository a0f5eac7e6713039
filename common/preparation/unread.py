"""What lies where no preparation reads anything: labels of other tools, masks, classes in names."""

import collections
import json
import os
import re
import shlex
from collections.abc import Collection

from common import limits
from common.errors import parse_json, some
from common.images import photos
from common.preparation.folders import Folder, split_of

_FIX = "export or convert them to COCO's form"
_FORMS = {  # what a file is and what to do, with a pattern of its first bytes
    "is a pointer of Git LFS, not the file: type git lfs pull": rb"\Aversion https://git-lfs",
    f"has labels of Label Studio: {_FIX}": rb'"(rectangle|polygon|brush)labels"|"from_name"',
    f"has labels of CreateML: {_FIX}": rb'"coordinates"\s*:\s*\{\s*"(x|y|width|height)"',
    f"has labels of Datumaro: {_FIX}": rb'"dm_format_version"|"items"\s*:\s*\[.*"label_id"',
    f"has labels of VoTT: {_FIX}": rb'"asset"\s*:\s*\{|"assets"\s*:\s*\{',
    f"has labels of Supervisely: {_FIX}": rb'"classTitle"|"geometryType"',
    f"has labels of Labelbox: {_FIX}": rb'"data_row"|"Labeled Data"|"featureId"',
    f"has labels of Cityscapes: {_FIX}": rb'"imgHeight"\s*:.*"objects"',
    "has COCO's panoptic segments: boxes need the file of instances": rb'"segments_info"',
    "has COCO's captions: boxes need the file of instances": rb'"caption"\s*:',
}
_COCO = rb'"(images|annotations|categories)"\s*:\s*\['
_MOST, _SMALL = 8, 200  # files that are looked at; bytes of a small one
_MASKS = r"annot|mask|labels?(/|$)|segm|ground_?truth|(^|_)gt"  # in the name of a folder
# Ends of the names of masks, such as a_mask_1.png and a_gtFine_labelIds.png, and of their photos.
MASK = r"(?i)[\W_]*(annot(ation)?s?|masks?|gt|gt(fine|coarse)_\w+|labels?|segm\w*|seg|_l)[\W_]*\d*$"
_PHOTO = r"(?i)[\W_]*(leftimg8bit|image|img|rgb)?[\W_]*$"
_CLASS = r"([^/]+?)(?:[^\w/]|_)*[0-9]+[^/]*$"  # what stands before the first number of a name


def labels(folder: Folder) -> dict[str, str]:
    """Labels that no preparation reads: {FILE: "has labels of TOOL: FIX"}, once for each form."""
    names = [file.name for file in folder.files if file.size < _SMALL][:_MOST]
    tables = folder.named(".json", ".jsonl", ".ndjson", ".csv")
    names += sorted(tables, key=lambda name: (name.count("/"), name))[:_MOST]
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        head = folder.head(name)
        forms = (form for form, pattern in _FORMS.items() if re.search(pattern, head, re.DOTALL))
        if (form := next(forms, "")) and form not in found.values():
            found[name] = form
    return found


def _damage(folder: Folder) -> str:
    """Where a file in COCO's form is damaged; '' if none is."""
    for name in folder.named(".json")[:_MOST]:
        if re.search(_COCO, folder.head(name)):
            try:
                parse_json(folder.head(name, limits.ANNOTATION_BYTES))
            except json.JSONDecodeError as error:
                position = f"line {error.lineno}, column {error.colno} ({error.msg})"
                return f"{name} is damaged or cut short at {position}: get it again"
            except ValueError:  # another tool's, or its brackets are nested too deeply
                pass
    return ""


def masks(images: Collection[str], by_folder: bool = False) -> list[str]:
    """Images that are masks of others by their names, such as a_mask.png, or by their folders."""
    stems = {name: os.path.splitext(os.path.basename(name))[0] for name in images}
    bare = {name: re.sub(_PHOTO, "", re.sub(MASK, "", stem)) for name, stem in stems.items()}
    masked = {n for n in images if by_folder and re.search(_MASKS, os.path.dirname(n), re.I)}
    masked = masked if len(masked) < len(images) else set()  # a word in the name of the whole set
    ends = {name for name, stem in stems.items() if re.search(MASK, stem)}
    plain = {bare[name] for name in images if name not in masked | ends} - {""}
    return [name for name in images if bare[name] in plain and name in masked | ends]


def explain(folder: Folder) -> str:
    """What images of no dataset format have instead of classes, and what to do; '' if nothing."""
    if unread := labels(folder):
        return "; ".join(f"{name} {text}" for name, text in [*unread.items()][:2])
    if damage := _damage(folder):
        return damage
    images = folder.named(*photos.SUFFIXES)
    if found := masks(images, by_folder=True):
        fix = "for classes of photos move them away; objects need outlines in COCO's form"
        return f"{len(found):,} masks, such as {found[0]}, which are not trained on: {fix}"
    images = [name for name in images if split_of(name, outermost=True) in ("", "train")] or images
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

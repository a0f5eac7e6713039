"""Recognises photos by class: ImageNet's archives, class folders, or a table of classes."""

import collections
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from benchmarks.resnet.preparation import annotations, several
from benchmarks.resnet.records import IMAGENET_COUNTS
from common.errors import some
from common.images import photos
from common.preparation import unread
from common.preparation.folders import DatasetFormat, Folder, split_of, whole_split
from common.preparation.sources import SourceError

_VIEWS = (  # folders of other views of the same images, or of images beside these
    r"(jpeg)?images?|imgs?|masks|labels|annotations|gt.*|ground_?truth|[hl]r"
    r"|rgb|depth|instances?|semantic|segmentation.*|dataset.*|frames"
)
# Folders that lie beside class folders by accident: pictures of a README, raw data, code.
_STRAY = (
    r"assets?|docs?|documentation|readme.*|figures?|figs?|examples?|samples?|demos?"
    r"|screen_?shots?|media|resources?|results?|outputs?|predictions?|unlabell?ed.*"
    r"|raw_?(data|images?|imgs?|photos?|pictures?)|src|code|scripts?|notebooks?|thumb(nail)?s?"
)
_HEADS = 8  # files of a kind that `dataset_formats` looks into
_COMMAND = "python -m scripts.prepare imagenet --layout=folder"
_IN_CLASS = r"/(images?|imgs?)$"  # a folder in a class folder
_OBJECTS = (  # in a file with boxes or outlines
    rb'"annotations"\s*:|"images"\s*:\s*\[|<annotation|(?m:^\s*(names|nc)\s*:)'
)


def dataset_formats(folder: Folder) -> list[DatasetFormat]:
    """ImageNet's archives, class folders or a table, where a folder, or one file, has them."""
    if archives := folder.named("ilsvrc2012_img_train.tar"):
        validation = folder.named("ilsvrc2012_img_val.tar")[:1]
        return [_official(folder, archives[0], *validation)]
    images = folder.named(*photos.SUFFIXES, ".heic", ".heif")  # HEIC is named as such later
    if not images:
        _check_listing(folder)
    # Something else, with pictures in it; or masks of a quarter of them.
    if 2 * len(images) < len(folder.files) or 4 * len(unread.masks(images)) > len(images):
        return []
    has_objects = _has_objects(folder, images)
    by_folder, by_table, problems = None, None, []
    try:
        by_folder = _class_folders(folder, images, has_objects)
    except SourceError as error:
        problems.append(error)
    if by_folder and by_folder.name == "imagenet":
        return [by_folder]
    if has_objects:  # whose labels are read, if --as does not choose the classes
        return [by_folder._replace(num_files=0)] if by_folder else []
    finder = annotations.Photos(images)
    for names in _tables(folder):
        try:
            other = _table(folder, images, finder, names, bool(by_folder))
            by_table = max(by_table, other, key=lambda one: one.num_files if one else 0)
        except SourceError as error:
            problems.append(error)
    if problems and not (by_folder or by_table):
        raise problems[0]
    aside = "".join(f"; not used: {str(problem).partition(': ')[0]}" for problem in problems[:1])
    by_folder = by_folder and by_folder._replace(output=f"{by_folder.output}{aside}")
    return [one for one in (by_folder, by_table) if one]


def _check_listing(folder: Folder) -> None:
    """SourceError if the first table lists photos, which are not there."""
    for name in folder.named(".csv", ".tsv", ".txt")[:1]:
        head = folder.head(name)
        if 2 * len(re.findall(rb"(?i)\.(?:jpe?g|png)\b", head)) > head.count(b"\n"):
            fix = "put it beside them, and give their folder"
            raise SourceError(f"{folder.full(name)} lists photos: {fix}")


def _official(folder: Folder, train: str, validation: str = "") -> DatasetFormat:
    """ImageNet's official archives; the preparation names what is missing."""
    flags = [f"--train={folder.full(train)}"]
    flags += [f"--validation={folder.full(validation)}"] if validation else []
    texts = folder.named(".txt")[:_HEADS]
    labels = [name for name in texts if re.match(rb"n\d{8}\s*\n", folder.head(name, 16))]
    flags += [f"--validation_labels={folder.full(name)}" for name in labels[:1]]
    evidence = f"{', '.join(filter(None, [train, validation]))}: ImageNet's synsets"
    return DatasetFormat(
        "imagenet", "imagenet", evidence, "records of ImageNet", flags, len(folder.files)
    )


def _class_folders(folder: Folder, images: list[str], has_objects: bool) -> DatasetFormat | None:
    """Class folders in one folder, or in one for each split; None if many images are elsewhere.

    Images elsewhere do not count if they are copies of images that are used (some archives hold
    their content twice, one inside the other), if they are for validation and tests, or if labels
    of objects may be theirs.
    """
    dirs = {name: re.sub(_IN_CLASS, "", os.path.dirname(name), flags=re.I) for name in images}
    parents = {name: os.path.dirname(path) for name, path in dirs.items()}
    groups: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in filter(None, dirs.values()):
        groups[os.path.dirname(path)][os.path.basename(path)] += 1
    groups = {path: names for path, names in groups.items() if _are_classes(names)}
    root, splits = os.path.commonpath(groups) if groups else "", {}
    for path in sorted(groups, key=lambda path: (-len(path), path)):  # the inner of copies
        splits.setdefault(split_of(path.removeprefix(root)), path)
    train = splits.get("train", splits.get(""))
    held = splits.get("validation", splits.get("test", ""))
    sizes = {file.name: file.size for file in folder.files}
    files = {name: (os.path.basename(name), sizes[name]) for name in images}
    used = [name for name in images if parents[name] in (train, held or train)]
    copies = {files[name] for name in used}
    trained = [name for name in images if split_of(name, outermost=True) in ("", "train")]
    stray = {path for path in {*dirs.values()} if _strays(dict.fromkeys(path.split("/"), 0))}
    elsewhere = sum(files[n] not in copies and dirs[n] not in stray for n in trained)
    if train is None or (10 * elsewhere > len(used) and not has_objects):
        return None
    classes, prefix = {*groups[train]}, f"{train}/" if train else ""
    inner = (path.removeprefix(prefix) for path in dirs.values() if path.startswith(prefix))
    tops = collections.Counter(path.partition("/")[0] for path in inner if path)
    strays = _strays(tops)
    if {*tops} - strays != classes - strays:
        return None
    if strays:
        path = folder.full(train)
        command = f"{_COMMAND} --train={shlex.quote(path)} --out=DIR"
        raise SourceError(
            f"{path}: {some(sorted(classes - strays))} look like classes, {some(sorted(strays))} "
            f"beside them does not: move it away, or, if all folders are classes, type {command}"
        )
    if len(classes) == IMAGENET_COUNTS["classes"] and all(
        re.fullmatch(r"n\d{8}", c) for c in classes
    ):
        loose = {path for path in dirs.values() if split_of(path) == "validation"}
        if validation := held or min(loose, default=""):
            return _official(folder, train, validation)
    is_jpeg = all(name.lower().endswith((".jpg", ".jpeg")) for name in images)
    evidence = f"{train}/ and {held}/ of " if held else ""
    evidence += f"{len(classes):,} folders of {'JPEGs' if is_jpeg else 'images'}: classes "
    flags = ["--layout=folder", f"--train={folder.full(train)}"]
    flags += [f"--validation={folder.full(held)}"] if held else []
    share = "a tenth (or --validation_fraction) of each class for validation"
    output = f"{held}/ is for validation" if held else share
    inside = re.compile(rf"({re.escape(prefix)}|{re.escape(held)}/)[^/]+/")
    if left := [name for name in images if not inside.match(name)]:
        where = some({os.path.dirname(name) or name: None for name in left})
        output += f"; other images, which are not used: {len(left):,} ({where})"
    output = f"records of {len(classes):,} classes, {output}"
    return DatasetFormat(
        "imagenet", "photos", evidence + some(sorted(classes)), output, flags, len(used)
    )


def class_folders(folder: Folder) -> str:
    """Which folders look like classes, where not all do, and the command for them; else ''."""
    groups: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name in folder.named(*photos.SUFFIXES):
        *above, inner = os.path.dirname(name).split("/")
        groups["/".join(above)][inner] += 1
    groups = {path: names for path, names in groups.items() if path and _are_classes(names)}
    if not groups:
        return ""
    trained = [path for path in groups if split_of(path) in ("", "train")] or groups
    path = max(trained, key=lambda path: (groups[path].total(), path.count("/")))
    beside = [p for p in groups if os.path.dirname(p) == os.path.dirname(path) and p != path]
    flags = [f"--train={folder.full(path)}"]
    flags += [f"--validation={folder.full(p)}" for p in beside if split_of(p) == "validation"][:1]
    text = f"{some(sorted(groups[path]))} in {path} look like classes"
    command = f"{_COMMAND} {shlex.join(flags)} --out=DIR"
    return f"{text}, and other images lie elsewhere: for these alone type {command}"


def _are_classes(sizes: Mapping[str, int]) -> bool:
    """Whether folders beside each other, with their numbers of images, may be classes."""
    splits = {split_of(name) for name in sizes}
    are_likely = "" in splits and len(splits) < 3 and len({*sizes} - _strays(sizes)) > 1
    return are_likely and not views(sizes)


def views(names: Collection[str]) -> list[str]:
    """Names of folders that hold masks, or other views of the images in folders beside them."""
    bare = {name: re.sub(unread.MASK, "", name) for name in names}
    return [n for n in names if re.fullmatch(_VIEWS, n, re.I) or bare[n] in {*names} - {n}]


def _strays(sizes: Mapping[str, int]) -> set[str]:
    """Folders that are no classes by name, or the only one of a single picture beside ten."""
    strays = {n for n in sizes if re.fullmatch(_STRAY, re.sub(r"[\W_]+", "_", n), re.I)}
    strays |= {name for name in sizes if whole_split(name) in ("validation", "test")}
    order = sorted(sizes, key=lambda name: sizes[name])
    is_lonely = len(order) > 1 and sizes[order[0]] == 1 and sizes[order[1]] >= 10
    return strays | {*order[:is_lonely]}


def _has_objects(folder: Folder, images: list[str]) -> bool:
    """Whether the folder has labels of objects: a file for each image, or one for all."""

    def stem(name: str) -> str:
        return os.path.splitext(os.path.basename(name))[0]

    stems = {*map(stem, images)}
    beside = sum(stem(name) in stems for name in folder.named(".xml", ".txt", ".json"))
    return 10 * beside > len(images) or any(
        re.search(_OBJECTS, folder.head(name))
        for suffix in (".json", ".xml", ".yaml", ".yml")
        for name in folder.named(suffix)[:_HEADS]
    )


def _tables(folder: Folder) -> list[list[str]]:
    """The tables; those of several splits with the same columns together, that for training first.

    Such as train/_classes.csv and valid/_classes.csv of Roboflow.
    """
    groups: dict[bytes, dict[str, str]] = {}
    alone = []
    for name in folder.named(".csv", ".tsv")[:_HEADS]:
        head, split = folder.head(name).partition(b"\n")[0], split_of(name)
        if split and split not in groups.setdefault(head, {}):
            groups[head][split] = name
        else:
            alone.append([name])
    order = ("train", "validation", "test")
    joined = [[group[s] for s in order if s in group] for group in groups.values() if group]
    whole = [names for names in joined if split_of(names[0]) == "train"]
    return [*whole, *([name] for names in joined if names not in whole for name in names), *alone]


def _table(
    folder: Folder,
    images: list[str],
    finder: annotations.Photos,
    tables: Sequence[str],
    has_classes: bool,
) -> DatasetFormat | None:
    """Tables with a class for most images; None if the class folders give the same classes."""
    texts, name = {folder.full(table): folder.text(table) for table in tables}, " and ".join(tables)
    path = " and ".join(texts)
    try:
        content = annotations.parse_all(texts, finder, guess=not has_classes)
    except SourceError:  # of another kind of table
        return None
    trained = [name for name in images if split_of(name, outermost=True) in ("", "train")]
    named = {images[i] for row in content.rows for i in row.photos}
    if sum(name not in named for name in trained) > len(named):
        return None
    rows = [
        (images[row.photos[0]], row.labels)
        for row in content.rows
        if len(row.photos) == 1 and row.labels is not None
    ]
    labels, folders = dict(rows), {name: os.path.dirname(name) for name in named}
    top = folder.full(os.path.commonpath(folders.values()))
    flags = ["--layout=folder", f"--train={top}", *(f"--labels={table}" for table in texts)]
    flags += [f"--file_column={content.file}"]
    if not (form := content.form):
        flags.append(f"--label_column={content.label}")
    elif form.kind == several.COLUMNS:  # which the preparation finds again
        flags.append(f"--several={form.kind}")
    else:
        flags += [f"--label_column={form.columns[0]}", f"--several={form.kind}"]
    if content.problem:
        command = f"{_COMMAND} {shlex.join([*flags[1:], '--out=DIR'])}"
        can_be = all(labels[image] == x and x[0][0] not in "[{" for image, x in rows) and rows
        way = f"; for {content.label} as the classes type {command}" if can_be else ""
        raise SourceError(f"{path} {content.problem}{way}")
    has_rows = form is not None and form.kind == several.ROWS
    if twice := [image for image, x in rows if labels[image] != x and not has_rows]:
        fix = "keep one row for each photo, or, if all are right, give --several=rows"
        raise SourceError(f"{path} has several classes of one photo, such as {twice[0]}: {fix}")
    if len(labels) < len(rows) and not has_rows:
        return None
    if sum(name not in labels for name in trained) > len(labels):
        return None
    pairs = {(os.path.basename(folders[image]), x) for image, names in rows for x in names}
    classes, names = {x for _, x in pairs}, {name for name, _ in pairs}
    if len(classes) < 2 or (has_classes and len(pairs) == len(names) == len(classes)):
        return None
    noun = "labels" if content.has_several else "classes"
    evidence = f"{len(labels):,} images and {name} (columns {content.file}, {content.label})"
    if content.has_several:
        evidence = f"{len(labels):,} images and {name}: several of {len(classes):,} labels each"
        evidence += f" ({form})"
    elif form:
        evidence = f"{len(labels):,} images and {name} (columns {content.file}, "
        evidence += f"{some(form.columns)}), exactly one label each: {len(classes):,} classes"
    else:
        evidence += f": {len(classes):,} classes"
    output = f"records of these {noun}, {content.note or 'a tenth of each for validation'}"
    return DatasetFormat("imagenet", "csv", evidence, output, flags, len(labels))

"""Copies a folder of records into a job's input folder; interrupted, it goes on where it was."""

from __future__ import annotations

import os
import re
import shutil
from concurrent import futures

from errors import one_line
from scripts import console
from scripts.job.folder import THREADS, BucketFolder, FolderError, Item, LocalFolder

# What configs/resnet50.py reads, and what scripts/prepare_imagenet.py says about it.
_RECORDS = r"(train/)?train-[^/]+|(validation/)?validation-[^/]+|manifest\.json"

Folder = LocalFolder | BucketFolder


def stage(source: Folder, target: Folder) -> None:
    """Copies the records; a file that is there in the same size is not copied again.

    Raises:
      FolderError: there are no records, or one cannot be copied.
    """
    if f"{_real(source)}/".startswith(f"{_real(target)}/"):
        raise FolderError(f"STAGE_FROM={source.path} is the input folder itself, or within it")
    if reason := target.not_ours():
        raise FolderError(f"cannot stage: {reason}")
    found = source.files()
    wanted = {name: item for name, item in found.items() if re.fullmatch(_RECORDS, name)}
    if not any(name.startswith("train") for name in wanted):
        raise FolderError(f"STAGE_FROM={source.path} holds no files train-*")
    there = target.files()
    sizes = {name: item.size for name, item in there.items()}
    missing = {name: item for name, item in wanted.items() if sizes.get(name) != item.size}
    others = len(found) - len(wanted)
    print(
        f"job: staging {len(missing)} of {len(wanted)} files from {source.path} into {target.path}"
        + (f"; {others} other files there are not records" if others else ""),
        flush=True,
    )
    if missing:
        _copy_all(source, target, missing)


def _copy_all(source: Folder, target: Folder, items: dict[str, Item]) -> None:
    size = sum(item.size for item in items.values())
    progress = console.Progress("staging", len(items), "files", size)

    def copy(name: str) -> None:
        _copy(source, target, name, items[name].size)
        progress.add(1, items[name].size)

    # The manifest comes last: it describes files that are all there.
    with futures.ThreadPoolExecutor(THREADS) as pool:
        tasks = {pool.submit(copy, name): name for name in items if name != "manifest.json"}
        for task in futures.as_completed(tasks):
            try:
                task.result()
            except Exception as error:  # of a disk, or of one of three libraries
                pool.shutdown(wait=False, cancel_futures=True)
                name = f"{source.path}/{tasks[task]}"
                raise FolderError(f"cannot stage {name}: {one_line(error)}") from error
    if "manifest.json" in items:
        try:
            copy("manifest.json")
        except Exception as error:
            name = f"{source.path}/manifest.json"
            raise FolderError(f"cannot stage {name}: {one_line(error)}") from error
    progress.close()


def _copy(source: Folder, target: Folder, name: str, size: int) -> None:
    """Copies one file, which appears in the target when it is complete."""
    if isinstance(target, BucketFolder):
        from google.cloud.storage.retry import DEFAULT_RETRY

        to = target.blob(name)
        if isinstance(source, BucketFolder):
            token, origin = None, source.blob(name)
            while True:  # within Google's service; a large object takes several requests
                token, _, _ = to.rewrite(origin, token=token, retry=DEFAULT_RETRY)
                if token is None:
                    return
        to.upload_from_filename(os.path.join(source.path, name), retry=DEFAULT_RETRY)
        return
    path = os.path.join(target.path, name)
    folder, last = os.path.split(path)
    part = os.path.join(folder, f".staging.{last}")  # readers' train-* does not match it
    os.makedirs(folder, exist_ok=True)
    if isinstance(source, BucketFolder):
        source.blob(name).download_to_filename(part)
    else:
        shutil.copyfile(os.path.join(source.path, name), part)
    if os.path.getsize(part) != size:
        raise OSError(f"{os.path.getsize(part)} bytes came, not {size}: did it change meanwhile?")
    os.replace(part, path)


def _real(folder: Folder) -> str:
    return os.path.realpath(folder.path) if isinstance(folder, LocalFolder) else folder.path

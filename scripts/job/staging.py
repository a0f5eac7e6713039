"""Copies the data of a benchmark into a job's input folder, and continues an interrupted copy."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Sequence
from concurrent import futures

from common import console
from common.data.files import MANIFEST
from common.errors import UserError, one_line
from scripts.job.folder import THREADS, BucketFolder, Item, LocalFolder

Folder = LocalFolder | BucketFolder


def stage(source: Folder, target: Folder, groups: Sequence[Sequence[str]]) -> None:
    """Copies the benchmark's files, unless the target has a file of the same name and size.

    Args:
      source: the folder of the data.
      target: the input folder of the job.
      groups: the patterns of `benchmarks.mlperf.Entry.files`; a file must match the first group.

    Raises:
      UserError: the source has no data, or a file cannot be copied.
    """
    if f"{_real(source)}/".startswith(f"{_real(target)}/"):
        raise UserError(f"STAGE_FROM={source.path} is the input folder itself, or a folder in it")
    if reason := target.why_foreign():
        raise UserError(f"cannot stage: {reason}")
    files, existing = source.files(), target.files()
    patterns = [pattern for group in groups for pattern in group]
    needed = {k: item for k, item in files.items() if k == MANIFEST or _matches(k, patterns)}
    if not any(_matches(name, groups[0]) for name in needed):
        raise UserError(f"STAGE_FROM={source.path} holds no files {' or '.join(groups[0])}")
    sizes = {name: item.size for name, item in existing.items()}
    missing = {name: item for name, item in needed.items() if sizes.get(name) != item.size}
    others = len(files) - len(needed)
    print(
        f"job: staging {len(missing)} of {len(needed)} files from {source.path} into {target.path}"
        + (f"; {others} other files there are not the benchmark's data" if others else ""),
        flush=True,
    )
    # The manifest comes last: it describes complete files.
    indexes = {name: item for name, item in missing.items() if name == MANIFEST}
    rest = {name: item for name, item in missing.items() if name not in indexes}
    if missing:
        progress = console.ProgressBar(
            "staging", len(missing), "files", sum(item.size for item in missing.values())
        )
        for items in (rest, indexes):
            _copy_all(source, target, items, progress)
        progress.close()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a path matches a pattern, whose asterisks match no slash."""
    folder, file = os.path.split(name)
    parts = map(os.path.split, patterns)
    return any(folder == p and fnmatch.fnmatchcase(file, pattern) for p, pattern in parts)


def _copy_all(
    source: Folder, target: Folder, items: dict[str, Item], progress: console.ProgressBar
) -> None:
    def copy(name: str) -> None:
        _copy(source, target, name, items[name].size)
        progress.add(1, items[name].size)

    with futures.ThreadPoolExecutor(THREADS) as pool:
        tasks = {pool.submit(copy, name): name for name in items}
        for task in futures.as_completed(tasks):
            try:
                task.result()
            except Exception as error:  # of a disk, or of one of three libraries
                pool.shutdown(wait=False, cancel_futures=True)
                path = f"{source.path}/{tasks[task]}"
                raise UserError(f"cannot stage {path}: {one_line(error)}") from error


def _copy(source: Folder, target: Folder, name: str, size: int) -> None:
    """Copies one file, which appears in the target only when it is complete."""
    if isinstance(target, BucketFolder):
        from google.cloud.storage.retry import DEFAULT_RETRY

        to = target.blob(name)
        if isinstance(source, BucketFolder):
            token, origin = None, source.blob(name)
            while True:  # Google copies it; a large object takes several requests
                token, _, _ = to.rewrite(origin, token=token, retry=DEFAULT_RETRY)
                if token is None:
                    return
        to.upload_from_filename(os.path.join(source.path, name), retry=DEFAULT_RETRY)
        return
    path = os.path.join(target.path, name)
    folder, last = os.path.split(path)
    part = os.path.join(folder, f".staging.{last}")  # does not match the readers' train-*
    os.makedirs(folder, exist_ok=True)
    if isinstance(source, BucketFolder):
        source.blob(name).download_to_filename(part)
    else:
        shutil.copyfile(os.path.join(source.path, name), part)
    if os.path.getsize(part) != size:
        arrived = os.path.getsize(part)
        raise OSError(f"{arrived} bytes arrived, not {size}: did the file change meanwhile?")
    os.replace(part, path)


def _real(folder: Folder) -> str:
    return os.path.realpath(folder.path) if isinstance(folder, LocalFolder) else folder.path

"""Lists, reads, writes and deletes the files of a folder on disk or on gs://.

On gs:// it uses Google's own client, because TensorFlow's file system shows folders that do not
exist and joins names in ways that lose some objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import warnings
from collections.abc import Iterator
from concurrent import futures
from typing import Any

from common.errors import UserError, one_line, parse_json

THREADS = 8  # the client's pool has 10 connections and closes any further one


@dataclasses.dataclass(frozen=True)
class Item:
    """The size of a file or object in bytes, and a version that changes with every write."""

    size: int
    version: str


def open_folder(path: str) -> LocalFolder | BucketFolder:
    """Returns the folder at an absolute path or at gs://BUCKET[/FOLDER]; it need not exist.

    Raises:
      UserError: the path has another form, or it is a file.
    """
    if path.startswith("gs://"):
        match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]+)((?:/[^/]+)*)/?", path)
        if not match or {".", ".."} & set(match[2].split("/")):
            raise UserError(f"{path} is no place: it must be gs://BUCKET or gs://BUCKET/FOLDER")
        return BucketFolder(match[1], match[2][1:])
    if not os.path.isabs(path):
        raise UserError(f"{path!r} is no place: it must be gs://BUCKET/FOLDER or begin with /")
    if os.path.lexists(path) and not os.path.isdir(path):
        raise UserError(f"{path} is not a folder")
    return LocalFolder(os.path.normpath(path))


class LocalFolder:
    """A folder on disk."""

    def __init__(self, path: str):
        self.path = path

    def sub(self, name: str) -> LocalFolder:
        """Returns the folder `name` in this folder."""
        return LocalFolder(os.path.join(self.path, name))

    def files(self) -> dict[str, Item]:
        """Returns all files below, by their paths relative to the folder; does not follow links."""
        with _in_one_line(f"cannot list {self.path}"):
            return {name: _item(os.path.join(self.path, name)) for name in self._names()}

    def why_foreign(self) -> str:
        """Returns why a job must not write or delete in this folder; "" if it may."""
        if os.path.islink(self.path):
            return f"{self.path} is a symbolic link"
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            return f"{self.path} is not a folder"
        real = os.path.realpath(self.path)
        inside = [m for m in _mounts() if m == real or m.startswith(real + "/")]
        return f"{inside[0]} is a mounted file system" if inside else ""

    def delete(self, items: dict[str, Item]) -> list[str]:
        """Deletes unchanged files and then empty folders; returns the names of changed files."""
        changed = []
        with _in_one_line(f"cannot delete in {self.path}"):
            for name, item in items.items():
                path = os.path.join(self.path, name)
                with contextlib.suppress(FileNotFoundError):
                    if _item(path) != item:
                        changed.append(name)
                    else:
                        os.unlink(path)
            for folder, _, _ in os.walk(self.path, topdown=False):
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(folder)
        return changed

    def read(self, name: str) -> Any:
        """Returns the JSON document `name`; None if it is missing or not JSON."""
        with _in_one_line(f"cannot read {name} in {self.path}"):
            try:
                with open(os.path.join(self.path, name)) as file:
                    return _parsed(file.read())
            except FileNotFoundError:
                return None

    def write(self, name: str, content: Any) -> None:
        """Writes the JSON document `name` completely or not at all."""
        path = os.path.join(self.path, name)
        with _in_one_line(f"cannot write {path}"):
            os.makedirs(self.path, exist_ok=True)
            with open(f"{path}.part", "w") as file:
                file.write(json.dumps(content, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.part", path)

    def _names(self) -> Iterator[str]:
        def fail(error: OSError) -> None:
            raise error

        if not os.path.lexists(self.path):
            return
        for folder, folders, names in os.walk(self.path, onerror=fail):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            for name in [*names, *links]:
                yield os.path.relpath(os.path.join(folder, name), self.path)


class BucketFolder:
    """The objects of a bucket whose names begin with FOLDER/, or all objects without FOLDER."""

    def __init__(self, bucket: str, folder: str):
        self.path = f"gs://{bucket}/{folder}".rstrip("/")
        self._bucket, self._prefix = bucket, folder and folder + "/"

    def sub(self, name: str) -> BucketFolder:
        """Returns the folder `name` in this folder."""
        return BucketFolder(self._bucket, self._prefix + name)

    def files(self) -> dict[str, Item]:
        """Returns all objects, by their names relative to the folder.

        An object with the name "" is one that some tools write to mark a folder.
        """
        fields = "items(name,size,generation),nextPageToken"
        with _in_one_line(f"cannot list {self.path}"):
            blobs = self.bucket.list_blobs(prefix=self._prefix, fields=fields)
            return {
                blob.name.removeprefix(self._prefix): Item(blob.size, str(blob.generation))
                for blob in blobs
            }

    def why_foreign(self) -> str:
        """Returns "", because gs:// has no links."""
        return ""

    def delete(self, items: dict[str, Item]) -> list[str]:
        """Deletes unchanged objects by their full names; returns the names of changed objects."""
        from google.api_core import exceptions
        from google.cloud.storage.retry import DEFAULT_RETRY

        bucket = self.bucket

        def is_changed(name: str) -> bool:
            """Deletes one object; returns whether it was left because it has changed."""
            blob, generation = bucket.blob(self._prefix + name), int(items[name].version)
            try:
                blob.delete(if_generation_match=generation, retry=DEFAULT_RETRY)
            except exceptions.PreconditionFailed:
                return True
            except exceptions.NotFound:
                pass
            return False

        action = f"cannot delete in {self.path}"
        with _in_one_line(action), futures.ThreadPoolExecutor(THREADS) as pool:
            changes = zip(items, pool.map(is_changed, items), strict=True)
            return [name for name, changed in changes if changed]

    def read(self, name: str) -> Any:
        """Returns the JSON document `name`; None if it is missing or not JSON."""
        from google.api_core import exceptions

        with _in_one_line(f"cannot read {self.path}/{name}"):
            try:
                return _parsed(self.blob(name).download_as_text())
            except exceptions.NotFound:
                return None

    def write(self, name: str, content: Any) -> None:
        """Writes the JSON document `name`; an object appears when it is complete."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        text = json.dumps(content, indent=2) + "\n"
        with _in_one_line(f"cannot write {self.path}/{name}"):
            self.blob(name).upload_from_string(text, "application/json", retry=DEFAULT_RETRY)

    def blob(self, name: str) -> Any:
        """The client's handle of an object in this folder."""
        return self.bucket.blob(self._prefix + name)

    @property
    def bucket(self) -> Any:
        """The client's handle of the bucket."""
        return _client().bucket(self._bucket)


@functools.cache
def _client() -> Any:
    with warnings.catch_warnings(action="ignore"):  # about packages that only gRPC needs
        from google.cloud import storage
    return storage.Client()


@contextlib.contextmanager
def _in_one_line(action: str) -> Iterator[None]:
    """Turns the exceptions of disks and of Google's client into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the client raises the exceptions of three libraries
        raise UserError(f"{action}: {one_line(error)}") from error


def _item(path: str) -> Item:
    status = os.lstat(path)
    return Item(status.st_size, f"{status.st_ino}-{status.st_mtime_ns}")


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _mounts(table: str = "/proc/self/mountinfo") -> list[str]:
    """The paths of mounted file systems; [] on systems without such a table."""
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as file:
            points = [line.split()[4] for line in file]
    except OSError:
        return []
    return [re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), p) for p in points]

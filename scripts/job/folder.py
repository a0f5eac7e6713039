"""A folder on disk or on gs:// as a job sees it: list, read, write, and delete what was listed.

gs:// goes through Google's own client. TensorFlow's file system knows folders there, which do not
exist, and joins names in ways that not every object survives.
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

from errors import one_line

THREADS = 8  # more than the client's pool of 10 connections would be thrown away


class FolderError(RuntimeError):
    """A folder cannot be used; the message is one line: which and why."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A file or object: bytes, and what changes when it is written again."""

    size: int
    version: str


@dataclasses.dataclass(frozen=True)
class Deleted:
    """What `delete` has done: files, their bytes, and names that had changed and were left."""

    files: int
    bytes: int
    left: list[str]


def open_folder(path: str) -> LocalFolder | BucketFolder:
    """The folder at an absolute local path or at gs://BUCKET[/FOLDER]; it need not exist.

    Raises:
      FolderError: the path is neither.
    """
    if path.startswith("gs://"):
        match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]+)((?:/[^/]+)*)/?", path)
        if not match or {".", ".."} & set(match[2].split("/")):
            raise FolderError(f"{path} is no place: it must be gs://BUCKET or gs://BUCKET/FOLDER")
        return BucketFolder(match[1], match[2][1:])
    if not os.path.isabs(path):
        raise FolderError(f"{path!r} is no place: it must be gs://BUCKET/FOLDER or begin with /")
    if os.path.lexists(path) and not os.path.isdir(path):
        raise FolderError(f"{path} is not a folder")
    return LocalFolder(os.path.normpath(path))


class LocalFolder:
    """A folder on disk."""

    def __init__(self, path: str):
        self.path = path

    def sub(self, name: str) -> LocalFolder:
        """The folder `name` in this one."""
        return LocalFolder(os.path.join(self.path, name))

    def files(self) -> dict[str, Item]:
        """Everything below that is not a folder, by its path in here; links are not followed."""
        found = {}
        with _told(f"cannot list {self.path}"):
            for name in self._names():
                found[name] = _item(os.path.join(self.path, name))
        return found

    def not_ours(self) -> str:
        """Why this folder must not be deleted though it has the right name; "" if it may."""
        if os.path.islink(self.path):
            return f"{self.path} is a symbolic link"
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            return f"{self.path} is not a folder"
        real = os.path.realpath(self.path)
        inside = [m for m in _mounts() if m == real or m.startswith(real + "/")]
        return f"{inside[0]} is a mounted file system" if inside else ""

    def delete(self, items: dict[str, Item]) -> Deleted:
        """Deletes these, if unchanged, and the folders, this one included, that are then empty."""
        size, left = 0, []
        with _told(f"cannot delete in {self.path}"):
            for name, item in items.items():
                path = os.path.join(self.path, name)
                with contextlib.suppress(FileNotFoundError):
                    if _item(path) != item:
                        left.append(name)
                        continue
                    os.unlink(path)
                size += item.size
            for folder, _, _ in os.walk(self.path, topdown=False):
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(folder)
        return Deleted(len(items) - len(left), size, left)

    def read(self, name: str) -> Any:
        """The JSON document `name`; None if there is none that can be read as JSON."""
        with _told(f"cannot read {name} in {self.path}"):
            try:
                with open(os.path.join(self.path, name)) as file:
                    return _parsed(file.read())
            except FileNotFoundError:
                return None

    def write(self, name: str, content: Any) -> None:
        """Writes the JSON document `name`, whole or not at all."""
        path = os.path.join(self.path, name)
        with _told(f"cannot write {path}"):
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
        for folder, folders, files in os.walk(self.path, onerror=fail):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            for name in [*files, *links]:
                yield os.path.relpath(os.path.join(folder, name), self.path)


class BucketFolder:
    """Objects of a bucket whose names begin with FOLDER/; all of the bucket if that is empty."""

    def __init__(self, bucket: str, folder: str):
        self.path = f"gs://{bucket}/{folder}".rstrip("/")
        self._bucket, self._prefix = bucket, folder and folder + "/"

    def sub(self, name: str) -> BucketFolder:
        """The folder `name` in this one."""
        return BucketFolder(self._bucket, self._prefix + name)

    def files(self) -> dict[str, Item]:
        """Every object, by its name in here; "" is the marker that some tools make of a folder."""
        fields = "items(name,size,generation),nextPageToken"
        with _told(f"cannot list {self.path}"):
            found = self.bucket.list_blobs(prefix=self._prefix, fields=fields)
            return {
                blob.name.removeprefix(self._prefix): Item(blob.size, str(blob.generation))
                for blob in found
            }

    def not_ours(self) -> str:
        """Nothing on gs:// is a link."""
        return ""

    def delete(self, items: dict[str, Item]) -> Deleted:
        """Deletes these objects, each by its full name and only if it is still the one listed."""
        from google.api_core import exceptions
        from google.cloud.storage.retry import DEFAULT_RETRY

        bucket = self.bucket

        def delete(name: str) -> bool:
            blob, generation = bucket.blob(self._prefix + name), int(items[name].version)
            try:
                blob.delete(if_generation_match=generation, retry=DEFAULT_RETRY)
            except exceptions.NotFound:
                pass
            except exceptions.PreconditionFailed:
                return False
            return True

        with _told(f"cannot delete in {self.path}"), futures.ThreadPoolExecutor(THREADS) as pool:
            done = dict(zip(items, pool.map(delete, items), strict=True))
        size = sum(items[name].size for name, gone in done.items() if gone)
        return Deleted(sum(done.values()), size, [name for name, gone in done.items() if not gone])

    def read(self, name: str) -> Any:
        """The JSON document `name`; None if there is none that can be read as JSON."""
        from google.api_core import exceptions

        with _told(f"cannot read {self.path}/{name}"):
            try:
                return _parsed(self.blob(name).download_as_text())
            except exceptions.NotFound:
                return None

    def write(self, name: str, content: Any) -> None:
        """Writes the JSON document `name`; an object appears whole or not at all."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        text = json.dumps(content, indent=2) + "\n"
        with _told(f"cannot write {self.path}/{name}"):
            self.blob(name).upload_from_string(text, "application/json", retry=DEFAULT_RETRY)

    def blob(self, name: str) -> Any:
        """The client's handle of an object in here."""
        return self.bucket.blob(self._prefix + name)

    @property
    def bucket(self) -> Any:
        """The client's handle of the bucket."""
        return _client().bucket(self._bucket)


@functools.cache
def _client() -> Any:
    with warnings.catch_warnings(action="ignore"):  # of what only gRPC needs
        from google.cloud import storage
    return storage.Client()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns whatever a disk or Google's client raises into one line."""
    try:
        yield
    except FolderError:
        raise
    except Exception as error:  # the client lets those of three libraries through
        raise FolderError(f"{what}: {one_line(error)}") from error


def _item(path: str) -> Item:
    found = os.lstat(path)
    return Item(found.st_size, f"{found.st_ino}-{found.st_mtime_ns}")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _mounts(table: str = "/proc/self/mountinfo") -> list[str]:
    """Where file systems are mounted; [] where the system does not say."""
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as file:
            points = [line.split()[4] for line in file]
    except OSError:
        return []
    return [re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), p) for p in points]

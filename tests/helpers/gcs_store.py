"""Buckets, objects, permissions and faults of the stand-in for Google Cloud Storage."""

import base64
import dataclasses
import hashlib
import re
import threading
import time
from typing import Any

EMAIL = "tpu-vm@project.iam.gserviceaccount.com"
PAGE = 1000  # names in a page of a listing

# What each mode of a bucket permits. "objects" is roles/storage.objectAdmin: no buckets.get.
_READ = {"storage.objects.get", "storage.objects.list"}
_WRITE = {"storage.objects.create", "storage.objects.delete"}
MODES = {
    "none": set(),
    "read": _READ | {"storage.buckets.get"},
    "objects": _READ | _WRITE,
    "full": _READ | _WRITE | {"storage.buckets.get"},
}


class Refused(Exception):
    """An answer that is not a success."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Cut(Exception):
    """The connection ends here, without a farewell."""


@dataclasses.dataclass
class Object:
    """One generation of an object."""

    data: bytes
    generation: int
    content_type: str = "application/octet-stream"
    updated: str = dataclasses.field(
        default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    )

    def resource(self, bucket: str, name: str) -> dict[str, Any]:
        """Its metadata as the JSON API shows it."""
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{self.generation}",
            "name": name,
            "bucket": bucket,
            "generation": str(self.generation),
            "metageneration": "1",
            "contentType": self.content_type,
            "storageClass": "STANDARD",
            "size": str(len(self.data)),
            "md5Hash": base64.b64encode(hashlib.md5(self.data).digest()).decode(),
            "etag": f"etag-{self.generation}",
            "timeCreated": self.updated,
            "updated": self.updated,
        }


@dataclasses.dataclass
class Fault:
    """What goes wrong with requests whose "METHOD /path?query" (unquoted) match `pattern`."""

    pattern: str
    times: int = 1  # how often; -1 always
    skip: int = 0  # after so many requests that went well
    status: int = 0  # answer this instead
    delay: float = 0.0  # seconds before it is done; never done when the faults are cleared earlier
    reset: bool = False  # end the connection before anything is done
    cut_request: int = -1  # end it after so many bytes of the body
    cut_response: int = -1  # the same of the answer
    lose_response: bool = False  # do it, and never say so
    hits: int = 0
    seen: int = 0
    cleared: threading.Event = dataclasses.field(default_factory=threading.Event)

    def wait(self, seconds: float) -> None:
        """Waits; raises Cut if the faults are cleared meanwhile."""
        if seconds and self.cleared.wait(seconds):
            raise Cut


NO_FAULT = Fault("")


class Store:
    """Buckets, modes, uploads under way, faults and the log; every method takes the lock."""

    def __init__(self):
        self.lock = threading.RLock()
        self.generation = 1_700_000_000_000_000
        self.faults: list[Fault] = []
        self.reset()

    def reset(self) -> None:
        """Forgets everything; requests that a fault holds are cut."""
        with self.lock:
            self.clear_faults()
            self.buckets: dict[str, dict[str, Object]] = {}
            self.modes: dict[str, str] = {}
            self.uploads: dict[str, dict[str, Any]] = {}
            self.log: list[tuple[str, int, str]] = []

    def clear_faults(self, pattern: str = "") -> None:
        """Ends the faults with this pattern, or all; requests that they hold are cut."""
        with self.lock:
            ended = [fault for fault in self.faults if pattern in ("", fault.pattern)]
            for fault in ended:
                fault.cleared.set()
            self.faults = [fault for fault in self.faults if fault not in ended]

    def fault(self, request: str) -> Fault:
        """The first fault that is due for a request."""
        with self.lock:
            for fault in self.faults:
                if re.search(fault.pattern, request):
                    fault.seen += 1
                    if fault.seen > fault.skip and fault.hits != fault.times:
                        fault.hits += 1
                        return fault
        return NO_FAULT

    def bucket(self, name: str, permission: str, item: str = "") -> dict[str, Object]:
        """A bucket's objects, if it is there and the mode permits it."""
        if name not in self.buckets:
            raise Refused(404, "The specified bucket does not exist.")
        if permission not in MODES[self.modes[name]]:
            what = "object" if item else "bucket"
            raise Refused(
                403,
                f"{EMAIL} does not have {permission} access to the Google Cloud Storage {what}. "
                f"Permission '{permission}' denied on resource (or it may not exist).",
            )
        return self.buckets[name]

    def find(self, bucket: str, name: str, query: dict[str, str]) -> Object:
        with self.lock:
            stored = self.bucket(bucket, "storage.objects.get", name).get(name)
            if stored is None:
                raise Refused(404, f"No such object: {bucket}/{name}")
            _check_generation(stored, query)
            return stored

    def put(self, bucket: str, name: str, data: bytes, kind: str, query: dict[str, str]) -> Object:
        with self.lock:
            objects = self.bucket(bucket, "storage.objects.create", name)
            if name in objects:
                self.bucket(bucket, "storage.objects.delete", name)
            _check_generation(objects.get(name), query)
            self.generation += 1
            objects[name] = Object(data, self.generation, kind)
            return objects[name]

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        with self.lock:
            objects = self.bucket(bucket, "storage.objects.delete", name)
            if name not in objects:
                raise Refused(404, f"No such object: {bucket}/{name}")
            _check_generation(objects[name], query)
            del objects[name]

    def listing(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        begin, end = query.get("startOffset", ""), query.get("endOffset", "")
        after, most = query.get("pageToken", ""), int(query.get("maxResults", PAGE))
        items: list[dict[str, Any]] = []
        prefixes: list[str] = []
        with self.lock:
            for name, stored in sorted(self.bucket(bucket, "storage.objects.list").items()):
                if not name.startswith(prefix) or name < begin or (end and name >= end):
                    continue
                head, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
                group = prefix + head + cut if delimiter and cut else ""
                key = group or name
                if (after and key <= after) or group in prefixes[-1:]:
                    continue
                if len(items) + len(prefixes) == min(most, PAGE):
                    last = max([i["name"] for i in items[-1:]] + prefixes[-1:])
                    return {"items": items, "prefixes": prefixes, "nextPageToken": last}
                if group:
                    prefixes.append(group)
                else:
                    items.append(stored.resource(bucket, name))
        return {"kind": "storage#objects", "items": items, "prefixes": prefixes}


def _check_generation(stored: Object | None, query: dict[str, str]) -> None:
    have = str(stored.generation) if stored else "0"
    if query.get("ifGenerationMatch", have) != have:
        raise Refused(412, "At least one of the pre-conditions you specified did not hold.")
    if query.get("ifGenerationNotMatch") == have:
        raise Refused(304, "Not Modified")

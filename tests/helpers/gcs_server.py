"""A stand-in for Google Cloud Storage and the metadata server of a TPU VM, on one loopback port.

    python gcs_server.py FOLDER      writes FOLDER/ca.pem and prints its port

Clients keep their production addresses and reach it as their HTTPS proxy: `CONNECT` to a host of
googleapis.com ends here, in TLS with a throw-away authority; any other host is refused, so that
no test can leak. What is modelled is what TensorFlow, TensorStore and google-cloud-storage were
seen to ask for. A process of its own, because TensorFlow holds the interpreter's lock in places
while it waits for an answer. It ends when its standard input does.
"""

import http.server
import json
import os
import re
import socket
import ssl
import struct
import sys
import threading
import urllib.parse
from typing import Any

import trustme

from tests.helpers.gcs_store import EMAIL, NO_FAULT, Cut, Fault, Object, Refused, Store

TOKEN = "token-of-the-metadata-server"
CHUNK = 256 << 10  # an interrupted resumable upload keeps whole ones

STORE = Store()


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection: a proxy's client, a metadata client or the tests themselves."""

    protocol_version = "HTTP/1.1"
    tls: ssl.SSLContext
    host = ""  # once inside a CONNECT

    def setup(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().setup()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_CONNECT(self) -> None:
        host, _, port = self.path.partition(":")
        if not host.endswith(".googleapis.com") or port != "443":
            STORE.log.append((f"CONNECT {self.path}", 403, ""))
            self.send_error(403, "tests reach nothing but googleapis.com")
            self.close_connection = True
            return
        self.send_response(200, "Connection established")
        self.end_headers()
        self.host = host
        try:
            fault = STORE.fault(f"CONNECT {self.path}")
            fault.wait(fault.delay)
            self.connection = self.tls.wrap_socket(self.connection, server_side=True)
        except (Cut, OSError):
            self.close_connection = True
            return
        self.rfile = self.connection.makefile("rb", -1)
        self.wfile = self.connection.makefile("wb", 0)
        self.close_connection = False

    def do_any(self) -> None:
        self.fault, self.body = NO_FAULT, b""
        request = f"{self.command} {urllib.parse.unquote(self.path)}"
        try:
            if self.path.startswith("/_fake/"):
                self._read_body()
                self._answer(*self._control())
                return
            self.fault = STORE.fault(request)
            status, headers, body = self._serve()
            STORE.log.append((request, status, self.headers.get("User-Agent", "")))
            if self.fault.lose_response:
                raise Cut
            self._answer(status, headers, body)
        except (Cut, OSError):
            STORE.log.append((request, 0, self.headers.get("User-Agent", "")))
            self._cut()

    do_GET = do_POST = do_PUT = do_DELETE = do_any

    # Bytes.

    def _serve(self) -> tuple[int, dict[str, str], bytes]:
        try:
            if self.fault.reset:
                raise Cut
            self._read_body(self.fault.cut_request)
            self.fault.wait(self.fault.delay)
            if self.fault.status:
                raise Refused(self.fault.status, "The service says so because a test wants it.")
            if self.host:
                return self._google()
            return self._metadata()
        except Refused as error:
            if error.status == 304:
                return 304, {}, b""
            if "/storage/v1/" not in self.path:  # the XML API
                error_body = f"<Error><Code>Code</Code><Message>{error}</Message></Error>"
                headers = {"Content-Type": "application/xml; charset=UTF-8"}
                return error.status, headers, f"<?xml version='1.0'?>{error_body}".encode()
            error_body = {"message": str(error), "domain": "global", "reason": "reason"}
            return _json(
                {"error": {"code": error.status, **error_body, "errors": [error_body]}},
                error.status,
            )

    def _read_body(self, most: int = -1) -> None:
        """Reads the body into `self.body`; Cut, with what came so far, if it does not end.

        TensorFlow sends both lengths with an upload; "chunked" is the one that counts. With its
        empty requests it sends "Transfer-Encoding: identity".
        """
        try:
            if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
                while length := int(self.rfile.readline().split(b";")[0], 16):
                    self._read(length, most)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
            else:
                self._read(int(self.headers.get("Content-Length", 0)), most)
        except (Cut, OSError, ValueError):
            if "upload_id=" in self.path:
                query = dict(urllib.parse.parse_qsl(self.path.partition("?")[2]))
                upload = STORE.uploads[query["upload_id"]]
                upload["data"] += self.body[: len(self.body) // CHUNK * CHUNK]
            raise Cut from None

    def _read(self, length: int, most: int) -> None:
        while length:
            wanted = length if most < 0 else min(length, most - len(self.body))
            part = self.rfile.read1(min(wanted, CHUNK)) if wanted else b""
            if not part:
                raise Cut
            self.body += part
            length -= len(part)

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.fault.cut_response >= 0:
            self.wfile.write(body[: self.fault.cut_response])
            raise Cut
        self.wfile.write(body)

    def _cut(self) -> None:
        """Ends the connection with a reset."""
        self.close_connection = True
        try:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            os.close(self.connection.detach())
        except OSError:
            pass  # the client was faster

    # The tests' own door.

    def _control(self) -> tuple[int, dict[str, str], bytes]:
        door, _, rest = self.path.removeprefix("/_fake/").partition("/")
        if door == "objects":
            bucket, _, name = urllib.parse.unquote(rest).partition("/")
            with STORE.lock:
                if self.command == "PUT":
                    STORE.generation += 1
                    STORE.buckets[bucket][name] = Object(self.body, STORE.generation)
                elif self.command == "DELETE":
                    del STORE.buckets[bucket][name]
                return 200, {}, STORE.buckets[bucket][name].data if self.command == "GET" else b""
        given = json.loads(self.body) if self.body else None
        with STORE.lock:
            if door == "reset":
                STORE.reset()
            elif door == "modes" and given:
                STORE.modes.update(given)
                for bucket in given:
                    STORE.buckets.setdefault(bucket, {})
            elif door == "faults" and self.command == "DELETE":
                STORE.clear_faults(urllib.parse.unquote(rest))
            elif door == "faults" and given:
                STORE.faults.append(Fault(**given))
            answer: dict[str, Any] = {
                "buckets": {b: sorted(o) for b, o in STORE.buckets.items()},
                "log": STORE.log,
                "faults": [{"pattern": f.pattern, "hits": f.hits} for f in STORE.faults],
            }
            return _json(answer.get(door))

    # The metadata server.

    def _metadata(self) -> tuple[int, dict[str, str], bytes]:
        path, _, query = self.path.partition("?")
        flavor = {"Metadata-Flavor": "Google", "Content-Type": "application/text"}
        if path == "/":
            return 200, flavor, b"computeMetadata/\n"
        if self.headers.get("Metadata-Flavor") != "Google":
            raise Refused(403, "Missing Metadata-Flavor:Google header.")
        accounts = "/computeMetadata/v1/instance/service-accounts"
        scopes = ["https://www.googleapis.com/auth/cloud-platform"]
        account = {"aliases": ["default"], "email": EMAIL, "scopes": scopes}
        answer: Any = {
            f"{accounts}/default": account,
            f"{accounts}/{EMAIL}": account,
            "/computeMetadata/v1/project/project-id": "project",
            "/computeMetadata/v1/universe/universe-domain": "googleapis.com",
            "/computeMetadata/v1/universe/universe_domain": "googleapis.com",
        }.get(path.rstrip("/"))
        if path in (f"{accounts}/default/token", f"{accounts}/{EMAIL}/token"):
            answer = {"access_token": TOKEN, "expires_in": 3599, "token_type": "Bearer"}
        if answer is None:
            raise Refused(404, f"no {path}?{query}")
        if isinstance(answer, str):
            return 200, flavor, answer.encode()
        status, headers, body = _json(answer)
        return status, flavor | headers, body

    # The storage service.

    def _google(self) -> tuple[int, dict[str, str], bytes]:
        path, _, raw = self.path.partition("?")
        query = dict(urllib.parse.parse_qsl(raw, keep_blank_values=True))
        if self.host not in ("storage.googleapis.com", "www.googleapis.com"):
            raise Refused(404, f"{self.host} is not modelled")
        if "upload_id" not in query and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Anonymous caller does not have storage access.")
        parts = [urllib.parse.unquote(p) for p in path.strip("/").split("/")]
        if parts[:3] == ["upload", "storage", "v1"]:
            return self._upload(parts[4], query)
        if parts[:3] == ["download", "storage", "v1"]:
            return self._media(parts[4], "/".join(parts[6:]), query)
        if parts[:2] != ["storage", "v1"]:  # the XML API
            return self._media(parts[0], "/".join(parts[1:]), query)
        match parts[3:]:
            case [bucket]:
                with STORE.lock:
                    STORE.bucket(bucket, "storage.buckets.get")
                return _json({"kind": "storage#bucket", "name": bucket, "location": "US-CENTRAL1"})
            case [bucket, "storageLayout"]:
                with STORE.lock:
                    STORE.bucket(bucket, "storage.objects.list")
                return _json({"bucket": bucket, "hierarchicalNamespace": {"enabled": False}})
            case [bucket, "o"]:
                return _json(STORE.listing(bucket, query))
            case [bucket, "o", name]:
                if self.command == "DELETE":
                    STORE.delete(bucket, name, query)
                    return 204, {}, b""
                if query.get("alt") == "media":
                    return self._media(bucket, name, query)
                return _json(STORE.find(bucket, name, query).resource(bucket, name))
            case [bucket, "o", name, "rewriteTo", "b", target, "o", copy]:
                stored = STORE.find(bucket, name, {})
                made = STORE.put(target, copy, stored.data, stored.content_type, query)
                size = str(len(stored.data))
                done = {"done": True, "objectSize": size, "totalBytesRewritten": size}
                return _json({**done, "resource": made.resource(target, copy)})
        raise Refused(404, f"{self.command} {self.path} is not modelled")

    def _media(
        self, bucket: str, name: str, query: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        stored = STORE.find(bucket, name, query)
        headers = {
            "Content-Type": stored.content_type,
            "x-goog-generation": str(stored.generation),
            "ETag": f"etag-{stored.generation}",
        }
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not byte_range:
            return 200, headers, stored.data
        total = len(stored.data)
        first, last = int(byte_range[1]), min(int(byte_range[2] or total), total - 1)
        if first >= total:
            return 416, {"Content-Range": f"bytes */{total}"}, b""
        headers["Content-Range"] = f"bytes {first}-{last}/{total}"
        return 206, headers, stored.data[first : last + 1]

    def _upload(self, bucket: str, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        kind = self.headers.get("X-Upload-Content-Type") or self.headers.get("Content-Type", "")
        if self.command == "PUT":
            return self._continue(query["upload_id"])
        if query["uploadType"] == "multipart":
            whole = self.headers["Content-Type"]  # the other header is about the object
            boundary = whole.partition("boundary=")[2].strip("'\"").encode()
            about, content = (
                part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
                for part in self.body.split(b"--" + boundary)[1:3]
            )
            name = query.get("name") or json.loads(about)["name"]
            return _json(STORE.put(bucket, name, content, "", query).resource(bucket, name))
        name = query.get("name") or json.loads(self.body)["name"]
        if query["uploadType"] == "media":
            return _json(STORE.put(bucket, name, self.body, kind, query).resource(bucket, name))
        with STORE.lock:
            STORE.bucket(bucket, "storage.objects.create", name)
            number = str(len(STORE.uploads))
            STORE.uploads[number] = {"bucket": bucket, "name": name, "kind": kind, "data": b""}
        more = urllib.parse.urlencode({"name": name, "upload_id": number})
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&{more}"
        return 200, {"Location": f"https://{self.host}{path}"}, b""

    def _continue(self, number: str) -> tuple[int, dict[str, str], bytes]:
        """A part of a resumable upload, or with "bytes */N" the question how much has come."""
        with STORE.lock:
            if number not in STORE.uploads:
                raise Refused(404, "no such upload")
            upload = STORE.uploads[number]
            bucket, name = upload["bucket"], upload["name"]
            if "done" in upload:
                return _json(upload["done"])
            given = self.headers.get("Content-Range", "")
            span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", given)
            total: int | None = None
            if span:
                if int(span[1]) > len(upload["data"]):
                    raise Refused(503, "a part is missing")
                upload["data"] = upload["data"][: int(span[1])] + self.body
                total = None if span[3] == "*" else int(span[3])
            elif given:  # a question
                total = -1 if given.endswith("/*") else int(given.rpartition("/")[2])
            else:
                upload["data"], total = self.body, len(self.body)
            if len(upload["data"]) == total:
                made = STORE.put(bucket, name, upload.pop("data"), upload["kind"], {})
                upload["done"] = made.resource(bucket, name)
                return _json(upload["done"])
            have = len(upload["data"])
            return 308, {"Range": f"bytes=0-{have - 1}"} if have else {}, b""


_JSON = {"Content-Type": "application/json; charset=UTF-8"}


def _json(value: Any, status: int = 200) -> tuple[int, dict[str, str], bytes]:
    return status, _JSON, json.dumps(value, indent=2).encode()


class Server(http.server.ThreadingHTTPServer):
    """A thread for each connection."""

    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # clients come and go
            super().handle_error(request, client_address)


def main(folder: str) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(os.path.join(folder, "ca.pem"))
    Handler.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("*.googleapis.com").configure_cert(Handler.tls)
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])

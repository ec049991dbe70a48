"""Google Cloud Storage, as far as tensorstore and gcsfs use its JSON API, in the memory of a process
on the loopback interface: objects with generations, conditions on them, uploads of each kind, media
in ranges, lists by prefix and delimiter, and batches of deletions.

    python tests/lib/gcs_emulator.py 9005

It answers as googleapis/storage-testbench does, which is not on PyPI, but for two answers that are
those of Google's documentation: a deletion is answered by 204, and lists come in pages.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit
from urllib.request import Request, urlopen


class Object(NamedTuple):
    """One object: its bytes, its generation, and when it was written."""

    data: bytes
    generation: int
    updated: str


class Answer(NamedTuple):
    """What is sent back."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = MappingProxyType({})


class Objects:
    """The objects of all buckets, by the name of the bucket and their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], Object] = {}
        self._generation = time.time_ns() // 1000

    def get(self, bucket: str, name: str) -> Object | None:
        """An object; None if there is none."""
        return self._objects.get((bucket, name))

    def put(self, bucket: str, name: str, data: bytes, query: dict[str, str]) -> Answer:
        """Write an object, if the conditions hold."""
        with self._lock:
            if refused := _refused(self.get(bucket, name), query):
                return refused
            self._generation += 1
            now = datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00")
            written = Object(data, self._generation, f"{now}Z")
            self._objects[bucket, name] = written
        return answer_json(described(bucket, name, written))

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> Answer:
        """Delete an object, if the conditions hold."""
        with self._lock:
            if (found := self.get(bucket, name)) is None:
                return error(404, "Not Found")
            if refused := _refused(found, query):
                return refused
            del self._objects[bucket, name]
        return Answer(204)

    def names(self, bucket: str) -> list[str]:
        """The names of all objects of a bucket, sorted."""
        with self._lock:
            return sorted(name for one, name in self._objects if one == bucket)


def _refused(found: Object | None, query: dict[str, str]) -> Answer | None:
    """The answer if a condition does not hold."""
    generation = str(0 if found is None else found.generation)
    if query.get("ifGenerationMatch", generation) != generation:
        return error(412, "At least one of the pre-conditions you specified did not hold.")
    if query.get("ifGenerationNotMatch") == generation:
        return Answer(304)
    return None


def error(status: int, text: str) -> Answer:
    """An error, as the API describes it."""
    return answer_json({"error": {"code": status, "message": text}}, status)


def answer_json(value: Any, status: int = 200, **headers: str) -> Answer:
    """An answer with JSON."""
    kind = {"Content-Type": "application/json; charset=UTF-8"}
    return Answer(status, json.dumps(value).encode(), {**kind, **headers})


def described(bucket: str, name: str, found: Object) -> dict[str, Any]:
    """What the API says of an object."""
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{name}/{found.generation}",
        "bucket": bucket,
        "name": name,
        "size": str(len(found.data)),
        "generation": str(found.generation),
        "metageneration": "1",
        "contentType": "application/octet-stream",
        "md5Hash": b64encode(hashlib.md5(found.data).digest()).decode(),
        "timeCreated": found.updated,
        "updated": found.updated,
    }


def environment(port: int) -> dict[str, str]:
    """The variables by which tensorstore and gcsfs find what listens on a port."""
    url = f"http://127.0.0.1:{port}"
    return {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "STORAGE_EMULATOR_HOST": url,
        # Else gcsfs asks for the kind of the bucket, by another protocol and with credentials.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


class Separate(NamedTuple):
    """An emulator in a process of its own."""

    port: int
    process: "subprocess.Popen[bytes]"


def of_port(port: int) -> Separate:
    """An emulator in a process of its own, which answers."""
    process = subprocess.Popen([sys.executable, __file__, str(port)])
    until = time.monotonic() + 30
    while True:
        with socket.socket() as opened:
            if opened.connect_ex(("127.0.0.1", port)) == 0:
                return Separate(port, process)
        if time.monotonic() > until or process.poll() is not None:
            raise RuntimeError("the emulator does not run")
        time.sleep(0.02)


def _objects_url(bucket: str, kind: str = "") -> str:
    return f"{os.environ['STORAGE_EMULATOR_HOST']}{kind}/storage/v1/b/{bucket}/o"


def names(bucket: str, prefix: str) -> list[str]:
    """The names of objects, asked of the emulator that the environment has."""
    with urlopen(f"{_objects_url(bucket)}?prefix={quote(prefix)}&maxResults=100000") as answer:
        return [one["name"] for one in json.load(answer).get("items", [])]


def read(bucket: str, name: str) -> bytes:
    """An object, asked of the emulator that the environment has."""
    with urlopen(f"{_objects_url(bucket)}/{quote(name, safe='')}?alt=media") as answer:
        return answer.read()


def write(bucket: str, name: str, data: bytes) -> None:
    """Write an object of the emulator that the environment has."""
    where = f"{_objects_url(bucket, '/upload')}?uploadType=media&name={quote(name, safe='')}"
    urlopen(Request(where, data)).close()


class Emulator(ThreadingHTTPServer):
    """The server: `with Emulator() as emulator: emulator.environment`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.objects = Objects()
        self.read_only = False  # whether all that writes is refused
        # Of the uploads in several parts: bucket, name, conditions, and what has come.
        self.uploads: dict[str, tuple[str, str, dict[str, str], bytearray]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which tensorstore and gcsfs find it."""
        return environment(self.server_port)

    def handle_error(self, *_: object) -> None:
        """Nothing: a client has gone, or was killed."""

    @contextmanager
    def running(self) -> Iterator["Emulator"]:
        """Serve in a thread."""
        thread = threading.Thread(target=self.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Emulator
    # Head and body go in one packet each; with Nagle's algorithm the second would wait 40 ms.
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Nothing: there are thousands of requests."""

    def do_GET(self) -> None:
        self._send(self._answer("GET"))

    def do_POST(self) -> None:
        self._send(self._answer("POST"))

    def do_PUT(self) -> None:
        self._send(self._answer("PUT"))

    def do_DELETE(self) -> None:
        self._send(self._answer("DELETE"))

    def _answer(self, method: str) -> Answer:
        body = self._body()
        split = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(split.query, True).items()}
        parts = split.path.strip("/").split("/")
        if self.server.read_only and method != "GET":
            return error(403, "The caller does not have permission to write.")
        if parts[0] == "batch":
            return self._batch(body)
        if parts[0] == "upload":
            return self._upload(unquote(parts[4]), query, body)
        if parts[0] == "download":
            parts, query["alt"] = parts[1:], "media"
        if parts[:3] != ["storage", "v1", "b"]:
            return error(404, "Not Found")
        return self._object_or_bucket(method, [unquote(part) for part in parts[3:]], query)

    def _object_or_bucket(self, method: str, parts: list[str], query: dict[str, str]) -> Answer:
        objects = self.server.objects
        if len(parts) < 2:
            name = parts[0] if parts else ""
            return answer_json({"kind": "storage#bucket", "name": name, "id": name})
        if parts[1] == "storageLayout":
            return answer_json({"kind": "storage#storageLayout", "bucket": parts[0]})
        if len(parts) == 2:
            return listed(objects, parts[0], query)
        if method == "DELETE":
            return objects.delete(parts[0], parts[2], query)
        if (found := objects.get(parts[0], parts[2])) is None:
            return error(404, "Not Found")
        if refused := _refused(found, query):
            return refused
        if query.get("alt") == "media":
            return media(found, self.headers.get("Range"))
        return answer_json(described(parts[0], parts[2], found))

    def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> Answer:
        kind = query.get("uploadType")
        if "upload_id" in query:
            return self._part(query["upload_id"], body)
        if kind == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            upload = f"{time.time_ns()}"
            self.server.uploads[upload] = (bucket, name, query, bytearray())
            place = f"{self.server.url}/upload/storage/v1/b/{quote(bucket)}/o"
            where = f"{place}?uploadType=resumable&upload_id={upload}"
            return Answer(200, b"", {"Location": where})
        if kind == "multipart":
            about, body = multipart(self.headers["Content-Type"], body)
            return self.server.objects.put(bucket, json.loads(about)["name"], body, query)
        return self.server.objects.put(bucket, query["name"], body, query)

    def _part(self, upload: str, body: bytes) -> Answer:
        bucket, name, query, data = self.server.uploads[upload]
        data += body
        if not self.headers["Content-Range"].endswith("/*"):
            return self.server.objects.put(bucket, name, bytes(data), query)
        return Answer(308, b"", {"Range": f"bytes=0-{len(data) - 1}"})

    def _batch(self, body: bytes) -> Answer:
        text = b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n" + body
        answers: list[str] = []
        for part in message_from_bytes(text).walk():
            if part.is_multipart():
                continue
            path = str(part.get_payload()).split()[1]
            names = [unquote(one) for one in path.strip("/").split("/")[3:]]
            done = self.server.objects.delete(names[0], names[2], {})
            answers.append(
                f"--b\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {done.status} .\r\n\r\n"
            )
        kind = {"Content-Type": "multipart/mixed; boundary=b"}
        return Answer(200, ("".join(answers) + "--b--").encode(), kind)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)


def media(found: Object, wanted: str | None) -> Answer:
    """The bytes of an object, or those of a range."""
    headers = {
        "Content-Type": "application/octet-stream",
        "x-goog-generation": str(found.generation),
        "x-goog-metageneration": "1",
    }
    if not wanted:
        return Answer(200, found.data, headers)
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    size = len(found.data)
    begin = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if begin >= size:
        return error(416, "Requested range not satisfiable")
    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    return Answer(206, found.data[begin:end], headers)


def multipart(kind: str, body: bytes) -> tuple[bytes, bytes]:
    """The description in an upload, and the bytes."""
    boundary = b"--" + kind.partition("boundary=")[2].strip('"').encode()
    parts: list[bytes] = []
    for part in body.split(boundary)[1:3]:
        # gcsfs ends its lines by one character, others by two.
        line = b"\r\n" if part.startswith(b"\r\n") else b"\n"
        parts.append(part.partition(line + line)[2].removesuffix(line))
    return parts[0], parts[1]


def listed(objects: Objects, bucket: str, query: dict[str, str]) -> Answer:
    """A page of the objects of a bucket."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    most = int(query.get("maxResults", 1000))
    items: list[Any] = []
    prefixes: dict[str, None] = {}
    token = query.get("pageToken", "")
    for name in objects.names(bucket):
        outside = name < query.get("startOffset", "") or name >= query.get(
            "endOffset", "\U0010ffff"
        )
        if outside or not name.startswith(prefix) or name < token:
            continue
        rest = name[len(prefix) :]
        if delimiter and delimiter in rest:
            prefixes[prefix + rest.partition(delimiter)[0] + delimiter] = None
        elif len(items) == most:
            token = name
            break
        elif (found := objects.get(bucket, name)) is not None:
            items.append(described(bucket, name, found))
    else:
        token = ""
    page: dict[str, Any] = {"kind": "storage#objects"}
    page |= {"items": items} if items else {}
    page |= {"prefixes": list(prefixes)} if prefixes else {}
    page |= {"nextPageToken": token} if token else {}
    return answer_json(page)


if __name__ == "__main__":
    Emulator(int(sys.argv[1])).serve_forever()

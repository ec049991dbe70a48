"""The emulator of a bucket (`tests/lib/gcs_emulator.py`) answers as googleapis/storage-testbench does,
which is the official one, and not on PyPI.

Of a testbench that runs, with a bucket called `bucket`:

    python tests/io/test_gcs_emulator.py http://127.0.0.1:9005

Two answers of the testbench (of 0.45) are not those of Google's documentation, which are expected
here: it answers a deletion by 200, not 204, and lists in one page, whatever was asked.
"""

import http.client
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.lib.gcs_emulator import Emulator

BASE, UPLOAD = "/storage/v1/b/bucket/o", "/upload/storage/v1/b/bucket/o?uploadType=media&name="
WRONG = "12345"


class Told(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def names(self) -> list[str]:
        return [one["name"] for one in self.json.get("items", [])]


class Client:
    """Asks an emulator."""

    def __init__(self, url: str):
        self._address = urlsplit(url).netloc

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Told:
        connection = http.client.HTTPConnection(self._address)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        told = Told(answer.status, dict(answer.getheaders()), answer.read())
        connection.close()
        return told

    def get(self, path: str, **headers: str) -> Told:
        return self.ask("GET", BASE + path, **headers)

    def put(self, name: str, body: bytes = b"0123456789", condition: str = "") -> Told:
        return self.ask("POST", UPLOAD + name + condition, body)

    def generation(self, name: str) -> str:
        return self.get(f"/{name}").json["generation"]


def conditions(client: Client) -> list[Any]:
    """Only if there is none; only if it has this generation."""
    found: list[Any] = [client.put("c", condition="&ifGenerationMatch=0").status]
    found.append(client.put("c", condition="&ifGenerationMatch=0").status)
    first = client.generation("c")
    found.append(client.put("c", b"new", f"&ifGenerationMatch={first}").status)
    found.append(client.put("c", b"late", f"&ifGenerationMatch={first}").status)
    found.append(client.get("/c?alt=media").body)
    found.append(client.generation("c") > first)
    found.append(client.put("absent", condition=f"&ifGenerationMatch={WRONG}").status)
    return found


def reads(client: Client) -> list[Any]:
    client.put("r")
    generation = client.generation("r")
    found: list[Any] = []
    for asked in ("bytes=2-4", "bytes=7-", "bytes=-3", "bytes=5-99"):
        told = client.get("/r?alt=media", Range=asked)
        found.append((told.status, told.headers.get("Content-Range"), told.body))
    found.append(client.get("/r?alt=media", Range="bytes=10-12").status)
    told = client.get("/r?alt=media")
    found.append((told.status, told.headers["x-goog-generation"] == generation, told.body))
    found.append(client.get(f"/r?alt=media&ifGenerationMatch={WRONG}").status)
    found.append(client.get(f"/r?alt=media&ifGenerationNotMatch={generation}").status)
    about = client.get("/r").json
    found.append((about["name"], about["bucket"], about["size"], about["updated"][-1]))
    found.append((client.get("/none").status, client.get("/none?alt=media").status))
    return found


def deletions(client: Client) -> list[Any]:
    client.put("d")
    generation = client.generation("d")
    found: list[Any] = []
    for condition in (f"?ifGenerationMatch={WRONG}", f"?ifGenerationMatch={generation}", ""):
        found.append(client.ask("DELETE", f"{BASE}/d{condition}").status)
    return found


def lists(client: Client) -> list[Any]:
    for name in ("l%2Fa", "l%2Fb%2F1", "l%2Fb%2F2", "l%2Fc", "l0"):
        client.put(name)
    told = client.get("?prefix=l/&delimiter=/")
    found: list[Any] = [(told.names, told.json["prefixes"])]
    found.append(client.get("?prefix=l/").names)
    found.append(client.get("?prefix=l/&startOffset=l/b&endOffset=l/c").names)
    page = client.get("?prefix=l/&maxResults=3").json
    rest = client.get(f"?prefix=l/&maxResults=3&pageToken={page.get('nextPageToken', '')}")
    found.append((len(page["items"]), rest.names, "nextPageToken" in rest.json))
    found.append(client.get("?prefix=none/").json.get("items", []))
    return found


EXPECTED: dict[Callable[[Client], list[Any]], list[Any]] = {
    conditions: [200, 412, 200, 412, b"new", True, 412],
    reads: [
        (206, "bytes 2-4/10", b"234"),
        (206, "bytes 7-9/10", b"789"),
        (206, "bytes 7-9/10", b"789"),
        (206, "bytes 5-9/10", b"56789"),
        416,
        (200, True, b"0123456789"),
        412,
        304,
        ("r", "bucket", "10", "Z"),
        (404, 404),
    ],
    deletions: [412, 204, 404],
    lists: [
        (["l/a", "l/c"], ["l/b/"]),
        ["l/a", "l/b/1", "l/b/2", "l/c"],
        ["l/b/1", "l/b/2"],
        (3, ["l/c"], False),
        [],
    ],
}


@pytest.mark.parametrize("ask", EXPECTED, ids=lambda ask: ask.__name__)
def test_what_it_answers(ask: Callable[[Client], list[Any]]) -> None:
    with Emulator().running() as emulator:
        assert ask(Client(emulator.url)) == EXPECTED[ask]


if __name__ == "__main__":
    for ask, expected in EXPECTED.items():
        for one, other in zip(ask(Client(sys.argv[1])), expected, strict=True):
            print(ask.__name__, "as expected" if one == other else f"{one}, expected {other}")

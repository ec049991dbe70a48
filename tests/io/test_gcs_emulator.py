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
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.lib.gcs_emulator import Emulator

BASE, UPLOAD = "/storage/v1/b/bucket/o", "/upload/storage/v1/b/bucket/o?uploadType=media&name="
WRONG = "12345"


class Client:
    """Asks an emulator."""

    def __init__(self, url: str):
        self._address = urlsplit(url).netloc

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        """The status and the body of an answer."""
        connection = http.client.HTTPConnection(self._address)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        told = answer.status, answer.read()
        connection.close()
        return told

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        return self.ask("GET", BASE + path, **headers)

    def about(self, path: str) -> Any:
        return json.loads(self.get(path)[1])

    def put(self, name: str, body: bytes = b"0123456789", condition: str = "") -> int:
        return self.ask("POST", UPLOAD + name + condition, body)[0]


def conditions(client: Client) -> list[Any]:
    """Only if there is none; only if it has this generation."""
    found: list[Any] = [client.put("c", condition="&ifGenerationMatch=0") for _ in range(2)]
    first = client.about("/c")["generation"]
    found.append(client.put("c", b"new", f"&ifGenerationMatch={first}"))
    found.append(client.put("c", b"late", f"&ifGenerationMatch={first}"))
    found.append(client.get("/c?alt=media")[1])
    found.append(client.about("/c")["generation"] > first)
    found.append(client.put("absent", condition=f"&ifGenerationMatch={WRONG}"))
    return found


def reads(client: Client) -> list[Any]:
    client.put("r")
    found: list[Any] = [
        client.get("/r?alt=media", Range=part) for part in ("bytes=2-4", "bytes=-3")
    ]
    found.append(client.get("/r?alt=media", Range="bytes=10-12")[0])
    found.append(client.get(f"/r?alt=media&ifGenerationMatch={WRONG}")[0])
    found.append((client.get("/none")[0], client.get("/none?alt=media")[0]))
    return found


def deletions(client: Client) -> list[Any]:
    client.put("d")
    found: list[Any] = []
    for generation in (WRONG, client.about("/d")["generation"], WRONG):
        found.append(client.ask("DELETE", f"{BASE}/d?ifGenerationMatch={generation}")[0])
    return found


def lists(client: Client) -> list[Any]:
    for name in ("l%2Fa", "l%2Fb%2F1", "l%2Fb%2F2", "l%2Fc", "l0"):
        client.put(name)

    def names(told: Any) -> list[str]:
        return [one["name"] for one in told.get("items", [])]

    inside = client.about("?prefix=l/&delimiter=/")
    found: list[Any] = [(names(inside), inside["prefixes"])]
    found.append(names(client.about("?prefix=l/&startOffset=l/b&endOffset=l/c")))
    page = client.about("?prefix=l/&maxResults=3")
    rest = client.about(f"?prefix=l/&maxResults=3&pageToken={page.get('nextPageToken', '')}")
    found.append((len(page["items"]), names(rest), "nextPageToken" in rest))
    found.append(names(client.about("?prefix=none/")))
    return found


EXPECTED: dict[Callable[[Client], list[Any]], list[Any]] = {
    conditions: [200, 412, 200, 412, b"new", True, 412],
    reads: [(206, b"234"), (206, b"789"), 416, 412, (404, 404)],
    deletions: [412, 204, 404],
    lists: [(["l/a", "l/c"], ["l/b/"]), ["l/b/1", "l/b/2"], (3, ["l/c"], False), []],
}


@pytest.mark.parametrize("ask", EXPECTED, ids=lambda ask: ask.__name__)
def test_what_it_answers(ask: Callable[[Client], list[Any]]) -> None:
    with Emulator().running() as emulator:
        assert ask(Client(emulator.url)) == EXPECTED[ask]


if __name__ == "__main__":
    for ask, expected in EXPECTED.items():
        for one, other in zip(ask(Client(sys.argv[1])), expected, strict=True):
            print(ask.__name__, "as expected" if one == other else f"{one}, expected {other}")

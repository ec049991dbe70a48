"""Run the tests of jax, equinox or haliax with their compiling function replaced by `ft.jit`, and
list those that fail.

    python benchmarks/peers jax FOLDER          # with pjit_test.py, shard_map_test.py, api_test.py
    python benchmarks/peers equinox FOLDER      # with test_jit.py and others, and their conftest.py and helpers.py
    python benchmarks/peers haliax FOLDER

The tests are not in the packages. Copy them by hand from the repository of the peer, at the tag of
the installed version, into a folder that git ignores, such as `build/peers/jax`. Each file runs
twice, in processes of its own: as it is, and translated. A test that passes as it is and fails
translated is listed with the reason, which `reasons.py` has; without one, with the first line of
its error, and the exit status is 1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from reasons import REASONS

HERE = Path(__file__).parent


class Peer(NamedTuple):
    """What is needed to run the tests of a library.

    Attributes:
        files: the pattern of its test files.
        replaced: the last line of the imports of a test file, as a pattern; behind it, our
            functions are imported.
    """

    files: str
    replaced: str


# The first statement that is no import.
_AFTER_IMPORTS = (
    r"(?m)^(?=(?:[A-Za-z_]+ *=|def |class |@|config\.|jax\.config\.|jtu\.|absltest\.|if ))"
)
PEERS = {
    "jax": Peer("*_test.py", r"(?m)^(?:jax\.)?config\.parse_flags_with_absl\(\)\n"),
    "equinox": Peer("test_*.py", _AFTER_IMPORTS),
    "haliax": Peer("test_*.py", _AFTER_IMPORTS),
}


def translated(text: str, peer: str) -> str:
    """A test file in which the compiling function of the peer is ours."""
    found = re.search(PEERS[peer].replaced, text)
    if found is None:
        sys.exit(f"no end of the imports was found, by {PEERS[peer].replaced}")
    return (
        f"{text[: found.end()]}from replaced_{peer} import *  # noqa: F403\n{text[found.end() :]}"
    )


def results(folder: Path, file: str, timeout: int, options: tuple[str, ...]) -> dict[str, str]:
    """The tests of a file with the last line of their error; an empty text for those that pass."""
    report = folder / f"{file}.xml"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "-n",
        "2",
    ]
    command += [f"--junitxml={report}", "--rootdir", str(folder), *options, str(folder / file)]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        check=False,
    )
    if not report.exists():
        sys.exit(f"{file} did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        message = "" if bad is None else (bad.get("message") or "failed").strip()
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        found[name] = message.partition("\n")[0][:200]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("folder", type=Path, help="the tests of the peer")
    parser.add_argument("--only", default="", help="run the tests that pytest's -k selects")
    parser.add_argument("--timeout", type=int, default=3_000, help="seconds for one file")
    options = parser.parse_args()
    files = sorted(path.name for path in options.folder.glob(PEERS[options.peer].files))
    if not files:
        parser.error(f"{options.folder} has no {PEERS[options.peer].files}")
    more = ("-k", options.only) if options.only else ()
    lost = 0
    with tempfile.TemporaryDirectory() as temporary:
        plain, ours = Path(temporary) / "plain", Path(temporary) / "ours"
        shutil.copytree(options.folder, plain)
        shutil.copytree(options.folder, ours)
        for file in files:
            print(f"{file}: as it is", file=sys.stderr)
            before = results(plain, file, options.timeout, more)
            (ours / file).write_text(translated((ours / file).read_text(), options.peer))
            print(f"{file}: translated", file=sys.stderr)
            after = results(ours, file, options.timeout, more)
            passed = [name for name, error in before.items() if not error]
            if before and not passed:
                sys.exit(
                    f"no test of {file} passes as it is: are the tests those of the installed {options.peer}?"
                )
            failed = {
                name: after.get(name, "did not run")
                for name in passed
                if after.get(name, "did not run")
            }
            print(
                f"\n{file}: of {len(passed)} tests that pass, {len(passed) - len(failed)} pass translated",
                flush=True,
            )
            for reason, names in by_reason(options.peer, failed).items():
                print(f"  {len(names)} × {reason}")
                for name in sorted(names):
                    print(f"      {name}" + ("" if reason else f": {failed[name]}"))
                lost += 0 if reason else len(names)
    print(f"\n{lost} without a reason")
    return 1 if lost else 0


def by_reason(peer: str, failed: Iterable[str]) -> dict[str, list[str]]:
    """The names of the tests that failed by the reason; those without one are the last, with an
    empty text."""
    found: dict[str, list[str]] = {}
    left = list(failed)
    for reason, patterns in REASONS[peer].items():
        names = [
            name for name in left if any(fnmatchcase(name, pattern) for pattern in patterns.split())
        ]
        if names:
            found[reason] = names
            left = [name for name in left if name not in names]
    return {**found, "": left} if left else found


if __name__ == "__main__":
    sys.exit(main())

"""This script runs the tests of jax, equinox or haliax with `ft.jit` as their compiling function.

    python benchmarks/peers jax FOLDER          # With pjit_test.py, shard_map_test.py, api_test.py.
    python benchmarks/peers equinox FOLDER      # With test_jit.py and others, and their conftest.py and helpers.py.
    python benchmarks/peers haliax FOLDER

The packages do not contain their tests. Copy them by hand from the library's repository, at the tag
of the installed version, into a folder that git ignores, such as `build/peers/jax`.

Each file runs twice, in separate processes: original and translated. The script lists each test
that passes in the original and fails translated, with a reason from `reasons.py`. A test without a
reason is listed with the first line of its error, and the exit status is 1.
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
    """The patterns that are needed to run a library's tests.

    Attributes:
        files: the pattern of its test files.
        replaced: a pattern for the end of a test file's imports. After it, functree's functions are
            imported.
    """

    files: str
    replaced: str


# The first statement that is not an import.
_AFTER_IMPORTS = (
    r"(?m)^(?=(?:[A-Za-z_]+ *=|def |class |@|config\.|jax\.config\.|jtu\.|absltest\.|if ))"
)
PEERS = {
    "jax": Peer("*_test.py", r"(?m)^(?:jax\.)?config\.parse_flags_with_absl\(\)\n"),
    "equinox": Peer("test_*.py", _AFTER_IMPORTS),
    "haliax": Peer("test_*.py", _AFTER_IMPORTS),
}


def translated(text: str, peer: str) -> str:
    """Replace the peer's compiling function in a test file with functree's."""
    match = re.search(PEERS[peer].replaced, text)
    if match is None:
        sys.exit(f"the pattern for the end of the imports does not match: {PEERS[peer].replaced}")
    return (
        f"{text[: match.end()]}from replaced_{peer} import *  # noqa: F403\n{text[match.end() :]}"
    )


def results(folder: Path, file: str, timeout: int, options: tuple[str, ...]) -> dict[str, str]:
    """Run a file, and return each test's first line of its error, or "" if it passes."""
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
    parser.add_argument("folder", type=Path, help="folder with the library's tests")
    parser.add_argument("--only", default="", help="run only tests that pytest's -k selects")
    parser.add_argument(
        "--timeout", type=int, default=3_000, help="time limit per file, in seconds"
    )
    options = parser.parse_args()
    files = sorted(path.name for path in options.folder.glob(PEERS[options.peer].files))
    if not files:
        parser.error(f"{options.folder} contains no files {PEERS[options.peer].files}")
    more = ("-k", options.only) if options.only else ()
    lost = 0
    with tempfile.TemporaryDirectory() as temporary:
        plain, ours = Path(temporary) / "plain", Path(temporary) / "ours"
        shutil.copytree(options.folder, plain)
        shutil.copytree(options.folder, ours)
        for file in files:
            print(f"{file}: original", file=sys.stderr)
            before = results(plain, file, options.timeout, more)
            (ours / file).write_text(translated((ours / file).read_text(), options.peer))
            print(f"{file}: translated", file=sys.stderr)
            after = results(ours, file, options.timeout, more)
            passed = [name for name, error in before.items() if not error]
            if before and not passed:
                sys.exit(
                    f"no test in the original {file} passes: copy the tests of the installed version of {options.peer}"
                )
            failed = {
                name: after.get(name, "did not run")
                for name in passed
                if after.get(name, "did not run")
            }
            print(
                f"\n{file}: {len(passed)} tests pass; translated, {len(passed) - len(failed)} of them pass",
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
    """Group the failed tests by reason.

    Tests without a reason come last, under an empty text.
    """
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

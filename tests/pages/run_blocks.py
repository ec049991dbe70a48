"""Blocks of code, as they were copied from a page ─► what goes wrong when they are pasted into a
fresh IPython, one after the other.

Reads from each line of standard input a list of `{"code": ..., "shown": ...}` as JSON, where `shown`
is what the page shows of the block, and prints a list of errors for it. Each line has a process of
its own, which begins where the libraries have been imported.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

LIBRARIES = ["IPython.core.interactiveshell", "functree", "optax", "equinox"]


def problems(code: str, shown: str, error: BaseException | None) -> Iterator[str]:
    """What is wrong about how a block ended."""
    expected = "Traceback (most recent call last)" in shown
    if error is None and expected:
        yield f"does not raise:\n{code}"
    if error is None:
        return
    # Of JAX's classes the page does not show the private module.
    if not expected or type(error).__name__ not in shown:
        yield f"{''.join(traceback.format_exception_only(error))}in:\n{code}"


def run(blocks: list[dict[str, str]], result: Connection) -> None:
    """Paste blocks into an IPython, and send what goes wrong."""
    from IPython.core.interactiveshell import InteractiveShell  # not in the one that waits

    shell = InteractiveShell.instance(colors="NoColor", history_manager=None)
    shell.showtraceback = lambda *args, **kwargs: None
    shell.showsyntaxerror = lambda *args, **kwargs: None
    errors: list[str] = []
    with open(os.devnull, "w") as sys.stdout:
        for block in blocks:
            done = shell.run_cell(block["code"])
            error = done.error_before_exec or done.error_in_exec
            errors += problems(block["code"], block["shown"], error)
    result.send(errors)
    # Threads of a page, and what runs at exit, are of no interest.
    result.close()
    os._exit(0)


def main() -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    for line in sys.stdin:
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(json.loads(line), theirs))
        process.start()
        theirs.close()
        try:
            errors = ours.recv()
        except EOFError:
            process.join()
            errors = [f"the process has ended with {process.exitcode}"]
        process.join()
        print(json.dumps(errors), flush=True)


if __name__ == "__main__":
    main()

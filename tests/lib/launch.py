"""Several local processes of one program, as a launcher would start them: with hard limits on their
time."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def with_devices(number: int) -> str:
    """The `XLA_FLAGS` of this process, with another number of simulated devices."""
    return re.sub(r"(?<=device_count=)\d+", str(number), os.environ["XLA_FLAGS"])


Running = list[subprocess.Popen[str]]


def started(
    arguments: Sequence[str], processes: int = 1, devices: int = 8, **environment: str
) -> Running:
    """Processes of `python ...`, which share the devices.

    Args:
        arguments: those of Python: a script and its arguments.
        processes: how many.
        devices: the simulated devices of all of them together.
        **environment: further variables of their environment.
    """
    port = free_port()
    base = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": with_devices(devices // processes),
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    if processes > 1:
        base |= {"FUNCTREE_COORDINATOR": f"127.0.0.1:{port}", "FUNCTREE_PROCESSES": str(processes)}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**base, "FUNCTREE_PROCESS": str(process)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]


def initialized() -> None:
    """Join the other processes, in a process that `started` has started."""
    if "FUNCTREE_COORDINATOR" not in os.environ:
        return
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        os.environ["FUNCTREE_COORDINATOR"],
        int(os.environ["FUNCTREE_PROCESSES"]),
        int(os.environ["FUNCTREE_PROCESS"]),
        heartbeat_timeout_seconds=int(os.environ.get("FUNCTREE_HEARTBEAT_SECONDS", 10)),
        shutdown_timeout_seconds=int(os.environ.get("FUNCTREE_SHUTDOWN_SECONDS", 30)),
    )


def ended(running: Sequence["subprocess.Popen[str]"], seconds: float) -> list[tuple[int, str, str]]:
    """The exit status, the output and the errors of each process. After so many seconds they are
    killed (status -9)."""
    until = time.monotonic() + seconds
    results = []
    for process in running:
        try:
            out, err = process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        results.append((process.returncode, out, err))
    return results

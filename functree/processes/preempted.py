"""`preempted` returns True in all processes at the same step, a few steps after a SIGTERM."""

import signal
from functools import cache
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from functree.argument_checks import EXTENT, check


def preempted(step: int) -> bool:
    """Return whether training should save and stop because a scheduler will reclaim a machine.

    Schedulers send SIGTERM before they reclaim a machine. With several processes, every process
    must call this function once per step. If one process gets the signal, the function returns True
    in all processes at the same step, a few steps later.

    With one process, the first call starts to listen for SIGTERM. A second SIGTERM ends the process
    as usual.

    Args:
        step: the current step, which must increase from call to call.

    Raises:
        FunctreeError: if `step` is not a non-negative integer.
        ValueError: if the first call of a single process is not in its main thread.

    Examples:
        >>> for step in range(3):
        ...     if ft.preempted(step):
        ...         break
        >>> step
        2
    """
    check("preempted: invalid arguments", step=(step, EXTENT))
    if jax.process_count() > 1:
        # JAX's coordination service chooses the step for all processes. It has handled SIGTERM
        # since initialization.
        return multihost_utils.reached_preemption_sync_point(int(step))
    _listen()
    return bool(_SIGNALS)


_SIGNALS: list[int] = []
"""The numbers of the signals that arrived."""


@cache
def _listen() -> None:
    """Listen for SIGTERM, from the first call on."""
    before: Any = signal.getsignal(signal.SIGTERM)  # None if Python did not set the handler

    def note(number: int, frame: FrameType | None) -> None:
        _SIGNALS.append(number)
        # A second SIGTERM must end a process that hangs before its next step.
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        # Call the handler of another library too, such as one that saves logs.
        if callable(before):
            before(number, frame)

    # Python raises a ValueError in any other thread than the main thread.
    signal.signal(signal.SIGTERM, note)

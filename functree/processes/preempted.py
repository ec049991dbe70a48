"""SIGTERM ─► whether to save and stop, at the same step in all processes."""

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from functree.argument_checks import EXTENT, check
from functree.errors import FunctreeError


def preempted(step: int) -> bool:
    """Whether this machine is to be taken away, so that the training should save and stop.

    Schedulers send SIGTERM some time before. With several processes it is enough that one of them
    gets it: all of them return True at the same step, a few steps later. All have to call this once
    in each step.

    With one process the first call listens for SIGTERM from then on; a second SIGTERM ends the
    process as it would without this function.

    Args:
        step: the step, which only grows.

    Raises:
        FunctreeError: the first call is not in the main thread of the only process.

    Examples:
        >>> for step in range(3):
        ...     if ft.preempted(step):
        ...         break
        >>> step
        2
    """
    check("preempted cannot tell", step=(step, EXTENT))
    if jax.process_count() > 1:
        # JAX's service agrees on a step. It set its handler of SIGTERM when it was initialized.
        return multihost_utils.reached_preemption_sync_point(int(step))
    _TERMINATION.listen()
    return _TERMINATION.came


class _Termination:
    """Whether SIGTERM has come since this process listens for it."""

    def __init__(self) -> None:
        self.came = False
        self._listens = False
        self._before: Any = None  # what handled SIGTERM before; None if that was not set by Python

    def listen(self) -> None:
        if self._listens:
            return
        # Python lets only the main thread set a handler.
        if threading.current_thread() is not threading.main_thread():
            raise FunctreeError(
                "preempted has to listen for SIGTERM in the main thread: call it there first"
            )
        self._before = signal.signal(signal.SIGTERM, self._note)
        self._listens = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        # A second SIGTERM ends a process that hangs, and never comes to its next step.
        if self._before is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        else:
            signal.signal(signal.SIGTERM, self._before)
        # The handler of another library, such as one that saves logs, hears of it too.
        if callable(self._before):
            self._before(number, frame)


_TERMINATION = _Termination()

"""Runs exchanges in a thread of their own, one after another, while the steps of the training go on."""

import queue
import threading
import weakref
from collections.abc import Callable


class BackgroundExchanges:
    """A thread that runs the exchanges of a strategy in the order in which steps start them.

    So all workers run them in one order, whatever the speed of a worker. The thread ends with this object.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=[self._waiting], name="tfdist-exchanges", daemon=True)
        thread.start()
        weakref.finalize(self, self._waiting.put, None).atexit = False

    def start(self, exchange: Callable[[], None]) -> None:
        """Runs an exchange once those are done that were started before. It must raise no error."""
        self._waiting.put(exchange)


def _run(waiting: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (exchange := waiting.get()) is not None:
        exchange()
        del exchange  # It must not be kept alive until the next one.

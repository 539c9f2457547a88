"""A member's end of rounds: connects to worker 0, joins a `fit`, sends its part of a round and awaits the answer."""

import queue
import socket
import time
from typing import Any

from absl import logging

from tfdist.cluster import ClusterSpec
from tfdist.cluster.address import split_address
from tfdist.errors import CHIEF_IS_GONE, ClusterError, WorkerLostError
from tfdist.network.handshake import NotOursError, RefusedError, introduce
from tfdist.network.secret import Secret
from tfdist.network.tls import Tls
from tfdist.network.tls import connect as connect_tls
from tfdist.strategies.elastic.member_link import MemberLink
from tfdist.strategies.elastic.round_messages import Message

_TRY_SECONDS, _RETRY_SECONDS, _REFUSED_SECONDS = 3.0, 0.2, 9.0
_LOOK_SECONDS, _LOG_SECONDS = 0.5, 30.0


class RoundMember:
    """The connection of a worker to worker 0.

    Args:
      cluster: The cluster, seen from this worker.
      timeout_seconds: How long to try to connect, and to wait until worker 0 begins a `fit`.
      silence_seconds: How long worker 0 may be silent before it counts as lost.

    Raises:
      WorkerLostError: If worker 0 does not answer in time.
    """

    def __init__(self, cluster: ClusterSpec, timeout_seconds: float, silence_seconds: float):
        self._address = cluster.training_addresses[0]
        self._heard: queue.SimpleQueue[Message | str] = queue.SimpleQueue()
        self._lost: str | None = None
        self._timeout_seconds = timeout_seconds
        connection = self._connect(cluster, timeout_seconds)
        self._link = MemberLink(
            connection,
            silence_seconds,
            lambda _, message: self._heard.put(message),
            lambda _, why: self._heard.put(why),
        )

    def send(self, message: Message) -> None:
        """Sends a message to worker 0.

        Raises:
          WorkerLostError: If worker 0 is gone.
        """
        try:
            self._link.send(message)
        except OSError as error:
            raise self._gone(str(error)) from error

    def hear(self, *kinds: str, fit: int | None = None) -> Message:
        """Waits for the next message of one of these kinds, and skips others, such as news of an earlier `fit`.

        Args:
          *kinds: The kinds.
          fit: The `fit` that the message must be about, if it names one.

        Raises:
          ClusterError: If worker 0 does not begin that `fit` in time.
          WorkerLostError: If worker 0 is gone or silent.
        """
        start = logged = time.monotonic()
        while True:
            if self._lost is not None:
                raise self._gone(self._lost)
            try:
                heard: Any = self._heard.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if self._link.is_silent:
                    raise self._gone("it has sent no sign of life") from None
                if fit is not None and self._link.told.get("fit", fit) < fit:
                    logged = self._wait_for_fit(fit, start, logged)
                continue
            if isinstance(heard, str):
                self._lost = heard
            elif heard.kind == "left out":
                self._lost = heard.fields["why"]
            elif heard.kind in kinds and (fit is None or heard.fields.get("fit", fit) >= fit):
                return heard

    def _wait_for_fit(self, fit: int, start: float, logged: float) -> float:
        """Looks at the deadline of a wait for worker 0 to begin a `fit`. Returns when it was logged last."""
        now, limit = time.monotonic(), self._timeout_seconds
        begun = self._link.told["fit"] + 1
        if now - start > limit:
            raise ClusterError(
                f"Worker 0 must begin each `fit` within {limit:g} s of the other workers, but this worker waits for "
                f"`fit` number {fit + 1} of the program, and worker 0 has begun {begun}. Call `fit` equally often on "
                "all workers, or raise start_timeout_seconds of tfdist.FaultTolerance."
            )
        if now - logged < _LOG_SECONDS:
            return logged
        logging.warning("waiting %.0f s more for worker 0 to begin `fit` number %d", limit - (now - start), fit + 1)
        return now

    def close(self) -> None:
        """Ends the connection."""
        self._link.close()

    def _gone(self, why):
        return WorkerLostError(
            f"{CHIEF_IS_GONE} for this worker: {why}. Its address is {self._address}. See its log. If its process has "
            "ended, all workers start again; else it has gone on without this worker, which joins when it starts again."
        )

    def _connect(self, cluster: ClusterSpec, timeout_seconds: float) -> socket.socket:
        secret, tls = Secret.from_env(), Tls.from_env()
        host, port = split_address(self._address)
        introduction = {"member": cluster.worker_id, "addresses": list(cluster.training_addresses)}
        start = logged = time.monotonic()
        refused: float | None = None
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=_TRY_SECONDS)
                secured = connect_tls(tls, connection, host)
                introduce(secured, secret, introduction)
                return secured
            except RefusedError as error:  # It also means that worker 0 has ended during the handshake of TLS.
                why, refused = str(error), refused or time.monotonic()
            except (OSError, NotOursError) as error:
                why, refused = str(error), None
            now = time.monotonic()
            if refused is not None and (now - refused > _REFUSED_SECONDS or now - start > timeout_seconds):
                raise ClusterError(f"Worker 0 at {self._address} must admit each worker, but {why}.")
            if now - start > timeout_seconds:
                raise WorkerLostError(
                    f"Worker 0 at {self._address} must answer within {timeout_seconds:g} s, but this worker cannot "
                    f"connect ({why}). Start worker 0, see its log, or raise start_timeout_seconds of "
                    "tfdist.FaultTolerance."
                )
            if now - logged > 5.0:
                logged = now
                logging.warning("waiting for worker 0 at %s (%s)", self._address, why)
            time.sleep(_RETRY_SECONDS)

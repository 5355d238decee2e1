"""The engines that serve one model instance, and which of them takes a request."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Protocol

from conch.api.config import EngineConfig
from conch.api.errors import ErrorCode, RequestError
from conch.api.routing import ReplicaLoad, RoutedRequest, Router
from conch.engine.catalogue import Catalogue
from conch.engine.protocol import AddRequest, EngineReady, StepNews
from conch.host.engine_client import EngineClient
from conch.host.metrics import Accounts, EngineAccount
from conch.host.session import Burden, Session
from conch.host.shares import EngineShare


class ReplicaEvents(Protocol):
    """Who hears of all replicas. Called from their threads; must not block."""

    def news(self, news: StepNews) -> None:
        """Take what one step of one replica brought."""

    def engine_up(self, session: Session) -> None:
        """Note that a replica serves, for the first time or again."""

    def engine_down(self, session: Session, error: RequestError) -> None:
        """Note that a replica that served is gone; its requests are lost."""

    def engine_given_up(self, reason: str) -> None:
        """Note that a replica does not come back; others may serve, and it is still tried."""


class SoleReplica:
    """The router of a model instance that has one engine."""

    def place(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the only index."""
        return 0


class Replica:
    """One engine and its books: hears its news first, keeps the numbers, and hands the rest on."""

    def __init__(self, account: EngineAccount, events: ReplicaEvents) -> None:
        self._account = account
        self._events = events
        self._burden: Burden
        self.client: EngineClient

    def run(self, share: EngineShare, command: Sequence[str], numbers: Iterator[int], name: str) -> None:
        """Start the engine, and keep it running from now on."""
        self.client = EngineClient(share, self, command, numbers, name)
        self.client.start()

    def news(self, news: StepNews) -> None:
        """Take what one step brought."""
        if news.stats is not None:
            self._burden.hear(news.stats)
            self._account.stats(news.stats)
        self._events.news(news)

    def engine_up(self, session: Session) -> None:
        """Note that the engine serves."""
        self._burden = session.burden
        self._account.engine_up()
        self._events.engine_up(session)

    def engine_down(self, session: Session, error: RequestError) -> None:
        """Note that the engine is gone."""
        self._account.engine_down()
        self._events.engine_down(session, error)

    def engine_given_up(self, reason: str) -> None:
        """Note that the engine does not come back."""
        self._events.engine_given_up(reason)


class Replicas:
    """All engines of one model instance: starts them, places requests on them, and ends them.

    Parameters
    ----------
    shares
        What each engine is given.
    router
        Chooses among those that serve.
    """

    def __init__(
        self,
        shares: Sequence[EngineShare],
        router: Router,
        accounts: Accounts,
        events: ReplicaEvents,
        command: Sequence[str],
    ) -> None:
        self._shares = tuple(shares)
        self._command = command
        self._router = router
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._replicas = [Replica(account, events) for account in accounts.engines]
        self._running: list[Replica] = []

    def start(self) -> EngineReady:
        """Start all engines; the first alone, so that the others find its compiled kernels and caches.

        Raises
        ------
        ConchError
            One did not start.
        """
        ready = self._run(self._replicas[0]).client.wait()
        for replica in [self._run(replica) for replica in self._replicas[1:]]:
            replica.client.wait()
        return ready

    @property
    def are_all_down(self) -> bool:
        """Whether no engine serves now."""
        return all(replica.client.session is None for replica in self._running)

    def place(self, message: AddRequest) -> Session | None:
        """Choose an engine for a request, which counts as its burden from now on; None where none serves.

        Raises
        ------
        RequestError
            The router failed.
        """
        request = RoutedRequest(message.token_ids, message.cache_salt)
        with self._lock:
            serving = [
                session for replica in self._running if (session := replica.client.session) is not None
            ]
            if not serving:
                return None
            try:
                chosen = serving[self._router.place(request, [session.burden.load() for session in serving])]
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                raise RequestError(
                    f"the router failed: {type(error).__name__}: {error}", ErrorCode.INTERNAL
                ) from error
            chosen.burden.take(message.params.n)
        return chosen

    def close(self) -> None:
        """Stop all engines at once, within a bounded time."""
        closers = [threading.Thread(target=replica.client.close) for replica in self._running]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()

    def _run(self, replica: Replica) -> Replica:
        index = len(self._running)
        name = "the engine" if len(self._shares) == 1 else f"the engine of replica {index}"
        replica.run(self._shares[index], self._command, self._numbers, name)
        self._running.append(replica)
        return replica


def make_router(config: EngineConfig) -> Router:
    """Build the router that a configuration names; the plugins of other seams are not built here.

    Raises
    ------
    PluginError
        There is no such router, or it does not build.
    """
    if config.data_parallel_size == 1:
        return SoleReplica()
    router: Router = Catalogue.load().build("router", config.router, config)
    return router

"""What each tenant has been served, by the virtual token counter of Sheng et al. (OSDI '24)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from conch.api import Request
from conch_plugins.schedulers.lines import RankedLine


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's. `Accounts` is its only writer.

    Attributes
    ----------
    tenant
        Whose it is.
    served
        The virtual counter: weighted tokens, lifted when the tenant was away.
    line
        Its requests that wait.
    num_running
        Its requests that run, choices counted.
    oldest_next
        Whether the oldest goes next; otherwise the shortest, so that neither is held back for ever.
    """

    tenant: str
    served: float = 0.0
    line: RankedLine = field(default_factory=RankedLine)
    num_running: int = 0
    oldest_next: bool = True

    def next(self) -> Request | None:
        """Return its next request."""
        return self.line.first() if self.oldest_next else self.line.shortest()


class Accounts:
    """The accounts of all tenants that are here, and of those that left with more than the others had.

    A tenant that begins to wait is lifted to the least served of those who wait, or, when nobody does, to
    whoever was the last that waited: time away earns nothing.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._waiting: dict[str, Account] = {}
        self._busy: dict[str, Account] = {}
        self._idle: OrderedDict[str, Account] = OrderedDict()
        self._turns: list[tuple[float, str]] = []
        self._last_that_waited = Account("")

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def busy(self) -> Collection[Account]:
        """Accounts of those who run."""
        return self._busy.values()

    def least_served(self) -> Account | None:
        """Return whose turn it is among those who wait.

        Counters only grow, so an entry of the heap that is out of date is put back at most once for each time
        that its counter grew.
        """
        while self._turns:
            served, tenant = self._turns[0]
            account = self._waiting.get(tenant)
            if account is None:
                heapq.heappop(self._turns)
            elif account.served != served:
                heapq.heapreplace(self._turns, (account.served, tenant))
            else:
                return account
        return None

    def queue(self, request: Request) -> None:
        """Note a request that waits."""
        account = self._of(request.tenant)
        if account.tenant not in self._waiting:
            account.served = max(account.served, self._floor())
            self._waiting[account.tenant] = account
            heapq.heappush(self._turns, (account.served, account.tenant))
        account.line.add(request)

    def unqueue(self, request: Request) -> None:
        """Note that a request waits no more."""
        account = self._of(request.tenant)
        account.line.remove(request.id)
        if not len(account.line) and self._waiting.pop(account.tenant, None) is not None:
            self._last_that_waited = account
        self._settle(account)

    def start(self, request: Request) -> Account:
        """Note a request, or a further choice of one, that runs."""
        account = self._of(request.tenant)
        account.num_running += 1
        self._busy[account.tenant] = account
        return account

    def stop(self, account: Account) -> None:
        """Note that a request runs no more."""
        account.num_running -= 1
        if not account.num_running:
            del self._busy[account.tenant]
        self._settle(account)

    def _of(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant)
        self._idle.pop(tenant, None)
        return account

    def _floor(self) -> float:
        least = self.least_served()
        return self._last_that_waited.served if least is None else least.served

    def _settle(self, account: Account) -> None:
        """Close accounts that would be opened again with no less than they hold."""
        if account.num_running or len(account.line):
            return
        self._idle[account.tenant] = account
        floor = self._floor()
        while self._idle and next(iter(self._idle.values())).served <= floor:
            tenant, _ = self._idle.popitem(last=False)
            del self._accounts[tenant]

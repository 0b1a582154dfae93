"""In which order waiting requests are admitted.

Responsible for the order and nothing else: what fits, what is deferred and who is preempted is the scheduler's affair.
A policy sees requests that wait for the first time only; preempted ones always resume before them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from kvist.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvist.sched.request import Request


class SchedulingPolicy(Protocol):
    """Orders waiting requests by a key.

    The first request in the order that does not fit blocks the ones behind it, so a policy whose keys grow with
    ``arrival_index`` starves nobody; a policy that lets late requests pass has to bound for how long.
    """

    @property
    def name(self) -> str:
        """What the user types after ``--schedule``."""

    def key(self, request: Request) -> tuple[int, ...]:
        """Return the place of a request: smaller goes first. Read once each time the request is queued."""


class Fcfs:
    """First come, first served."""

    name = "fcfs"

    def key(self, request: Request) -> tuple[int, ...]:
        """Return the order of arrival."""
        return (request.arrival_index,)


POLICIES: Mapping[str, Callable[[], SchedulingPolicy]] = MappingProxyType({Fcfs.name: Fcfs})
"""Every policy by the name the user gives."""


def get(name: str) -> SchedulingPolicy:
    """Return a new policy of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in POLICIES:
        raise ConfigError(
            f"[scheduler] --schedule must be one of {', '.join(POLICIES)}, received {name!r}"
        )
    return POLICIES[name]()

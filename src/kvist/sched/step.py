"""A plan in the making, and the one that is being computed.

Responsible for the positions left in a step and who got them. Knows neither queue nor blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.sched.output import ScheduledSequence, StepPlan
    from kvist.sched.request import Request
    from kvist.types import BlockCopy


class Step:
    """A plan in the making.

    Args:
        budget: Token positions left.
    """

    __slots__ = (
        "_is_least_known",
        "_least_left",
        "budget",
        "copies",
        "has_failed_allocation",
        "has_partial",
        "has_preempted",
        "num_scheduled",
        "paused",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Token positions left."""
        self.copies: list[BlockCopy] = []
        self.num_scheduled: dict[Request, int] = {}
        self.paused: set[Request] = set()
        """Running requests that cannot have a block now."""
        self.has_partial = False
        """Whether somebody was given less than it lacks, while there may be positions left."""
        self.has_failed_allocation = False
        self.has_preempted = False
        self._least_left: int | None = None
        """What ``least_left`` returned, as long as that is true."""
        self._is_least_known = False

    def schedule(self, request: Request, num_tokens: int) -> None:
        """Give a request so many positions more."""
        self.num_scheduled[request] = self.num_scheduled.get(request, 0) + num_tokens
        self.budget -= num_tokens
        self._is_least_known = False

    def drop(self, request: Request) -> None:
        """Take a request out of the step."""
        self.budget += self.num_scheduled.pop(request, 0)
        self._is_least_known = False

    def num_left(self, request: Request) -> int:
        """Return the positions that a request lacks after this step."""
        return request.num_uncomputed_tokens - self.num_scheduled.get(request, 0)

    def least_left(self, awake: Sequence[Request]) -> int | None:
        """Return the fewest positions that any request lacks after this step; None: nobody lacks any.

        Complexity: O(awake requests) after a change of the step, else O(1).
        """
        if not self._is_least_known:
            left = [num for request in awake if (num := self.num_left(request)) > 0]
            self._least_left = min(left, default=None)
            self._is_least_known = True
        return self._least_left


class InFlight(NamedTuple):
    """The plan that was handed out."""

    plan: StepPlan
    parts: Sequence[tuple[Request, ScheduledSequence]]
    """Its sequences in order, each with the request that it belongs to."""
    num_batch_tokens: int
    started_ns: int

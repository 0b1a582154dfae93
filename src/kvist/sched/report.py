"""What the scheduler says of requests and of itself.

Responsible for the frozen values that leave it, beside plans (``output``). Knows no queue and no block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvist.types import MissReason, MissReport, MissSpan

if TYPE_CHECKING:
    from kvist.sched.request import RequestStatus
    from kvist.types import FinishReason, RequestId, TokenId, TokenLogprobs, Usage


class RequestUpdate(NamedTuple):
    """What one step, or a call to ``finish``, changed for one request."""

    request_id: RequestId
    token_ids: tuple[TokenId, ...]
    """New output tokens, the one that ended the sequence included."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per new token when asked for, else empty."""
    finish_reason: FinishReason | None = None
    """Set on the last update of the request. ERROR: memory for it could not be allocated, again and again."""
    stop_token_id: int | None = None
    """The one of ``params.stop_token_ids`` that ended it, if one did."""
    usage: Usage | None = None
    """Of the whole request; set on its last update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """Where one request stands between two steps."""

    request_id: RequestId
    tenant: str
    """Whose it is."""
    status: RequestStatus
    """WAITING, RUNNING or PREEMPTED."""
    priority: int
    """As given; lower goes first."""
    arrival_index: int
    """Order of arrival, from 0."""
    num_prompt_tokens: int
    """Given by the client."""
    num_output_tokens: int
    """Produced so far."""
    num_prefill_tokens: int
    """Positions still to compute before the next token can be chosen. Of one that waits: without what the cache held
    when it was looked up last, so an estimate."""
    num_held_blocks: int
    """In its block table, shared ones included; 0 unless it runs."""
    num_footprint_blocks: int
    """What it may come to hold as far as it is reserved at admission, shared ones included."""
    num_overtakes: int
    """Later requests that started before it, as far as the bound counts them; 0 once it has started."""
    num_preemptions: int
    """Times it lost its blocks."""
    age_s: float
    """Since it arrived."""
    deadline_in_s: float | None
    """Time left; None: it has no deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the scheduler was made, and gauges. The same trace gives the same counters."""

    num_steps: int
    """Plans made."""
    num_scheduled_tokens: int
    """Token positions in those plans."""
    num_recomputed_tokens: int
    """Of num_scheduled_tokens: those that had been computed, or found in the cache, for the same request before."""
    num_finished: int
    """Requests that ended, for whatever reason."""
    num_timeouts: int
    """Of num_finished: those whose deadline passed."""
    num_refused: int
    """Of num_finished: those that were accepted and could not get memory although it was free."""
    num_preemptions: int
    """Times a running request lost its blocks."""
    num_pauses: int
    """Times a running request had to sit out a step, because there was no block for it and nobody to preempt."""
    num_failed_allocations: int
    """Times a block that was reserved, or free, could not be had."""
    num_deferred_admissions: int
    """Times an admission was put off because another request was computing the very block."""
    num_lookups: int
    """Prefix lookups made to admit and to order requests."""
    num_dropped_results: int
    """Planned sequences whose request was finished or preempted while the step was in flight."""
    num_running: int
    """Now."""
    num_waiting: int
    """Now; deferred and preempted requests included."""
    num_waiting_tokens: int
    """Now: positions that the waiting requests are expected to need, outputs included."""


def distrust(num_prompt_tokens: int) -> MissReport | None:
    """Return the report of a prompt that was computed again as a whole; None when it has one token, never reused."""
    if num_prompt_tokens == 1:
        return None
    span = MissSpan(start=0, end=num_prompt_tokens - 1, reason=MissReason.VERIFICATION_FAILED)
    return MissReport(spans=(span,), num_common_tokens=0)

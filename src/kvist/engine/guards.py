"""Everything that watches over the content of blocks, as the step loop and the cache see it.

Responsible for joining audits (``audit``), refreshes (``refresh``) and recoveries (``recovery``), for what is done in
the background and when, and for the counters. Knows no text.

Work in the background is cut into chunks of at most one step's positions. A chunk runs when nobody has work; and while
requests are in progress when all of them arrived after the last such chunk, so that none is ever delayed by more than
one chunk, and a server that is never idle still gets on with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvist.cache.tree import Node
    from kvist.engine.audit import Auditor
    from kvist.engine.recovery import Recovery
    from kvist.engine.refresh import Refresher
    from kvist.sched.output import StepResult
    from kvist.sched.request import Request
    from kvist.sched.scheduler import Scheduler
    from kvist.types import RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardStats:
    """Counters since the start, and gauges."""

    num_checksums: int = 0
    """Checksums of reused blocks that were compared."""
    num_checksum_failures: int = 0
    """Subset of num_checksums."""
    num_recomputed_blocks: int = 0
    """Reused blocks that were computed again and compared."""
    num_recompute_failures: int = 0
    """Subset of num_recomputed_blocks."""
    num_pending_blocks: int = 0
    """Now: blocks that wait to be computed again."""
    num_skipped_blocks: int = 0
    """Blocks that were to be computed again when too many waited."""
    num_damaged_sequences: int = 0
    """Times that a sequence's logits, K or V were no finite numbers."""
    num_recomputed_sequences: int = 0
    """Sequences computed again from their tokens because of that, or because they held an invalidated block."""
    num_refreshed_blocks: int = 0
    """Lossy blocks that were renewed."""
    num_pending_refreshes: int = 0
    """Now: prefixes that wait to be renewed."""
    num_background_chunks: int = 0
    """Steps computed in the background."""


class Guards:
    """The manager's ``BlockGuard``, and what the step loop calls. Engine thread only.

    Args:
        scheduler: Tells whom a background chunk would delay.
        auditor: Checks blocks.
        recovery: Computes requests again.
        refresher: Renews lossy blocks; None: they are kept as they are.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        auditor: Auditor,
        recovery: Recovery,
        refresher: Refresher | None,
    ) -> None:
        self._scheduler = scheduler
        self._auditor = auditor
        self._recovery = recovery
        self._refresher = refresher
        self._num_arrived_before = 0  # at the last chunk that delayed somebody
        self._num_chunks = 0

    # --- for the cache

    def seal(self, node: Node) -> None:
        """See ``BlockGuard``."""
        node.seal = self._auditor.seal(node)

    def may_copy(self, node: Node) -> bool:
        """See ``BlockGuard``."""
        return self._auditor.may_copy(node)

    def find_damaged(self, nodes: Sequence[Node], copied: Node | None) -> list[Node]:
        """See ``BlockGuard``."""
        damaged = self._auditor.find_damaged(nodes if copied is None else (*nodes, copied))
        if self._refresher is not None and not damaged:
            self._refresher.note_uses(nodes)
        return damaged

    # --- for the step loop

    def after_run(self, result: StepResult, requests: Mapping[RequestId, Request]) -> StepResult:
        """See ``Recovery.after_run``."""
        return self._recovery.after_run(result, requests)

    @property
    def has_work(self) -> bool:
        """Whether something waits to be done in the background."""
        refresher = self._refresher
        return bool(self._auditor.num_pending or (refresher and refresher.num_pending))

    def run_under_load(self) -> None:
        """Run a chunk if no request in progress was delayed by one before. To be called between two steps."""
        if not self.has_work:
            return
        oldest = self._scheduler.oldest_arrival
        if oldest is not None and oldest >= self._num_arrived_before:
            self._num_arrived_before = self._scheduler.num_arrived
            self.run_once()

    def run_once(self) -> None:
        """Run a chunk: of an audit, or of a refresh when no audit waits."""
        self._num_chunks += 1
        if self._auditor.num_pending:
            self._auditor.run_once()
            self._recovery.distrust_holders()
        elif self._refresher is not None:
            self._refresher.run_once()

    def stats(self) -> GuardStats:
        """Return the counters."""
        auditor, recovery, refresher = self._auditor, self._recovery, self._refresher
        return GuardStats(
            num_checksums=auditor.num_checksums,
            num_checksum_failures=auditor.num_checksum_failures,
            num_recomputed_blocks=auditor.num_recomputed,
            num_recompute_failures=auditor.num_recompute_failures,
            num_pending_blocks=auditor.num_pending,
            num_skipped_blocks=auditor.num_skipped,
            num_damaged_sequences=recovery.num_damaged,
            num_recomputed_sequences=recovery.num_recomputed,
            num_refreshed_blocks=0 if refresher is None else refresher.num_refreshed,
            num_pending_refreshes=0 if refresher is None else refresher.num_pending,
            num_background_chunks=self._num_chunks,
        )

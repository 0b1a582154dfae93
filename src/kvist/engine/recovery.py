"""What becomes of requests whose numbers went wrong.

Responsible for the steps from a row that is not finite, or a block that failed its check, to requests that are computed
again from their tokens. Decides nothing about blocks that are fine.

    logits, or K and V of a step, are not finite
      -> every block that the request holds or would be offered again is looked at; those with values that are not
         finite leave the cache with all that follows them
      -> when there is none, the blocks look right and are not: each of them is queued to be computed again and compared
      -> the request is computed again once, reusing nothing. When that fails too, it ends with an error
    a block is invalidated, for this or another reason
      -> running requests that hold it, or something computed from it, are computed again once; tokens they have
         sent stay

Everybody else of the step goes on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvist.cache.hash import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvist.cache.manager import CacheManager
    from kvist.cache.tree import Node
    from kvist.engine.audit import Auditor
    from kvist.sched.output import StepResult
    from kvist.sched.request import Request
    from kvist.sched.scheduler import Scheduler
    from kvist.storage.inspection import BlockInspector
    from kvist.types import RequestId

logger = logging.getLogger(__name__)


class Recovery:
    """Computes requests again. Engine thread only.

    Args:
        manager: Their blocks.
        scheduler: Their order.
        inspector: Reads blocks.
        auditor: Given what looks right and is not.
    """

    def __init__(
        self,
        manager: CacheManager,
        scheduler: Scheduler,
        inspector: BlockInspector,
        auditor: Auditor,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._inspector = inspector
        self._auditor = auditor
        self.num_damaged = 0
        """Times a sequence's numbers were not finite."""
        self.num_recomputed = 0
        """Sequences that were computed again from their tokens, for this or because they held a bad block."""

    def after_run(self, result: StepResult, requests: Mapping[RequestId, Request]) -> StepResult:
        """Deal with what a step has shown, between its run and its apply.

        Args:
            result: Of the step.
            requests: The damaged ones of it that are in progress.

        Returns:
            The result without failures that are mended by computing again. Such requests are preempted: what the step
            computed for them is to be dropped.
        """
        failed = dict(result.failed)
        for request_id, request in requests.items():
            self.num_damaged += 1
            if request.is_distrustful:
                failed[request_id] += (
                    "; it was computed again from its tokens, with nothing from the cache, and failed again"
                )
                continue
            if request.lease is None:
                continue
            num_bad, num_following = self._scrub(request)
            logger.warning(
                "[recovery] %s; %d of its blocks hold such values, and were invalidated with %d that follow; "
                "computing it again from its tokens",
                failed[request_id],
                num_bad,
                num_following,
            )
            self._recompute(request)
            del failed[request_id]
        self.distrust_holders()
        return result._replace(failed=failed)

    def distrust_holders(self) -> None:
        """Compute requests again that hold what was invalidated since the last call, each once at most."""
        leases = self._manager.take_distrusted()
        if not leases:
            return
        for request in self._scheduler.holders(leases):
            if not request.is_distrustful:
                logger.warning(
                    "[recovery] request %s holds blocks that were invalidated; computing it again from its tokens",
                    request.request_id,
                )
                self._recompute(request)

    def _recompute(self, request: Request) -> None:
        self.num_recomputed += self._scheduler.recompute(request.request_id)

    def _scrub(self, request: Request) -> tuple[int, int]:
        """Take what is not finite out of the cache; return how many blocks were, and how many left because of them."""
        lease, manager = request.lease, self._manager
        assert lease is not None
        own: list[Node] = []
        if lease.open_node is not None:
            # It was computed from what is in doubt, and is too short to be computed again and compared.
            own.append(lease.open_node)
        num_bad = 0
        for index, block in enumerate(lease.blocks):
            num_tokens = lease.num_computed_tokens - index * manager.block_size
            if num_tokens <= 0:
                break
            if not self._inspector.is_finite(block.block_id, min(num_tokens, manager.block_size)):
                num_bad += 1
                if block.node is not None:
                    own.append(block.node)
        num_gone = self._invalidate(own)
        # What the next request with these tokens would be offered, until that is finite.
        while True:
            match = manager.match(request.chain, request.num_tokens)
            offered = [*match.nodes, *([] if match.source is None else [match.source])]
            bad = [node for node in offered if not self._is_finite(node)]
            if not bad:
                break
            num_bad += len(bad)
            num_gone += self._invalidate(bad)
        if not num_bad:
            for node in offered:
                self._auditor.examine(node)
        return num_bad, max(0, num_gone - num_bad)

    def _invalidate(self, nodes: list[Node]) -> int:
        taken = self._manager.invalidate(nodes)
        return taken.num_dropped + taken.num_detached

    def _is_finite(self, node: Node) -> bool:
        return self._inspector.is_finite(node.block.block_id, len(node.tokens) // TOKEN_BYTES)

"""Whether blocks that are reused hold what they should.

Responsible for two checks of a block, and for when each is made:

    checksum     taken when a block is sealed, compared when it is reused. Sealed blocks do not change, so any flipped
                 bit is found, and nothing else is. Made at admission, before anything depends on the block
    recompute    the block's tokens are computed again behind the blocks before it, and compared within the codec's
                 error bounds and the noise of computing twice (``storage.inspection``). Finds what was computed
                 wrongly, or damaged before it was sealed, if that matters. Made in the background, once for each
                 sealed block

Either is made for the audited fraction of reuses, drawn for each block of each admission. Knows no requests: what
becomes of those that hold a bad block is ``recovery``'s.

Invariants:
    1. A recomputation writes to the spare block only, which is in no pool.
    2. With a fraction of 1 no admission reuses a block, or copies a head, without a checksum that holds.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.cache.hash import TOKEN_BYTES, unpack
from kvist.sched.output import ScheduledSequence, StepPlan
from kvist.types import RequestId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvist.cache.manager import CacheManager
    from kvist.cache.tree import Node
    from kvist.sched.output import StepResult
    from kvist.storage.inspection import BlockInspector
    from kvist.types import BlockId

logger = logging.getLogger(__name__)

MAX_QUEUED = 4096
"""Blocks waiting to be recomputed. At 64 tokens each and 1,000 tokens/s that is four minutes of idle time."""


@dataclass(slots=True)
class Seal:
    """What is known of a sealed block's content."""

    checksum: bytes | None
    """None: it was not taken, or there was no memory for it."""
    num_uses: int = 0
    """Admissions that reused it since it was computed."""
    is_examined: bool = False
    """Whether it was computed again, or is going to be."""


class Auditor:
    """Checks blocks. Engine thread only.

    Args:
        fraction: Of the reuses of blocks that are audited, [0, 1]; 0 audits only what it is given (``examine``).
        manager: Whose nodes are checked; told what is wrong.
        inspector: Reads their blocks.
        run: Computes a plan.
        spare_block: Written by recomputations; None: there is none, so nothing is recomputed.
        max_tokens: Positions of one recomputing step at most.
        draw: Returns numbers in [0, 1).
    """

    def __init__(  # noqa: PLR0913  # each is another part of the engine
        self,
        *,
        fraction: float,
        manager: CacheManager,
        inspector: BlockInspector,
        run: Callable[[StepPlan], StepResult],
        spare_block: BlockId | None,
        max_tokens: int,
        draw: Callable[[], float],
    ) -> None:
        self._fraction = fraction
        self._manager = manager
        self._inspector = inspector
        self._run = run
        self._spare_block = spare_block
        self._max_tokens = max_tokens
        self._draw = draw
        # With the seal that each had: another one means other content.
        self._queue: deque[tuple[Node, Seal]] = deque()
        self._num_done_tokens = 0  # of the first in the queue
        self.num_checksums = 0
        """Checksums compared."""
        self.num_checksum_failures = 0
        """Subset of num_checksums."""
        self.num_recomputed = 0
        """Blocks computed again and compared."""
        self.num_recompute_failures = 0
        """Subset of num_recomputed."""
        self.num_skipped = 0
        """Blocks that were to be computed again, and for which the queue had no room."""

    @property
    def num_pending(self) -> int:
        """Blocks that wait to be computed again."""
        return len(self._queue)

    def seal(self, node: Node) -> Seal:
        """Return what is to be remembered of a node's block, whose content is final now."""
        if self._fraction <= 0.0:
            return Seal(None)
        try:
            return Seal(self._checksum(node))
        except MemoryError:
            logger.warning("[audit] no memory for the checksum of block %d", node.block.block_id)
            return Seal(None)

    def may_copy(self, node: Node) -> bool:
        """Return whether a node's head may be copied: not out of a block that is still written, if all is audited."""
        return self._fraction < 1.0 or node.seal is not None

    def find_damaged(self, nodes: Sequence[Node]) -> list[Node]:
        """Return those that fail their checksum or have none, of the share that is audited; queue the others of it."""
        damaged: list[Node] = []
        if self._fraction <= 0.0:
            return damaged
        for node in nodes:
            if self._draw() >= self._fraction or not isinstance(node.seal, Seal):
                continue
            if node.seal.checksum is None:
                damaged.append(node)  # nobody knows
                continue
            self.num_checksums += 1
            if self._checksum(node) == node.seal.checksum:
                self.examine(node)
                continue
            self.num_checksum_failures += 1
            logger.warning(
                "[audit] block %d is not what it was when it was sealed; it is not used, and neither is what was "
                "computed from it. If this happens again, check the machine's memory",
                node.block.block_id,
            )
            damaged.append(node)
        return damaged

    def examine(self, node: Node) -> None:
        """Queue a full block to be computed again, unless it was or will be."""
        seal = node.seal
        if node.block_hash is None or not isinstance(seal, Seal) or seal.is_examined:
            return
        if self._spare_block is None:
            return
        if len(self._queue) >= MAX_QUEUED:
            self.num_skipped += 1
            return
        seal.is_examined = True
        self._queue.append((node, seal))

    def run_once(self) -> None:
        """Compute at most ``max_tokens`` positions of the first block in the queue; compare it when it is complete."""
        while self._queue:
            node, seal = self._queue[0]
            if node.block.node is node and node.seal is seal:
                break
            # Evicted, invalidated or computed anew since.
            self._next()
        else:
            return
        try:
            is_done, is_good = self._advance(node)
        except Exception:
            # Whatever the numeric code raises here concerns nobody who waits for an answer.
            logger.exception("[audit] block %d could not be computed again", node.block.block_id)
            self._next()
            return
        if not is_done:
            return
        self._next()
        self.num_recomputed += 1
        if is_good:
            return
        self.num_recompute_failures += 1
        taken = self._manager.invalidate([node])
        logger.warning(
            "[audit] block %d differs from what its tokens give by more than the codec and recomputing explain; "
            "invalidated it and the %d blocks that follow it",
            node.block.block_id,
            taken.num_dropped + taken.num_detached - 1,
        )

    def _next(self) -> None:
        self._queue.popleft()
        self._num_done_tokens = 0

    def _advance(self, node: Node) -> tuple[bool, bool]:
        """Compute some positions; return whether the block is complete, and whether it agrees as far as it is."""
        assert self._spare_block is not None
        tokens = unpack(node.tokens)
        done = self._num_done_tokens
        table = path_of(node)
        start = (len(table) - 1) * self._manager.block_size + done
        now = tokens[done : done + self._max_tokens]
        sequence = ScheduledSequence(
            request_id=RequestId("audit"),
            start=start,
            token_ids=now,
            block_table=(*(before.block.block_id for before in table[:-1]), self._spare_block),
            sample=None,
        )
        result = self._run(StepPlan(step_index=-1, copies=(), sequences=(sequence,)))
        self._num_done_tokens += len(now)
        if result.failed:
            return True, False
        if self._num_done_tokens < len(tokens):
            return False, True
        block_id = node.block.block_id
        excess = self._inspector.excess(block_id, self._spare_block, len(tokens))
        return True, excess <= 1.0

    def _checksum(self, node: Node) -> bytes:
        return self._inspector.checksum(node.block.block_id, len(node.tokens) // TOKEN_BYTES)


def path_of(node: Node) -> list[Node]:
    """Return the nodes from a namespace's first block to a node, both included. O(depth)."""
    path: list[Node] = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        path.append(at)
        at = at.parent
    return path[::-1]

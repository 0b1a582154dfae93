"""Conversations whose blocks are kept in a lossy codec, computed again from their tokens now and then.

Responsible for choosing prefixes by how often they were reused, for computing them again, and for putting the result
in place. What is computed in the ordinary way reads lossy blocks, its own among them, so their error adds to its own
from layer to layer. Here the whole prefix is computed in blocks of its own that are not lossy, from its first token on,
and encoded once at the end: afterwards a block is off by its own encoding and no more.

A block is renewed in place, so it is exactly as visible, held and pinned as before. That is safe for blocks that no
running request reads, and only those are touched; the others wait until nobody does, or until other prefixes have
waited long enough.

Memory: for the prefix at hand, blocks of the other codec, until all of it is in place.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvist.cache.hash import unpack
from kvist.engine.audit import Seal, path_of
from kvist.errors import EngineError
from kvist.kernels.kv_rows import turn
from kvist.sched.output import ScheduledSequence, StepPlan
from kvist.types import BlockId, RequestId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvist.cache.manager import CacheManager
    from kvist.cache.tree import Node
    from kvist.sched.output import StepResult
    from kvist.storage.arena import BlockArena
    from kvist.types import TokenId

logger = logging.getLogger(__name__)

MAX_QUEUED = 256
"""Prefixes waiting to be refreshed; one that finds no room is queued at a later reuse."""


MAX_TRIES = 64
"""Attempts to put the rest of a prefix in place before the next one has its turn."""


@dataclass(slots=True)
class _Job:
    """One prefix being computed again."""

    path: list[Node]
    token_ids: tuple[TokenId, ...]
    arena: BlockArena
    run: Callable[[StepPlan], StepResult]
    num_done: int = 0
    rest: dict[int, None] = field(default_factory=dict)
    """Places in the path that are not renewed yet."""
    num_tries: int = 0


class Refresher:
    """Renews lossy blocks in the background. Engine thread only.

    Args:
        every: Reuses of a block after which its prefix is computed again, >= 1.
        manager: Whose blocks they are.
        arena: Where they are.
        scratch: Makes blocks that are not lossy, so many as asked for, and what computes plans on them.
        max_tokens: Positions of one step at most.
    """

    def __init__(
        self,
        *,
        every: int,
        manager: CacheManager,
        arena: BlockArena,
        scratch: Callable[[int], tuple[BlockArena, Callable[[StepPlan], StepResult]]],
        max_tokens: int,
    ) -> None:
        self._every = every
        self._manager = manager
        self._arena = arena
        self._scratch = scratch
        self._max_tokens = max_tokens
        # An ordered set.
        self._queue: dict[Node, None] = {}
        self._job: _Job | None = None
        self.num_refreshed = 0
        """Blocks renewed."""
        self.num_abandoned = 0
        """Prefixes whose refresh came to nothing: no memory, or numbers that are not finite."""

    @property
    def num_pending(self) -> int:
        """Prefixes that wait, the one at hand included."""
        return len(self._queue) + (self._job is not None)

    def note_uses(self, nodes: Sequence[Node]) -> None:
        """Count a reuse of the full blocks of a prefix, in order; queue it when one of them is due."""
        due = None
        for node in nodes:
            if node.block_hash is None or not isinstance(node.seal, Seal):
                continue
            node.seal.num_uses += 1
            if node.seal.num_uses >= self._every:
                due = node
        if due is not None and len(self._queue) < MAX_QUEUED:
            self._queue[due] = None

    def run_once(self) -> None:
        """Compute at most ``max_tokens`` positions of a prefix; put it in place when it is complete."""
        if self._job is None and not self._begin():
            return
        job = self._job
        assert job is not None
        if job.num_done == len(job.token_ids):
            self._put_in_place(job)
            return
        try:
            is_good = self._advance(job)
        except Exception:
            # Whatever the numeric code raises here concerns nobody who waits for an answer.
            logger.exception("[refresh] a prefix of %d tokens was given up", len(job.token_ids))
            is_good = False
        if not is_good:
            self.num_abandoned += 1
            self._job = None
        elif job.num_done == len(job.token_ids):
            self._put_in_place(job)

    def _begin(self) -> bool:
        while self._queue:
            tip = next(iter(self._queue))
            del self._queue[tip]
            if tip.block.node is not tip:
                continue  # it has left the cache
            if not isinstance(tip.seal, Seal) or tip.seal.num_uses < self._every:
                continue  # renewed as a part of a longer one
            path = path_of(tip)
            token_ids = tuple(token for node in path for token in unpack(node.tokens))
            try:
                arena, run = self._scratch(len(path))
            except EngineError as error:
                logger.warning("[refresh] no memory for %d blocks: %s", len(path), error)
                self.num_abandoned += 1
                continue
            rest = dict.fromkeys(range(len(path)))
            self._job = _Job(path, token_ids, arena, run, rest=rest)
            return True
        return False

    def _advance(self, job: _Job) -> bool:
        start = job.num_done
        now = job.token_ids[start : start + self._max_tokens]
        sequence = ScheduledSequence(
            request_id=RequestId("refresh"),
            start=start,
            token_ids=now,
            block_table=tuple(map(BlockId, range(len(job.path)))),
            sample=None,
        )
        result = job.run(StepPlan(step_index=-1, copies=(), sequences=(sequence,)))
        job.num_done += len(now)
        return not result.failed

    def _put_in_place(self, job: _Job) -> None:
        """Renew what nobody reads now; end the job when that was all, or when it has been tried often enough."""
        codec, size = self._arena.codec, self._arena.kv_spec.block_size
        for index in list(job.rest):
            node = job.path[index]
            block = node.block
            is_there = block.node is node
            if is_there and self._manager.is_read(block):
                continue
            del job.rest[index]
            if is_there:
                values = job.arena.codec.decode(job.arena.head(index, size))
                if codec.turns_keys and not job.arena.codec.turns_keys:
                    values = torch.stack((turn(values[:, 0]), values[:, 1]), dim=1)
                self._arena.head(block.block_id, size).copy_(codec.encode(values))
                self._manager.renewed(node)
                self.num_refreshed += 1
        job.num_tries += 1
        if not job.rest or (self._queue and job.num_tries >= MAX_TRIES):
            self._job = None
            logger.info(
                "[refresh] %d tokens of a prefix were computed again; %d of its %d blocks were in use",
                len(job.token_ids),
                len(job.rest),
                len(job.path),
            )

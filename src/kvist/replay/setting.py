"""The numbers of one engine that a replay runs through.

Responsible for building the real cache manager and scheduler from them. Knows no trace and no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.cache.eviction import STRATEGIES
from kvist.cache.hash import KEY_BYTES, BlockHasher
from kvist.cache.manager import CacheManager
from kvist.errors import ConfigError
from kvist.sched import policy
from kvist.sched.scheduler import DEFAULT_MAX_OVERTAKES, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One engine.

    Raises:
        ConfigError: A number is below 1.
    """

    num_blocks: int
    """Blocks in the pool."""
    block_size: int
    """Tokens per block: the trace's own block size, where it has one, so that hits are exact at its granularity."""
    eviction: str = "default"
    """A name in ``cache.eviction.STRATEGIES``."""
    schedule: str = "fcfs"
    """As ``--schedule``."""
    max_batch_tokens: int = 512
    max_running: int = 64
    max_queue: int = 1024
    max_overtakes: int = DEFAULT_MAX_OVERTAKES
    max_context_len: int = 2**31
    reserve_tokens: int = 256

    def __post_init__(self) -> None:
        if self.eviction not in STRATEGIES:
            raise ConfigError(
                f"[replay] --eviction must be one of {', '.join(STRATEGIES)}, received {self.eviction!r}"
            )
        for name in self.__slots__:
            value = getattr(self, name)
            least = 0 if name == "max_overtakes" else 1
            if isinstance(value, int) and value < least:
                raise ConfigError(f"[replay] {name} must be at least {least}, received {value}")

    def make_manager(self) -> CacheManager:
        """Return an empty cache. Its key is fixed: a replay must give the same result every time."""
        return CacheManager(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            hasher=BlockHasher(bytes(KEY_BYTES)),
            eviction=self.eviction,
            # Nobody asks a replay why a prompt was missed, so nothing is remembered of what left the cache.
            max_ghosts=0,
        )

    def make_scheduler(self, manager: CacheManager, clock: Callable[[], int]) -> Scheduler:
        """Return an idle scheduler on a cache, with a clock in nanoseconds."""
        return Scheduler(
            manager,
            max_batch_tokens=self.max_batch_tokens,
            max_running=self.max_running,
            max_queue=self.max_queue,
            max_context_len=self.max_context_len,
            reserve_tokens=self.reserve_tokens,
            max_overtakes=self.max_overtakes,
            policy=policy.get(self.schedule),
            clock=clock,
        )

"""Allocations that fail: one seam for all tests, and the list of the places where memory can run out.

A site is a function that cannot do without memory for something whose size depends on requests, prompts or batches. It
fails before it has done anything, or where that is how it says so, returns its refusal. What is not among the sites are
objects of some hundred bytes that Python makes on the way (an update, an entry of a heap), and the memory of blocks and
weights: that is taken once, at the start, and refused there.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvist.cache import manager as manager_module
from kvist.cache.manager import CacheManager
from kvist.cache.memory import PromptMemory
from kvist.cache.pending import PendingIdentities
from kvist.cache.pool import BlockPool
from kvist.cache.tree import PrefixTree
from kvist.sched.scheduler import Scheduler
from kvist.storage.slabs import SlabArena

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator

    import pytest

NOTHING = object()
"""A site without a refusal: it raises MemoryError."""


@dataclass(frozen=True)
class Site:
    """A function of a class or module that allocates."""

    owner: Any
    name: str
    refusal: Any = NOTHING
    """What it returns instead of raising, every other time."""

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


CONTROL_PLANE = (
    Site(CacheManager, "new_chain"),  # the tokens of a prompt
    Site(CacheManager, "match"),  # what the cache holds of it
    Site(CacheManager, "admit", None),
    Site(CacheManager, "extend", False),
    Site(BlockPool, "allocate"),  # blocks of a table, and targets of copies
    Site(PromptMemory, "begin"),  # what a prompt is going to compute
    Site(PromptMemory, "publish"),  # what the cache remembers of a block
    Site(PendingIdentities, "add"),
    Site(manager_module, "explain"),  # a miss report
    Site(PrefixTree, "add"),  # published blocks
    Site(PrefixTree, "open"),  # heads of blocks
    Site(CacheManager, "retain"),
    Site(Scheduler, "_sequence"),  # what a plan says of a sequence
)
SLABS = (
    Site(SlabArena, "_carry_out"),
    Site(SlabArena, "_recode"),  # demotions, and copies of heads
    Site(SlabArena, "_new_slab"),
)


class Failures:
    """Makes allocations fail while there is a storm: each with the same probability, and once at least, if it can."""

    def __init__(
        self, sites: Iterable[Site], generator: random.Random, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._random = generator
        self.rate = 0.0
        self.num_failures = {str(site): 0 for site in sites}
        for site in sites:
            self._wrap(site, monkeypatch)

    def _wrap(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(site.owner, site.name)

        def failing(*args: Any, **options: Any) -> Any:
            # Rarely used ones are to fail too.
            rate = self.rate if self.num_failures[str(site)] else max(self.rate, 0.5)
            if self.rate and self._random.random() < rate:
                self.num_failures[str(site)] += 1
                if site.refusal is not NOTHING and self._random.random() < 0.5:
                    return site.refusal
                raise MemoryError(f"no memory for {site}")
            return original(*args, **options)

        monkeypatch.setattr(site.owner, site.name, failing)

    @contextlib.contextmanager
    def storm(self, rate: float) -> Iterator[None]:
        self.rate, kept = rate, self.rate
        try:
            yield
        finally:
            self.rate = kept

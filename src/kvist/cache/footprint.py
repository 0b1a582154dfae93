"""What the blocks of one sequence take while it runs and grows, when their codec depends on their age.

Responsible for the arithmetic behind promises of memory. Knows no blocks, only sizes by age.

A lease computes at most so many positions between two commits, and a commit makes its old blocks smaller. So of its
blocks only so many of the youngest can be large at any time, however long it gets:

    distance from the youngest    0 ......... d1 ........... d2 .........
    takes at most                 raw16       int8           int4              windows recent:w1=raw16,recent:w2=int8

Of ``num_tokens`` positions covered by blocks, at most ``chunk`` are not committed yet, so a block is within a window of
w positions only if fewer than ``chunk + w - 1`` positions lie between its last one and the last one covered:

    d = ceil((chunk + w - 1) / block_size) + 1

Let ``total(n)`` be what the n youngest blocks take. Then (``manager`` relies on both):

    1. A sequence never takes more than ``total`` of the blocks that it has.
    2. What it may still need beside what it has now, to grow from n to N blocks, is ``growth``: the blocks to come as
       they will be at the end, less what those it has will give back by then. It is never less for a larger N, so
       nothing in between needs more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvist.precision import KVBudget


class AgeProfile:
    """What blocks take at most by their distance from the youngest one.

    Args:
        steps: (distance, units), distances never falling, units never rising: blocks nearer to the youngest than that
            distance, and not nearer than the one before, take so much.
        rest: Units of all older ones, at most those of the last step.
        sink: Units of the first block of a sequence once it is out of the first step.
    """

    __slots__ = ("_rest", "_sink", "_steps")

    def __init__(self, steps: Sequence[tuple[int, int]], rest: int, sink: int) -> None:
        self._steps = tuple(steps)
        self._rest = rest
        self._sink = sink

    def size(self, distance: int) -> int:
        """Return what a block takes at most that has so many younger ones. Not for the first of a sequence."""
        for end, size in self._steps:
            if distance < end:
                return size
        return self._rest

    def first_size(self, distance: int) -> int:
        """Return the same for the first block of a sequence."""
        return max(self.size(distance), self._sink)

    def later_size(self, index: int, num_blocks: int) -> int:
        """Return what block ``index`` takes at most once the sequence has so many."""
        distance = num_blocks - 1 - index
        return self.first_size(distance) if index == 0 else self.size(distance)

    def total(self, num_blocks: int) -> int:
        """Return what a sequence of so many blocks takes at most. O(windows)."""
        if num_blocks <= 0:
            return 0
        return self._of_youngest(num_blocks - 1) + self.first_size(num_blocks - 1)

    def growth(
        self, num_blocks: int, num_blocks_at_end: int, own: Iterable[tuple[int, int]]
    ) -> int:
        """Return what a sequence may still need beside what it has, to come to so many blocks.

        Args:
            num_blocks: Those it has.
            num_blocks_at_end: Those it may come to have; no fewer.
            own: (index, size) of those that nobody else keeps from becoming smaller; the others count for nothing.

        Complexity: O(windows) for each.
        """
        num_new = num_blocks_at_end - num_blocks
        need = self._of_youngest(num_new) if num_blocks else self.total(num_new)
        for index, size in own:
            need -= max(0, size - self.later_size(index, num_blocks_at_end))
        return max(0, need)

    def max_blocks(self, num_units: int) -> int:
        """Return how many blocks a sequence alone may come to have in so much memory. O(windows + log blocks)."""
        low, high = 0, num_units // self._rest
        while low < high:
            middle = (low + high + 1) // 2
            if self.total(middle) <= num_units:
                low = middle
            else:
                high = middle - 1
        return low

    def _of_youngest(self, num_blocks: int) -> int:
        """Return what so many of the youngest blocks take, none of them the first of the sequence."""
        total = begin = 0
        for end, size in self._steps:
            total += max(0, min(end, num_blocks) - begin) * size
            begin = end
        return total + max(0, num_blocks - begin) * self._rest


class AgeProfiles:
    """The profiles of one budget, by the positions that a lease computes between two commits.

    Args:
        budget: Sizes and rule.
        block_size: Tokens per block.
    """

    __slots__ = ("_block_size", "_budget", "_known", "max_chunk")

    def __init__(self, budget: KVBudget, block_size: int) -> None:
        self._budget = budget
        self._block_size = block_size
        self._known: dict[int, AgeProfile] = {}
        self.max_chunk = budget.max_chunk
        """Positions between two commits at most."""

    def of(self, chunk: int) -> AgeProfile:
        """Return the profile for so many positions between two commits, or some more, but never above ``max_chunk``."""
        chunk = min(chunk, self.max_chunk)
        if chunk > 1:
            # Few profiles are made, at the cost of a block at most.
            chunk = min(-(-chunk // self._block_size) * self._block_size, self.max_chunk)
        profile = self._known.get(chunk)
        if profile is None:
            profile = self._known[chunk] = self._make(chunk)
        return profile

    def _make(self, chunk: int) -> AgeProfile:
        sizes, rule = self._budget.block_bytes, self._budget.precision
        steps = [
            (-(-(chunk + length - 1) // self._block_size) + 1, sizes[codec])
            for length, codec in rule.windows
        ]
        return AgeProfile(steps, sizes[rule.rest], sizes[rule.sink])

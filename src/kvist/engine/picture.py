"""A survey of the cache, cut down to what fits a screen.

Responsible for sums over blocks: a map of at most MAX_CELLS cells, and the largest prefixes of one tenant. Everything
is vectorised, O(blocks log depth), and runs in any thread. Knows no text and no wire format.

A *prefix* here is a run of blocks that one follows the other, with no branch between them and used equally often:

    blocks            [a][b][c][d]         a..d  hit 9 times, then two continuations
                               +--[e][f]   e..f  hit 3 times
                               +--[g]      g     never hit
    prefixes          (a..d) -> (e..f), (g)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvist.cache.hash import TOKEN_BYTES
from kvist.cache.tree import common_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvist.cache.survey import CacheSurvey

    Integers = NDArray[np.int64]

MAX_CELLS = 2000
"""Cells of the block map: more would be smaller than a thing that can be seen."""
MAX_PREFIXES = 300
"""Prefixes shown of one tenant."""
NAMING_TOKENS = 64
"""Tokens of a prefix that are enough to tell what it is."""
OUTSIDE = -1
"""In place of a row: the root of a namespace."""


class BlockState(IntEnum):
    """What a block is to the cache; the order is that of the counts in a cell."""

    FREE = 0
    """Holds nothing."""
    CACHED = 1
    """Nobody holds it, and it was never hit."""
    REUSED = 2
    """Nobody holds it, and it was hit."""
    HELD = 3
    """Requests hold it."""
    PINNED = 4
    """Pins hold it; requests may too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRow:
    """One of the largest prefixes of a tenant."""

    number: int
    """Its own as long as it is cached."""
    parent: int | None
    """Number of the prefix it continues; None: it begins a prompt."""
    num_tokens: int
    """Its own."""
    num_subtree_tokens: int
    """Its own and those of everything cached that continues it."""
    num_rest_tokens: int
    """The part of num_subtree_tokens in continuations that are no rows."""
    num_blocks: int
    """Its own."""
    num_hits: int
    """Requests that began with it and found it in the cache."""
    num_holders: int
    """Requests and pins that hold it now."""
    computed_ns: int
    """When, on the cache's clock."""
    used_ns: int
    """When last, on the cache's clock."""
    tokens: bytes
    """Of its first blocks, NAMING_TOKENS or more where it has as many; u32 little-endian."""
    num_common: int
    """Of those tokens, the leading ones that all its siblings among the rows share: prompts part within a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPrefixes:
    """The largest prefixes of one tenant."""

    rows: Sequence[PrefixRow]
    """Parents first."""
    num_tokens: int
    """Tokens cached for the tenant in all."""
    num_prefixes: int
    """Prefixes of the tenant in all, rows included."""


class CachePicture:
    """What can be seen of one survey. Nothing changes it, but parts are made when first asked for: one thread.

    Args:
        survey: Of all blocks.
    """

    def __init__(self, survey: CacheSurvey) -> None:
        self._survey = survey
        numbers = _column(survey.numbers)
        # Rows are the published blocks, by the number of their node.
        self._block_ids = np.flatnonzero(numbers)
        self._block_ids = self._block_ids[np.argsort(numbers[self._block_ids])]
        self._numbers = numbers[self._block_ids]
        self._hits = _column(survey.num_hits)[self._block_ids]
        parents = _column(survey.parents)[self._block_ids]
        places = np.searchsorted(self._numbers, parents)
        places[places == len(self._numbers)] = 0
        is_row = self._numbers[places] == parents if len(places) else np.zeros(0, dtype=np.bool_)
        self._parent_numbers = parents
        self._parents: Integers = np.where(is_row, places, OUTSIDE)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._survey.ref_counts)

    @cached_property
    def states(self) -> Integers:
        """The ``BlockState`` of each block. (B,) int64."""
        survey = self._survey
        is_held = _column(survey.ref_counts) > 0
        is_published = _column(survey.numbers) > 0
        is_hit = _column(survey.num_hits) > 0
        states = np.where(is_published, np.where(is_hit, BlockState.REUSED, BlockState.CACHED), 0)
        states[is_held] = BlockState.HELD
        states[list(survey.pinned)] = BlockState.PINNED
        return states.astype(np.int64)

    def cells(self, max_cells: int = MAX_CELLS) -> Integers:
        """Return the blocks by cell and state; a cell is a run of block ids. (cells, states) int64."""
        num_cells = min(max_cells, self.num_blocks)
        cell_of = np.arange(self.num_blocks) * num_cells // self.num_blocks
        flat = np.bincount(
            cell_of * len(BlockState) + self.states, minlength=num_cells * len(BlockState)
        )
        return flat.reshape(num_cells, len(BlockState))

    def state_counts(self) -> Integers:
        """Return the blocks by state. (states,) int64."""
        return np.bincount(self.states, minlength=len(BlockState))

    def tokens_by_tenant(self) -> Mapping[str, int]:
        """Return the tokens cached for each tenant that has any."""
        forest = self._forest
        totals: dict[str, int] = {}
        for root in np.unique(forest.roots).tolist():
            tenant = self._survey.namespaces[root].tenant
            num_tokens = int(forest.num_tokens[forest.roots == root].sum())
            totals[tenant] = totals.get(tenant, 0) + num_tokens
        return totals

    def prefixes(self, tenant: str, max_rows: int = MAX_PREFIXES) -> TenantPrefixes:
        """Return the largest prefixes of a tenant, those of nobody else."""
        forest = self._forest
        roots = [n for n, space in self._survey.namespaces.items() if space.tenant == tenant]
        is_own = np.isin(forest.roots, roots)
        heads = np.flatnonzero(forest.is_head & is_own)
        # A parent has more tokens below it than its child, so the largest ones are closed under it.
        largest = heads[np.argsort(-forest.subtree_tokens[heads], kind="stable")][:max_rows]
        return TenantPrefixes(
            rows=self._rows(largest),
            num_tokens=int(forest.num_tokens[is_own].sum()),
            num_prefixes=len(heads),
        )

    def _rows(self, heads: Integers) -> list[PrefixRow]:
        forest, survey = self._forest, self._survey
        # The parent's block is the last of its prefix; what names the prefix is the first.
        parents = np.where(
            self._parents[heads] == OUTSIDE, OUTSIDE, forest.head_of[self._parents[heads]]
        ).tolist()
        num_shown: dict[int, int] = {}
        siblings: dict[int, list[bytes]] = {}
        beginnings = [self._beginning(forest.rows_of(head)) for head in heads.tolist()]
        for head, parent, tokens in zip(heads.tolist(), parents, beginnings, strict=True):
            num_shown[parent] = num_shown.get(parent, 0) + int(forest.subtree_tokens[head])
            siblings.setdefault(parent, []).append(tokens)
        num_common = {parent: _common(tokens) for parent, tokens in siblings.items()}
        rows = []
        for head, parent, tokens in zip(heads.tolist(), parents, beginnings, strict=True):
            block_id = int(self._block_ids[head])
            own, subtree = int(forest.own_tokens[head]), int(forest.subtree_tokens[head])
            rows.append(
                PrefixRow(
                    number=int(self._numbers[head]),
                    parent=None if parent == OUTSIDE else int(self._numbers[parent]),
                    num_tokens=own,
                    num_subtree_tokens=subtree,
                    num_rest_tokens=subtree - own - num_shown.get(head, 0),
                    num_blocks=int(forest.own_blocks[head]),
                    num_hits=int(self._hits[head]),
                    num_holders=survey.ref_counts[block_id],
                    computed_ns=survey.computed_ns[block_id],
                    used_ns=survey.used_ns[block_id],
                    tokens=tokens,
                    num_common=num_common[parent],
                )
            )
        return rows

    def _beginning(self, rows: Integers) -> bytes:
        """Return the tokens that rows begin with, at least NAMING_TOKENS if they have them."""
        tokens = b""
        for block_id in self._block_ids[rows].tolist():
            if len(tokens) >= NAMING_TOKENS * TOKEN_BYTES:
                break
            tokens += self._survey.tokens[block_id]
        return tokens

    @cached_property
    def _forest(self) -> _Forest:
        return _Forest(
            parents=self._parents,
            parent_numbers=self._parent_numbers,
            num_tokens=_column(self._survey.num_tokens)[self._block_ids],
            hits=self._hits,
        )


class _Forest:
    """Sums along the branches, by row. All arrays are (rows,) int64."""

    def __init__(
        self, *, parents: Integers, parent_numbers: Integers, num_tokens: Integers, hits: Integers
    ) -> None:
        num_rows = len(parents)
        is_top = parents == OUTSIDE
        num_children = np.bincount(parents[~is_top], minlength=num_rows)
        safe = np.where(is_top, 0, parents)
        self.num_tokens = num_tokens
        self.is_head = is_top | (num_children[safe] != 1) | (hits[safe] != hits)
        own = np.arange(num_rows)
        self.head_of = _settle(np.where(self.is_head, own, parents))
        # Rows by prefix; within one in the order of their numbers, which grow from parent to child.
        self._by_head = np.argsort(self.head_of, kind="stable")
        self._heads = self.head_of[self._by_head]
        self.roots = parent_numbers[_settle(np.where(is_top, own, parents))]
        self.own_tokens = _sums(self.head_of, num_tokens)
        self.own_blocks = np.bincount(self.head_of, minlength=num_rows)
        self.subtree_tokens = _subtree_sums(parents, num_tokens)

    def rows_of(self, head: int) -> Integers:
        """Return the first rows of a prefix, enough to name it."""
        start = np.searchsorted(self._heads, head)
        few = self._by_head[start : start + NAMING_TOKENS]
        own: Integers = few[self.head_of[few] == head]
        return own


def _settle(above: Integers) -> Integers:
    """Return for each row the last one of the way that ``above`` leads. O(rows log longest way)."""
    while True:
        further = above[above]
        if np.array_equal(further, above):
            return above
        above = further


def _subtree_sums(parents: Integers, values: Integers) -> Integers:
    """Return the sum over each row and everything below it. O(rows log depth).

    After k rounds a row has the sum over what is less than 2**k below it, and ``above`` leads 2**k up.
    """
    num_rows = len(parents)
    # One row more, above all roots, that is thrown away.
    above = np.append(np.where(parents == OUTSIDE, num_rows, parents), num_rows)
    sums = np.append(values, 0)
    while (above != num_rows).any():
        sums += _sums(above, sums)
        sums[num_rows] = 0
        above = above[above]
    return sums[:num_rows]


def _sums(places: Integers, values: Integers) -> Integers:
    """Return the sum of the values at each place. Exact: float64 holds every integer below 2**53."""
    sums = np.bincount(places, weights=values, minlength=len(values))
    return sums.astype(np.int64)


def _column(values: Sequence[int]) -> Integers:
    return np.asarray(values).astype(np.int64)


def _common(tokens: Sequence[bytes]) -> int:
    """Return how many leading tokens all of several runs share; 0 for one alone. O(bytes)."""
    # What the first and the last of a sorted list begin with, all between them begin with.
    return common_tokens(min(tokens), max(tokens)) if len(tokens) > 1 else 0

"""Token ids made up for a trace, such that the real hashing and comparison find exactly what the trace says is equal.

Responsible for the ids and for a request that carries them cheaply. Knows no time and no blocks of the cache.

    block id b of the trace      every token of the block is 2 b
    tokens that nobody shares    2 n + 1, where n numbers the request: the rest of its prompt, and its output

An id of a trace stands for a block with its prefix, so blocks with equal ids follow equal blocks, and sequences share
tokens exactly as far as their ids agree. Two records share the head of a shorter last block as well.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from kvist.cache.hash import TOKEN_BYTES
from kvist.errors import TraceError
from kvist.sched.request import Request
from kvist.types import TokenId

if TYPE_CHECKING:
    from kvist.replay.traces import TraceRequest

MAX_IDS = 2**31
"""Block ids and requests of a trace at most, since a token id has 32 bits."""


def own_token(number: int) -> TokenId:
    """Return the token id that only request ``number`` of the trace has."""
    return TokenId(2 * number + 1)


def prompt_of(record: TraceRequest, number: int) -> array[int]:
    """Return the token ids of a request's prompt. O(tokens), without a Python loop over them.

    Raises:
        TraceError: A block id is too large.
    """
    size = record.block_size
    parts = []
    for run in record.block_runs:
        if run.stop > MAX_IDS:
            raise TraceError(f"[replay] block ids must be below {MAX_IDS}, received {run.stop - 1}")
        parts += [(2 * block_id).to_bytes(TOKEN_BYTES, sys.byteorder) * size for block_id in run]
    num_tokens = record.num_input_tokens
    num_missing = num_tokens - len(parts) * size
    if num_missing > 0:
        parts.append(own_token(number).to_bytes(TOKEN_BYTES, sys.byteorder) * num_missing)
    tokens = array("I", b"".join(parts))
    del tokens[num_tokens:]
    return tokens


@lru_cache(maxsize=4096)
def _placeholder(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


class _UnseenTokens:
    """The tokens of a sequence of which nobody asks more than their number: a step of the simulation computes none.

    A list of 100,000 integers per request would cost more than all the rest.
    """

    __slots__ = ()

    def __getitem__(self, index: slice) -> tuple[int, ...]:
        return _placeholder(index.stop - index.start)

    def append(self, token_id: int) -> None:
        """Keep nothing: ``Request.num_tokens`` counts."""


_UNSEEN = cast("list[TokenId]", _UnseenTokens())


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedRequest(Request):
    """A request whose output is known beforehand."""

    number: int
    """Its place in the trace, from 0."""
    session: str
    """Whom it belongs to; empty: unknown."""
    num_output_wanted: int
    """Tokens that it generates."""

    # Times in picoseconds; -1: not yet.
    arrival_ps: int = 0
    started_ps: int = -1
    """Beginning of the first step that computed something of it."""
    first_token_ps: int = -1
    last_token_ps: int = -1
    asleep_since: int = -1
    """Index of the first step that it sleeps through."""

    def __post_init__(self) -> None:
        self.token_ids = _UNSEEN
        self.num_tokens = self.num_prompt_tokens = len(self.prompt_token_ids)
        self.needs_history = self.params.needs_history
        self.takes_best = self.params.takes_best

    def append_many(self, num_tokens: int) -> None:
        """Add so many output tokens at once."""
        self.num_tokens += num_tokens
        self.chain.extend(array("I", [own_token(self.number)]) * num_tokens)

    @property
    def num_output_left(self) -> int:
        """Tokens still to generate."""
        return self.num_output_wanted - self.num_output_tokens

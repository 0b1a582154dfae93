"""Outputs that go round in circles, told while they are produced.

Responsible for two signs, looked for in the token ids of one output:

    loop       the end of the output repeats a run of p tokens, p in [1, 64], exactly: at least MIN_REPEATS times, and
               over at least MIN_LOOP_TOKENS tokens
    entropy    the last WINDOW tokens are drawn from so few that their empirical entropy is below MIN_ENTROPY_BITS, in
               whatever order they come

Looked at every STRIDE tokens, so a sign is seen at most that much later than it is there. Knows no text: spaces, rules
of a table and indentation are tokens like others, and the bounds are such that ordinary lists, tables and code stay
below them (``tests/unit/engine/test_degeneration.py`` measures it on real texts).

Complexity: O(1) amortised for each token: every STRIDE tokens at most MAX_PERIOD comparisons of two numbers, and of two
slices for the periods that fit, of which there are few unless it is a loop.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvist.types import Degeneration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvist.types import TokenId

MAX_PERIOD = 64
MIN_REPEATS = 10
MIN_LOOP_TOKENS = 128
STRIDE = 16
WINDOW = 256
MIN_ENTROPY_BITS = 2.0

_WEIGHTS = [0.0] + [count * math.log2(count) for count in range(1, WINDOW + 1)]
"""The entropy of W tokens is log2 W minus the mean of these over W, by how often each token occurs."""


class DegenerationWatch:
    """Watches one output. Engine thread only."""

    __slots__ = ("_counts", "_num_until_look", "_sum", "_token_ids", "found")

    def __init__(self) -> None:
        self._token_ids: list[TokenId] = []
        self._counts: dict[TokenId, int] = {}
        self._sum = 0.0
        self._num_until_look = STRIDE
        self.found: Degeneration | None = None
        """The first sign that was seen; None: none so far."""

    def append(self, token_ids: Iterable[TokenId]) -> None:
        """Take further tokens of the output."""
        for token_id in token_ids:
            if self.found is not None:
                return  # nothing changes any more
            self._token_ids.append(token_id)
            self._count(token_id)
            self._num_until_look -= 1
            if self._num_until_look == 0:
                self._num_until_look = STRIDE
                self.found = self._loop() or self._collapse()

    def _count(self, token_id: TokenId) -> None:
        tokens, counts = self._token_ids, self._counts
        before = counts.get(token_id, 0)
        counts[token_id] = before + 1
        self._sum += _WEIGHTS[min(before + 1, WINDOW)] - _WEIGHTS[before]
        if len(tokens) > WINDOW:
            oldest = tokens[-WINDOW - 1]
            count = counts[oldest]
            self._sum += _WEIGHTS[count - 1] - _WEIGHTS[min(count, WINDOW)]
            if count == 1:
                del counts[oldest]
            else:
                counts[oldest] = count - 1

    def _loop(self) -> Degeneration | None:
        tokens = self._token_ids
        last, num_tokens = tokens[-1], len(tokens)
        for period in range(1, MAX_PERIOD + 1):
            span = max(MIN_LOOP_TOKENS, MIN_REPEATS * period)
            if span > num_tokens:
                return None  # so are all longer ones
            if tokens[-1 - period] != last:
                continue
            if tokens[-span + period :] != tokens[-span : num_tokens - period]:
                continue
            # How far back it goes: the loop may have begun before the last look.
            start = num_tokens - span
            while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
                start -= 1
            return Degeneration(kind="loop", start=start, period=period)
        return None

    def _collapse(self) -> Degeneration | None:
        if len(self._token_ids) < WINDOW:
            return None
        entropy = math.log2(WINDOW) - self._sum / WINDOW
        if entropy >= MIN_ENTROPY_BITS:
            return None
        return Degeneration(
            kind="entropy",
            start=len(self._token_ids) - WINDOW,
            entropy_bits=max(0.0, round(entropy, 3)),
        )

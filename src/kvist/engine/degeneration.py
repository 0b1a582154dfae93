"""Outputs that go round in circles, told while they are produced.

Responsible for two signs, looked for in the token ids of one output:

    loop       the end of the output repeats a run of p tokens, p in [1, 64], exactly: at least MIN_REPEATS times, and
               over at least MIN_LOOP_TOKENS tokens
    entropy    the last WINDOW tokens are drawn from so few that their empirical entropy is below MIN_ENTROPY_BITS, in
               whatever order they come

Looked at every STRIDE tokens, so a sign is seen at most that much later than it is there. Knows no text: spaces, rules
of a table and indentation are tokens like others, and the bounds are such that ordinary lists, tables and code stay
below them (``tests/unit/engine/test_degeneration.py`` measures it on real texts).

Complexity: O(1) amortised for each token: every STRIDE tokens at most MAX_PERIOD comparisons of two numbers, of two
slices for the periods that fit, of which there are few unless it is a loop, and WINDOW tokens counted.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from kvist.types import Degeneration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.types import TokenId

MAX_PERIOD = 64
MIN_REPEATS = 10
MIN_LOOP_TOKENS = 128
STRIDE = 16
WINDOW = 256
MIN_ENTROPY_BITS = 2.0


class DegenerationWatch:
    """Watches one output. Engine thread only."""

    __slots__ = ("_next_look", "_token_ids", "found")

    def __init__(self) -> None:
        self._token_ids: list[TokenId] = []
        self._next_look = STRIDE
        self.found: Degeneration | None = None
        """The first sign that was seen; None: none so far."""

    def append(self, token_ids: Sequence[TokenId]) -> None:
        """Take further tokens of the output, a few at a time."""
        if self.found is not None:
            return  # nothing changes any more
        self._token_ids += token_ids
        if len(self._token_ids) >= self._next_look:
            self._next_look = len(self._token_ids) + STRIDE
            self.found = self._loop() or self._collapse()

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
        counts = Counter(self._token_ids[-WINDOW:]).values()
        # The entropy is at least that of the most frequent token's share alone, so mostly this is enough.
        if max(counts) <= WINDOW * 2.0**-MIN_ENTROPY_BITS:
            return None
        entropy = math.log2(WINDOW) - sum(n * math.log2(n) for n in counts) / WINDOW
        if entropy >= MIN_ENTROPY_BITS:
            return None
        return Degeneration(
            kind="entropy",
            start=len(self._token_ids) - WINDOW,
            entropy_bits=round(max(0.0, entropy), 3),
        )

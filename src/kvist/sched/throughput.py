"""How fast the engine works, and so how long a refused client should wait.

Responsible for one running average. Knows no request. Time is given by the caller, from a monotonic clock.
"""

from __future__ import annotations

MIN_RETRY_AFTER_S = 1.0
"""Long enough not to hammer."""
MAX_RETRY_AFTER_S = 60.0
"""Short against the patience of a client library; a queue that is still full answers the same again."""

_DECAY = 0.5 ** (1 / 32)
# Half of the weight is in the last 32 steps: a second or two of decoding, or the last few thousand prompt tokens.


class Throughput:
    """Token positions per second of computing, over the last steps. Idle time does not count."""

    __slots__ = ("_num_tokens", "_seconds")

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The average; 0 before the first step."""
        return self._num_tokens / self._seconds if self._seconds > 0 else 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Add one step."""
        self._num_tokens = self._num_tokens * _DECAY + num_tokens
        self._seconds = self._seconds * _DECAY + seconds

    def retry_after_s(self, num_tokens: int) -> float:
        """Return how long so much work takes, within the bounds above; the least of them before the first step."""
        rate = self.tokens_per_s
        wait_s = num_tokens / rate if rate > 0 else 0.0
        return min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

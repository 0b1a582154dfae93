"""How long a sequence may get, and what it reserves.

Responsible for the arithmetic of lengths, and for refusing what can never fit. Knows no queue and no step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.errors import PromptTooLong, RequestError

if TYPE_CHECKING:
    from kvist.cache.manager import CacheManager
    from kvist.sched.request import Request


class Lengths:
    """The limits of one engine.

    Args:
        manager: The blocks; only their number and size are asked for.
        max_context_len: Tokens of one sequence at most, prompt and output.
        reserve_tokens: Output tokens reserved ahead for a request that sets no ``max_tokens``, >= 1.
    """

    def __init__(self, manager: CacheManager, max_context_len: int, reserve_tokens: int) -> None:
        self._manager = manager
        self._max_context_len = max_context_len
        self._reserve_tokens = reserve_tokens

    def max_tokens_of(self, request: Request) -> int:
        """Return how long the sequence may get, prompt and output.

        Without ``max_tokens`` that is the context or, if smaller, what the pool can hold beside all pins. The last
        token needs no K and V: nothing comes after it.
        """
        if request.params.max_tokens is not None:
            return request.num_prompt_tokens + request.params.max_tokens
        pool_len = self._manager.max_blocks_alone * self._manager.block_size + 1
        return min(self._max_context_len, pool_len)

    def footprint(self, request: Request) -> int:
        """Return the positions to reserve at admission: all that will ever be written, or so many more outputs."""
        max_tokens = self.max_tokens_of(request)
        if request.params.max_tokens is None:
            max_tokens = min(max_tokens, request.num_tokens + self._reserve_tokens)
        return max(max_tokens - 1, request.num_prompt_tokens)

    def check_fits(self, request: Request) -> None:
        """Refuse a request that could never run.

        Raises:
            RequestError: The prompt is empty.
            PromptTooLong: The sequence cannot fit the context or the whole pool.
        """
        num_prompt, max_output = request.num_prompt_tokens, request.params.max_tokens
        if num_prompt == 0:
            raise RequestError(
                "[scheduler] the prompt must have at least one token, received none", param="prompt"
            )
        # Without max_tokens there must be room for one output token at least.
        wanted = num_prompt + (1 if max_output is None else max_output)
        output = "room for output" if max_output is None else f"max_tokens={max_output}"
        if wanted > self._max_context_len:
            raise PromptTooLong(
                f"[scheduler] prompt and output must fit the context of {self._max_context_len} tokens, received "
                f"{num_prompt} prompt tokens and {output}, {wanted} in all; shorten the prompt, lower max_tokens "
                "or raise --max-context",
                param=self._param_at_fault(num_prompt < self._max_context_len, max_output),
            )
        footprint = self.footprint(request)
        if not self._manager.can_ever_admit(footprint):
            raise PromptTooLong(
                f"[scheduler] prompt and output must fit the KV memory of {self._manager.num_blocks} blocks "
                f"(block_size={self._manager.block_size}), received {num_prompt} prompt tokens and {output}, "
                f"which need {self._manager.num_blocks_for(footprint)} blocks; shorten the prompt, lower max_tokens "
                "or raise --memory-gib",
                param=self._param_at_fault(self._manager.can_ever_admit(num_prompt), max_output),
            )

    @staticmethod
    def _param_at_fault(prompt_fits: bool, max_output: int | None) -> str:  # noqa: FBT001
        return "max_tokens" if prompt_fits and max_output is not None else "prompt"

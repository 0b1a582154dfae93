"""One prompt through the engine, with the numbers that a person wants to see afterwards.

Responsible for timing at the caller and for adding up usage. Knows the engine's public interface only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvist.engine.async_engine import AsyncEngine
    from kvist.types import OutputChunk, SamplingParams, TokenLogprobs, Usage


@dataclass(slots=True)
class Choice:
    """One of the sequences generated from a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    usage: Usage | None = None

    def add(self, chunk: OutputChunk) -> None:
        """Append what a chunk brings."""
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason.value
        if chunk.usage is not None:
            self.usage = chunk.usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one prompt produced, and what it cost."""

    choices: tuple[Choice, ...]
    ttft_s: float
    """From submission to the first output token."""
    e2e_s: float
    """From submission to the last output token."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of each sequence."""
        return tuple(choice.text for choice in self.choices)

    @property
    def usages(self) -> tuple[Usage, ...]:
        """The usage of each sequence that ended by itself."""
        return tuple(choice.usage for choice in self.choices if choice.usage is not None)

    def numbers(self) -> dict[str, Any]:  # Any: int and float
        """Return tokens, times and speed by name; sums over the sequences, the prompt counted once."""
        num_output_tokens = sum(usage.num_output_tokens for usage in self.usages)
        decode_s = self.e2e_s - self.ttft_s
        first = self.usages[0]
        return {
            "num_prompt_tokens": first.num_prompt_tokens,
            "num_cached_tokens": first.num_cached_tokens,
            **({"cached_by_codec": dict(first.cached_by_codec)} if first.cached_by_codec else {}),
            "num_computed_tokens": sum(usage.num_computed_tokens for usage in self.usages),
            "num_output_tokens": num_output_tokens,
            "ttft_s": round(self.ttft_s, 6),
            "e2e_s": round(self.e2e_s, 6),
            # The first token of each sequence belongs to the prefill.
            "output_tokens_per_s": round((num_output_tokens - len(self.choices)) / decode_s, 3)
            if decode_s > 0 and num_output_tokens > len(self.choices)
            else None,
        }

    def summary(self) -> str:
        """Return the numbers as one line for a person."""
        numbers = self.numbers()
        speed = numbers["output_tokens_per_s"]
        codecs = ", ".join(f"{n} in {codec}" for codec, n in self.usages[0].cached_by_codec.items())
        return (
            f"reused {numbers['num_cached_tokens']} of {numbers['num_prompt_tokens']} prompt tokens"
            f"{f' ({codecs})' if codecs else ''}, "
            f"computed {numbers['num_computed_tokens']}; TTFT {format_seconds(self.ttft_s)}; "
            f"{numbers['num_output_tokens']} tokens out"
            + (f" at {speed:.1f} tokens/s" if speed is not None else "")
        )


def run_turn(
    engine: AsyncEngine,
    token_ids: Sequence[int],
    params: SamplingParams,
    on_chunk: Callable[[OutputChunk], None],
) -> Turn:
    """Run one prompt to its end.

    Args:
        engine: A started engine.
        token_ids: The prompt.
        params: Sampling parameters.
        on_chunk: Called with every chunk as it arrives.

    Raises:
        EngineError: The engine refused or failed the request.

    Side effects: Cancels the request when it is left early (Ctrl-C).
    """
    choices = tuple(Choice() for _ in range(params.n))
    start_ns = time.perf_counter_ns()
    first_ns: int | None = None
    with engine.submit(token_ids, params) as stream:
        for chunk in stream:
            if first_ns is None and chunk.token_ids:
                first_ns = time.perf_counter_ns()
            choices[chunk.index].add(chunk)
            on_chunk(chunk)
    end_ns = time.perf_counter_ns()
    return Turn(
        choices=choices,
        ttft_s=((first_ns or end_ns) - start_ns) / 1e9,
        e2e_s=(end_ns - start_ns) / 1e9,
    )


def format_seconds(seconds: float) -> str:
    """Return a duration in ms below one second, in s above."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1.0 else f"{seconds:.2f} s"

"""The work that every peer does: the same token ids, the same counts, cut from one text.

Responsible for what is asked, row by row and run by run, and for the one number that each row makes of the answers.
Knows nothing of who answers.

Each row of the table, with P the prompt length (2,048 by default):

    cold      P tokens never seen before (another slice of the text in every run), two output tokens: P / TTFT
    warm      P tokens that are cached and a question that is not: TTFT, the median over the questions of a run
    decode    one stream after a short prompt: (tokens - 1) / time between the first and the last
    fanout    many requests at once, P cached tokens and an own question each: all output tokens / wall time
    chat      some chats of P / 2 tokens each, cached, taking turns: mean TTFT of the turns. A turn appends a question
              and, afterwards, a fixed answer: the same text for every peer, so what a peer answered is not reused
    kv_cache  one stream with the KV cache and without it: output tokens / wall time

"Cached" means: an untimed request with the same beginning came before, in the same run. Token ids, not text, are what
peers receive, so that no two of them count differently.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvist.errors import BenchError

Prompt = list[int]

SANITY_TEXTS = (
    "The capital of France is",
    "One, two, three, four, five,",
    "Monday, Tuesday, Wednesday,",
    "2 + 2 =",
    "The opposite of hot is",
    "A, B, C, D, E, F,",
    "Once upon a time, there was a",
    "import numpy as",
)
"""Prompts whose continuation a small model is sure of, in any precision."""
SANITY_TOKENS = 8
CHECKED_TOKENS = 4
"""Output tokens that are compared with the reference's."""
NUM_CANDIDATES = 10
"""Likeliest tokens of the reference, of which an output's must be one."""

QUESTION = "\n\nQuestion {number:04d}: who is speaking here, and to whom? Answer:"
DECODE_PROMPT = "Chapter {number:04d}. It was a bright morning, and the whole town"
CHAT_QUESTION = "\n\nQuestion {number:04d}: what happens after that? Answer:"
CHAT_ANSWER = " They all go home together, and nobody speaks of it again."
NUM_WARM_QUESTIONS = 3
NUM_CHATS = 4
NUM_TURNS = 3
CHAT_TOKENS = 16
COLD_TOKENS = 2
KV_CACHE_TOKENS = 32
SLICE_STEP = 331
"""Tokens from one cold slice to the next: they may overlap, but no two begin alike, so no prefix cache can help."""


class Encoder(Protocol):
    """The part of a tokeniser that is needed here."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the token ids of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is asked."""

    prompt_tokens: int = 2048
    """P."""
    decode_tokens: int = 128
    fanout: int = 16
    """Requests at once."""
    fanout_tokens: int = 64
    """Output tokens of each."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are sent at the same time."""

    prompts: tuple[Prompt, ...]
    max_tokens: int
    """Output tokens of each, end tokens ignored."""


@dataclass(frozen=True, slots=True)
class Task:
    """What one row asks in one run."""

    primes: tuple[Batch, ...]
    """Untimed, before; they leave in the cache what the row assumes there."""
    timed: tuple[Batch, ...]
    """One after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What came back for one prompt. Times are in seconds since the batch was sent."""

    num_tokens: int
    token_ids: tuple[int, ...] | None
    """None when the peer tells no ids."""
    text: str | None
    """None when the peer tells ids."""
    first_s: float
    last_s: float
    num_cached_tokens: int | None = None
    """Prompt tokens that were not computed, by the peer's own count; None when it does not say."""


Answers = Sequence[Sequence[Output]]
"""The outputs of each timed batch of a task."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    title: str
    unit: str
    """``tokens/s``: more is better. ``s``: less is better."""
    measure: Callable[[Task, Answers], float]
    is_checked: bool
    """Whether the beginnings of the outputs are compared with the reference."""

    @property
    def is_speed(self) -> bool:
        """Whether more is better."""
        return self.unit != "s"


def _prefill_speed(task: Task, answers: Answers) -> float:
    return len(task.timed[0].prompts[0]) / answers[0][0].first_s


def _median_ttft_s(task: Task, answers: Answers) -> float:
    del task
    return statistics.median([output.first_s for outputs in answers for output in outputs])


def _mean_ttft_s(task: Task, answers: Answers) -> float:
    del task
    return statistics.fmean([output.first_s for outputs in answers for output in outputs])


def _decode_speed(task: Task, answers: Answers) -> float:
    del task
    (output,) = answers[0]
    return (output.num_tokens - 1) / (output.last_s - output.first_s)


def _total_speed(task: Task, answers: Answers) -> float:
    del task
    (outputs,) = answers
    return sum(output.num_tokens for output in outputs) / max(output.last_s for output in outputs)


ROWS = (
    Row("cold", "cold prefill", "tokens/s", _prefill_speed, is_checked=False),
    Row("warm", "warm TTFT", "s", _median_ttft_s, is_checked=True),
    Row("decode", "decode, one stream", "tokens/s", _decode_speed, is_checked=True),
    Row("fanout", "fan-out, shared prefix", "tokens/s", _total_speed, is_checked=True),
    Row("chat", "interleaved chats, TTFT", "s", _mean_ttft_s, is_checked=False),
    Row("kv_cache", "KV cache on or off", "tokens/s", _total_speed, is_checked=False),
)

KV_CACHE = "kv_cache"
"""The row that only Kvist's own configurations run."""


def rows_named(names: Sequence[str]) -> tuple[Row, ...]:
    """Return the rows of these names, in the order of the table.

    Raises:
        BenchError: A name is unknown.
    """
    known = [row.name for row in ROWS]
    for name in names:
        if name not in known:
            raise BenchError(f"[bench] --rows must be of {', '.join(known)}, received {name!r}")
    return tuple(row for row in ROWS if row.name in names)


class Workload:
    """All tasks, cut from one text.

    Args:
        tokenizer: The model's.
        text: Real text; needs at least ``Sizes.prompt_tokens`` and a few slices more.
        sizes: How much is asked.
        num_runs: How often.

    Raises:
        BenchError: The text is too short.
    """

    def __init__(self, tokenizer: Encoder, text: str, sizes: Sizes, num_runs: int) -> None:
        self.sizes = sizes
        self._tokenizer = tokenizer
        self._text_ids = tokenizer.encode(text, add_special_tokens=False)
        num_slices = num_runs + 1 + NUM_CHATS
        needed = sizes.prompt_tokens + SLICE_STEP * num_slices
        if len(self._text_ids) < needed:
            raise BenchError(
                f"[bench] --text must have {needed:,} tokens at least, it has {len(self._text_ids):,}; "
                "give a longer one or lower --prompt-tokens or --runs"
            )

    def sanity(self) -> tuple[Batch, ...]:
        """Return the known prompts, one after the other."""
        return tuple(Batch((self._ids(text),), SANITY_TOKENS) for text in SANITY_TEXTS)

    def task(self, row: Row, run: int) -> Task:
        """Return what a row asks in a run; runs count from 0."""
        return getattr(self, f"_{row.name}")(run)  # type: ignore[no-any-return]  # one method for each row

    def _ids(self, text: str) -> Prompt:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _slice(self, index: int, num_tokens: int) -> Prompt:
        return self._text_ids[index * SLICE_STEP :][:num_tokens]

    @property
    def _prefix(self) -> Prompt:
        return self._slice(0, self.sizes.prompt_tokens)

    def _question(self, number: int) -> Prompt:
        return self._ids(QUESTION.format(number=number))

    def _prime_prefix(self) -> tuple[Batch, ...]:
        return (Batch(([*self._prefix, *self._question(0)],), 1),)

    def _cold(self, run: int) -> Task:
        prompt = self._slice(1 + NUM_CHATS + run, self.sizes.prompt_tokens)
        return Task((), (Batch((prompt,), COLD_TOKENS),))

    def _warm(self, run: int) -> Task:
        questions = [self._question(1000 + 10 * run + index) for index in range(NUM_WARM_QUESTIONS)]
        timed = [Batch(([*self._prefix, *question],), CHECKED_TOKENS) for question in questions]
        return Task(self._prime_prefix(), tuple(timed))

    def _decode(self, run: int) -> Task:
        prompt = self._ids(DECODE_PROMPT.format(number=run + 1))
        return Task((), (Batch((prompt,), self.sizes.decode_tokens),))

    def _fanout(self, run: int) -> Task:
        questions = [self._question(2000 + 100 * run + index) for index in range(self.sizes.fanout)]
        prompts = tuple([*self._prefix, *question] for question in questions)
        return Task(self._prime_prefix(), (Batch(prompts, self.sizes.fanout_tokens),))

    def _chat(self, run: int) -> Task:
        answer = self._ids(CHAT_ANSWER)
        histories = [
            self._slice(1 + index, self.sizes.prompt_tokens // 2) for index in range(NUM_CHATS)
        ]
        timed: list[Batch] = []
        primes: tuple[Batch, ...] = ()
        for turn in range((run + 1) * NUM_TURNS):
            question = self._ids(CHAT_QUESTION.format(number=turn))
            if turn == run * NUM_TURNS:
                primes = tuple(Batch((list(history),), 1) for history in histories)
            for history in histories:
                history.extend(question)
                if primes:
                    timed.append(Batch((list(history),), CHAT_TOKENS))
                history.extend(answer)
        return Task(primes, tuple(timed))

    def _kv_cache(self, run: int) -> Task:
        start = SLICE_STEP // 2 + run * SLICE_STEP
        prompt = self._text_ids[start : start + self.sizes.prompt_tokens // 8]
        return Task((), (Batch((prompt,), KV_CACHE_TOKENS),))

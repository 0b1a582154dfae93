"""What a KV codec costs in tasks: a continuation that stays the same, and values found again by their keys.

Responsible for the two tasks and for prompts that fit. Both are read off one pass over known tokens: a model would have
generated them exactly if each is the most probable one after those before it. Knows neither files nor the command line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from blake3 import blake3

from kvist.codecs.rotated import SPAN
from kvist.errors import ConfigError
from kvist.storage.arena import BlockArena
from kvist.tune.quality import Score, block_spec, side_by_side

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvist.codecs.transforms import KVTransforms
    from kvist.tune.quality import Computer


class Encoder(Protocol):
    """A tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002  # as it is there
        """Return the tokens of a text, with or without what begins every sequence."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A prompt and how many tokens are generated after it."""

    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and the tokens that answer it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Both."""
        return self.prompt + self.answer

    @property
    def digest(self) -> str:
        """Of its tokens."""
        numbers = np.asarray([len(self.prompt), *self.prompt, *self.answer], np.int64)
        return str(blake3(numbers.tobytes()).hexdigest(8))


def greedy_score(
    computer: Computer,
    transforms: KVTransforms,
    text: Continuation,
    names: Sequence[str],
    on_computed: Callable[[int], None],
) -> dict[str, Score]:
    """Return how much of a greedy continuation stays the same in each setting; arguments as ``score_window``."""
    prompt, num_tokens = text.prompt, text.num_tokens
    tokens = [*prompt, *continuation(computer, prompt, num_tokens)]
    is_same = {name: np.ones(len(tokens) - 1, bool) for name in names}
    for chunk in side_by_side(computer, transforms, tokens[:-1], names, on_computed):
        same = (chunk.reference.argmax(-1) == chunk.logprobs.argmax(-1)).numpy()
        is_same[chunk.name][chunk.start : chunk.start + len(same)] = same
    scores = {}
    for name, same in is_same.items():
        generated = same[len(prompt) - 1 :]
        agreed = num_tokens if generated.all() else int(generated.argmin())
        scores[name] = Score(generated=num_tokens, generated_agreed=agreed)
    return scores


def continuation(computer: Computer, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what the model generates when it takes the most probable token each time, without a codec."""
    kv_spec = block_spec(computer.spec, computer.reference)
    arena = BlockArena(kv_spec, kv_spec.num_blocks_for(len(prompt) + num_tokens))
    table = [range(arena.num_blocks)]
    generated: list[int] = []
    start, chunk = 0, tuple(prompt[:SPAN])
    while len(generated) < num_tokens:
        logits = computer.logits(start, chunk, table, arena)
        start += len(chunk)
        chunk = tuple(prompt[start : start + SPAN])
        if not chunk:
            generated.append(int(logits[0, -1].argmax()))
            chunk = (generated[-1],)
    return generated


def retrieval_score(
    computer: Computer,
    transforms: KVTransforms,
    text: Question,
    names: Sequence[str],
    on_computed: Callable[[int], None],
) -> dict[str, Score]:
    """Return whether the model answers a question exactly, in each setting and without; see ``score_window``."""
    tokens, first = text.tokens, len(text.prompt) - 1
    is_right = {name: np.ones((2, len(tokens) - 1), bool) for name in names}
    expected = np.asarray(tokens[1:])
    for chunk in side_by_side(computer, transforms, tokens[:-1], names, on_computed):
        for row, logprobs in enumerate((chunk.reference, chunk.logprobs)):
            best = logprobs.argmax(-1).numpy()
            positions = slice(chunk.start, chunk.start + len(best))
            is_right[chunk.name][row, positions] = best == expected[positions]
    return {
        name: Score(
            asked=1,
            retrieved=int(right[1, first:].all()),
            reference_retrieved=int(right[0, first:].all()),
        )
        for name, right in is_right.items()
    }


def read_questions(
    lines: Sequence[str], count: int, max_tokens: int, encoder: Encoder
) -> list[Question]:
    """Return questions for values by their keys, each with as many other pairs as fit.

    Args:
        lines: JSON objects with ``ordered_kv_records`` (pairs of strings), ``key`` and ``value``, as in Liu et al.
            2023, "Lost in the middle".
        count: How many of them are asked.
        max_tokens: Of a prompt and its answer.
        encoder: Of the model.

    Raises:
        ConfigError: There are too few lines, or one is no such object.
    """
    if len(lines) < count:
        raise ConfigError(
            f"[tune] --retrieval has {len(lines)} prompts, and {count} are asked for; lower --retrieval-prompts"
        )
    questions = []
    for number, line in enumerate(lines[:count], start=1):
        try:
            document = json.loads(line)
            pairs = [(str(key), str(value)) for key, value in document["ordered_kv_records"]]
            place = pairs.index((document["key"], document["value"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"[tune] line {number} of --retrieval is no object with ordered_kv_records, and key and value among "
                f"them: {error}"
            ) from error
        questions.append(_fitting(pairs, place, max_tokens, encoder))
    return questions


def _fitting(
    pairs: Sequence[tuple[str, str]], place: int, max_tokens: int, encoder: Encoder
) -> Question:
    """Return the question for one pair among as many of its neighbours as fit, at the same relative place."""
    kept = len(pairs)
    while True:
        first = place * (len(pairs) - kept) // max(1, len(pairs) - 1)
        question = _question(pairs[first : first + kept], pairs[place], encoder)
        length = len(question.tokens)
        if length <= max_tokens:
            return question
        if kept == 1:
            raise ConfigError(
                f"[tune] a prompt of --retrieval needs {length} tokens at least; raise --window-tokens"
            )
        kept = max(1, min(kept - 1, kept * max_tokens // length))


def _question(
    pairs: Sequence[tuple[str, str]], wanted: tuple[str, str], encoder: Encoder
) -> Question:
    # Asked for as it is written in the data, so that its tokens are the same.
    data = ",\n".join(f'"{key}": "{value}"' for key, value in pairs)
    key, value = wanted
    text = (
        f'Find the value of a key in the data below.\n\n{{{data}}}\n\nThe pair asked for:\n"{key}":'
    )
    answer = encoder.encode(f' "{value}"', add_special_tokens=False)
    return Question(prompt=tuple(encoder.encode(text)), answer=tuple(answer))

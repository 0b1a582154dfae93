"""Whether the next turn of a conversation will send the tokens that were generated.

Responsible for rendering an answer as history, comparing it with what the model wrote, counting what is lost, and
where asked to, computing what the next turn will send. Knows nothing of HTTP and of how misses are explained.

What a model wrote and what its chat template makes of it a turn later need not be the same tokens: templates drop
thoughts, trim, or open an answer with something that they do not write into history; and a text has several
tokenisations, of which the model need not have taken the tokeniser's.

    prompt, answer    P P P P P P a a a a a a e      computed, but for the last
    next turn         P P P P P P a a b b b e n u    n, u: the template's, up to the user's text
                      |<- position >| lost   |

The next turn is found by rendering it twice, with two texts of the user that begin differently: what both have in
common is what any next turn begins with.

Nothing here delays an answer: unless its client asked for explanations, it is looked at after it was sent. At most
``MAX_RUNNING`` are looked at at once; others are counted as skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvist.errors import EngineError, RequestError
from kvist.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.server.endpoints import Job
    from kvist.server.generation import ChoiceOutput
    from kvist.server.ports import ServedEngine, ServedStream, ServedTokenizer
    from kvist.server.prompts import Prompt

    Json = dict[str, Any]  # Any: a JSON document

logger = logging.getLogger(__name__)

MAX_RUNNING = 4
NUM_SHOWN = 16
"""Tokens shown of each side from the difference on."""
NUM_TRIES = 20
PAUSE_S = 0.05
"""How often, and how far apart, it is asked whether nothing runs any more: the counters of the engine are those of its
latest step, in which the answer was running still."""
RESULTS = ("same", "differs", "unknown", "skipped")
"""What can come of looking at an answer; unknown: the template does not take it, or takes no user behind it."""
_QUESTIONS = ("Why", "9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerendered:
    """An answer as history."""

    position: int
    """Tokens that the computed sequence and the next turn begin with in common."""
    num_lost: int
    """Computed tokens that the next turn cannot reuse."""
    next_token_ids: tuple[int, ...]
    """What any next turn begins with."""
    generated: str
    """How the computed sequence goes on."""
    rendered: str
    """How the next turn does."""

    @property
    def is_same(self) -> bool:
        """Whether all that was computed can be reused."""
        return self.num_lost == 0

    def json(self) -> Json:
        """Return what the client is told."""
        return {
            "is_same": self.is_same,
            "position": self.position,
            "tokens_lost": self.num_lost,
            "generated": None if self.is_same else self.generated,
            "rendered": None if self.is_same else self.rendered,
        }


def rerender(prompt: Prompt, output: ChoiceOutput, tokenizer: ServedTokenizer) -> Rerendered | None:
    """Return how an answer looks as history; None: it cannot be told. For worker threads.

    Args:
        prompt: Of a chat.
        output: Finished.
        tokenizer: Has the template.
    """
    parts = prompt.parts
    if parts is None or not output.token_ids:
        return None
    answered = [*parts.messages, {"role": "assistant", "content": output.text}]
    try:
        first, second = (
            tuple(tokenizer.encode_chat([*answered, question], tools=parts.tools))
            for question in ({"role": "user", "content": text} for text in _QUESTIONS)
        )
    except RequestError:
        return None
    following = first[: _num_common(first, second)]
    # The last token was chosen and nothing computed for it.
    computed = (*prompt.token_ids, *output.token_ids[:-1])
    position = _num_common(computed, following)
    generated, rendered = (
        b"".join(map(tokenizer.token_bytes, ids[position : position + NUM_SHOWN]))
        for ids in (computed, following)
    )
    return Rerendered(
        position=position,
        num_lost=len(computed) - position,
        next_token_ids=following,
        generated=generated.decode(errors="replace"),
        rendered=rendered.decode(errors="replace"),
    )


class Rerenders:
    """Looks at answers, counts, and computes what next turns will send. One event loop.

    Args:
        engine: Its tokeniser renders, and it computes.
        computes_ahead: Whether to compute what the next turn will send, where that differs from what was generated.
    """

    def __init__(self, engine: ServedEngine, *, computes_ahead: bool) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        self.num_lost_tokens = 0
        """Of the answers that differ."""
        self.num_ahead_tokens = 0
        """Computed ahead, hits not counted."""
        self._engine = engine
        self._computes_ahead = computes_ahead
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_computing_ahead = False
        self._ahead: ServedStream | None = None

    def of(self, job: Job, outputs: Sequence[ChoiceOutput], tenant: str) -> Check:
        """Return the check of one call's answers, not run yet."""
        return Check(self, job, outputs, tenant)

    def make_way(self) -> None:
        """End what is computed ahead: somebody asks for something. What it has computed so far stays cached."""
        if self._ahead is not None:
            self._ahead.cancel()

    def start(self, check: Check) -> None:
        """Run a check in the background, if it has not been run and not too many are running; then compute ahead."""
        if not check.is_chat:
            return
        if len(self._tasks) >= MAX_RUNNING:
            if not check.has_run:
                self.counts["skipped"] += 1
            return
        task = asyncio.create_task(self._follow_up(check))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow_up(self, check: Check) -> None:
        try:
            found = await check.run()
            if self._computes_ahead and len(found) == 1 and found[0] and not found[0].is_same:
                await self._compute_ahead(found[0].next_token_ids, check.tenant)
        except EngineError as error:
            logger.debug("[server] the next turn was not computed ahead: %s", error)
        except Exception:
            # The end of a task that nobody waits for.
            logger.exception("[server] an answer could not be looked at")

    async def _compute_ahead(self, token_ids: Sequence[int], tenant: str) -> None:
        """Compute a prompt while nobody else wants anything computed; one at a time, and only soon."""
        if self._is_computing_ahead:
            return
        self._is_computing_ahead = True
        try:
            for _ in range(NUM_TRIES):
                stats = self._engine.stats()
                if not (stats.scheduler.num_running or stats.num_queued):
                    await self._compute_now(token_ids, tenant)
                    return
                await asyncio.sleep(PAUSE_S)
        finally:
            self._is_computing_ahead = False

    async def _compute_now(self, token_ids: Sequence[int], tenant: str) -> None:
        stream = self._engine.submit(token_ids, SamplingParams(max_tokens=0), tenant=tenant)
        self._ahead = stream
        try:
            async for chunk in stream:
                if chunk.usage is not None:
                    self.num_ahead_tokens += chunk.usage.num_computed_tokens
        finally:
            self._ahead = None
            stream.cancel()


class Check:
    """The look at one call's answers. Made by ``Rerenders.of``."""

    def __init__(
        self, owner: Rerenders, job: Job, outputs: Sequence[ChoiceOutput], tenant: str
    ) -> None:
        self.tenant = tenant
        self.explanation: Json | None = None
        """Where to write what was found, as soon as there is one."""
        self._owner = owner
        self._job = job
        self._outputs = outputs
        self._found: list[Rerendered | None] | None = None

    @property
    def is_chat(self) -> bool:
        """Whether there is anything to look at."""
        return self._job.prompts[0].parts is not None

    @property
    def has_run(self) -> bool:
        """Whether it is known what comes of it."""
        return self._found is not None

    async def run(self) -> list[Rerendered | None]:
        """Return how each answer looks as history; looks once.

        Mutates: the owner's counts, and ``explanation``, which gets the first that differs.
        """
        if self._found is None:
            self._found = await asyncio.to_thread(self._look) if self.is_chat else []
            self._count(self._found)
        if self.explanation is not None:
            known = [found for found in self._found if found is not None]
            first = next((found for found in known if not found.is_same), None)
            told = first or (known[0] if known else None)
            self.explanation["rerendered"] = None if told is None else told.json()
        return self._found

    def _look(self) -> list[Rerendered | None]:
        (prompt,) = self._job.prompts
        tokenizer = self._owner._engine.tokenizer  # noqa: SLF001  # one class in two parts
        return [rerender(prompt, output, tokenizer) for output in self._outputs]

    def _count(self, found: Sequence[Rerendered | None]) -> None:
        for one in found:
            result = "unknown" if one is None else "same" if one.is_same else "differs"
            self._owner.counts[result] += 1
            self._owner.num_lost_tokens += 0 if one is None else one.num_lost


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many elements two sequences begin alike with; halves are compared as a whole."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

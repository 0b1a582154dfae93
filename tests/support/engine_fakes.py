"""An engine without a model: bytes for tokens, integers for K and V, and an oracle of every answer.

``PrefixRunner`` keeps one integer per slot, the hash of the prefix that ends there, computed from the slot before it in
the block table. The next token is a function of that hash, the seed and the index, so a wrong block, a missing copy or
a stale slot changes the answer, and ``answer`` knows the right one.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvist.cache.hash import BlockHasher
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.core import EngineCore, sequence_seed
from kvist.plan import EnginePlan
from kvist.sched import policy
from kvist.sched.output import SampledToken, StepResult
from kvist.sched.scheduler import Scheduler
from kvist.types import SamplingParams, TokenId, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvist.sched.output import ScheduledSequence, StepPlan

EOS = 256
VOCAB_SIZE = 257
LETTERS = b"abcdefghijklmnopqrstuvwxyz "


class ByteTokenizer:
    """One token per byte of UTF-8, and one end-of-sequence token."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    bos_token_id = None
    strips_leading_space = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(t for t in token_ids if t != EOS).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id != EOS else b""

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def apply_chat_template(
        self, messages, add_generation_prompt: bool = True, *, tools=None
    ) -> str:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        if tools is not None:
            lines.insert(messages[0]["role"] == "system", f"tools: {json.dumps(tools)}\n")
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")

    def encode_chat(self, messages, add_generation_prompt: bool = True, *, tools=None) -> list[int]:
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, tools=tools))


def extend_hash(prefix_hash: int, token_id: int) -> int:
    return hash((prefix_hash, token_id))


def next_token(prefix_hash: int, params: SamplingParams, seed: int, index: int) -> TokenId:
    """Return a letter, or now and then, unless it is ignored, the end of the sequence; greedy ignores the seed."""
    value = hash((prefix_hash, 0 if params.is_greedy else hash((seed, index))))
    if value % 31 == 0 and not params.ignore_eos:
        return TokenId(EOS)
    return TokenId(LETTERS[value % len(LETTERS)])


def answer(
    prompt: Sequence[int], params: SamplingParams, *, index: int = 0, limit: int = 10_000
) -> tuple[int, ...]:
    """Return the tokens of one sequence: no cache, no batch, no stop strings. Needs a seed or greedy."""
    seed = sequence_seed(params.seed or 0, index)
    state = 0
    for token_id in prompt:
        state = extend_hash(state, token_id)
    output: list[int] = []
    most = limit - len(prompt) if params.max_tokens is None else params.max_tokens
    while len(output) < most:
        output.append(next_token(state, params, seed, len(output)))
        state = extend_hash(state, output[-1])
        is_eos = output[-1] == EOS and not params.ignore_eos
        if is_eos or output[-1] in params.stop_token_ids:
            break
    return tuple(output)


@dataclass
class PrefixRunner:
    """Computes plans on integers."""

    block_size: int
    before_step: Callable[[StepPlan], None] = lambda plan: None
    """Called first in each step; may wait, or raise to make the step fail."""
    broken: dict[str, str] = field(default_factory=dict)
    """Request ids for which no token can be chosen, with the reason."""
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    thread_ids: set[int] = field(default_factory=set)

    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        if meanwhile is not None:
            meanwhile()
        self.plans.append(plan)
        self.thread_ids.add(threading.get_ident())
        self.before_step(plan)
        for copy in plan.copies:
            for offset in range(copy.num_tokens):
                self.slots[copy.target, offset] = self.slots[copy.source, offset]
        states = [self._compute(sequence) for sequence in plan.sequences]
        samples = {}
        for sequence, state in zip(plan.sequences, states, strict=True):
            spec = sequence.sample
            if spec is not None:
                token_id = next_token(state, spec.params, spec.seed, spec.output_index)
                logprobs = None
                if spec.params.logprobs is not None:
                    logprobs = TokenLogprobs(token_id=token_id, logprob=-0.5)
                samples[sequence.request_id] = SampledToken(token_id=token_id, logprobs=logprobs)
        failed = {name: self.broken[name] for name in samples if name in self.broken}
        for name in failed:
            del samples[name]
        return StepResult(step_index=plan.step_index, samples=samples, failed=failed)

    def _compute(self, sequence: ScheduledSequence) -> int:
        state = self.slots[self._slot(sequence, sequence.start - 1)] if sequence.start else 0
        for position, token_id in enumerate(sequence.token_ids, start=sequence.start):
            state = extend_hash(state, token_id)
            self.slots[self._slot(sequence, position)] = state
        return state

    def _slot(self, sequence: ScheduledSequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self.block_size], position % self.block_size


def make_plan(**changes) -> EnginePlan:
    values = {
        "model": "fake",
        "vocab_size": VOCAB_SIZE,
        "plane": "torch",
        "isa": "",
        "weights": "float32",
        "weight_cache": False,
        "dtype": "float32",
        "codec": "float32",
        "block_size": 4,
        "num_blocks": 64,
        "kv_bytes": 64,
        "weight_bytes": 64,
        "max_context_len": 128,
        "threads": 1,
        "prefix_cache": True,
        "keep_kv": True,
        "eviction": "default",
        "cache_shares": (),
        "cache_ttl_s": 0.0,
        "pin_fraction": 0.0,
        "schedule": "fcfs",
        "max_overtakes": 64,
        "max_batch_tokens": 32,
        "max_running": 8,
        "max_queue": 64,
        "reserve_tokens": 8,
        "notes": (),
    }
    values |= changes
    values.setdefault("max_pinned_blocks", int(values["num_blocks"] * values["pin_fraction"]))
    return EnginePlan(**values)


@dataclass
class Parts:
    """A fake engine, taken apart."""

    plan: EnginePlan
    manager: CacheManager
    scheduler: Scheduler
    runner: PrefixRunner
    core: EngineCore
    engine: AsyncEngine


def make_parts(*, clock: Callable[[], int] = time.perf_counter_ns, **changes) -> Parts:
    """Return a fake engine, not started; ``clock`` is the scheduler's, ``changes`` are fields of the plan."""
    plan = make_plan(**changes)
    manager = CacheManager(
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        hasher=BlockHasher(bytes(32)),
        prefix_cache=plan.prefix_cache,
        pin_fraction=plan.pin_fraction,
    )
    scheduler = Scheduler(
        manager,
        max_batch_tokens=plan.max_batch_tokens,
        max_running=plan.max_running,
        max_queue=plan.max_queue,
        max_context_len=plan.max_context_len,
        reserve_tokens=plan.reserve_tokens,
        policy=policy.get(plan.schedule),
        keep_kv=plan.keep_kv,
        max_overtakes=plan.max_overtakes,
        clock=clock,
    )
    runner = PrefixRunner(plan.block_size)
    tokenizer = ByteTokenizer()
    core = EngineCore(
        namespace=Namespace(model="fake"),
        manager=manager,
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
    )
    return Parts(plan, manager, scheduler, runner, core, AsyncEngine(core, tokenizer, plan))

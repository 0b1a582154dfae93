"""A whole engine whose blocks change their codec: the memory that is counted is the memory that is there.

On a tiny random model with native kernels. Answers of a lossy cache depend on what was demoted when, so they are not
compared token by token with an unshared run; that the kernels read what was encoded is tested below the engine.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tests.support.tiny_engine import IdTokenizer, Session, request, tiny_plan
from tests.support.tiny_models import TINY_MODELS, build_reference, random_prompt, save

from kvist import __version__
from kvist.codecs.transforms import uncalibrated
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.build import assemble
from kvist.errors import ConfigError
from kvist.kernels import native
from kvist.model.loader import iterate_tensors
from kvist.model.native_decoder import NativeDecoder, pack_weights
from kvist.model.spec_readers import read_spec
from kvist.server.dashboard import Dashboard
from kvist.server.generation import Gate
from kvist.server.metrics import EngineCollector, Refusals
from kvist.spec import KVSpec
from kvist.types import MissReason

if TYPE_CHECKING:
    from kvist.engine.core import EngineCore
    from kvist.plan import EnginePlan

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels were not built")

RULE = "sink=raw16,recent:16=raw16,rest=int8"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> NativeDecoder:
    model = next(model for model in TINY_MODELS if model.name == "llama-gqa")
    path = save(build_reference(model), tmp_path_factory.mktemp("tiny"))
    spec = read_spec(path)
    pool = native.extension().Pool(1)
    return NativeDecoder(spec, pack_weights(spec, iterate_tensors(path, spec), "bf16", pool), pool)


def block_bytes(decoder: NativeDecoder, codec: str) -> int:
    spec = decoder.spec
    return KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=8,
        codec=codec,
    ).block_bytes


def mixed_plan(decoder: NativeDecoder, num_blocks: int, rule: str = RULE, **changes) -> EnginePlan:
    return tiny_plan(
        **{
            "plane": "native",
            "weights": "bf16",
            "codec": "raw16",
            "num_blocks": num_blocks,
            "kv_bytes": num_blocks * block_bytes(decoder, "raw16"),
            "precision": rule,
            "demote_before_evict": True,
            **changes,
        }
    )


def mixed_core(decoder: NativeDecoder, num_blocks: int, rule: str = RULE, **changes) -> EngineCore:
    plan = mixed_plan(decoder, num_blocks, rule, **changes)
    spec = decoder.spec
    transforms = uncalibrated(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    return assemble(plan, decoder, IdTokenizer(), "tiny", transforms if plan.transforms else None)


class MixedSession(Session):
    """Checks after each step that the arena has what the cache counts."""

    def step(self) -> None:
        super().step()
        manager, arena = self.core._manager, self.core._runner._arena
        # What was freed or demoted since the plan is done before the next one is computed.
        arena.apply(manager.take_memory_ops())
        self.check()

    def rest(self) -> None:
        """Let the engine do what it does when nobody asks for anything."""
        while self.core.has_background_work:
            self.core.background_step()
            self.check()

    def check(self) -> None:
        manager, arena = self.core._manager, self.core._runner._arena
        stats = manager.stats()
        assert dict(arena.stats().num_blocks) == dict(stats.blocks_by_codec)
        assert dict(arena.stats().cell_bytes) == dict(stats.bytes_by_codec)
        assert sum(stats.bytes_by_codec.values()) <= arena.budget_bytes
        for block in manager._pool.blocks:
            is_free = block.ref_count == 0 and block.node is None
            assert is_free or arena.codec_of(block.block_id) == manager._pool.codec_in_memory(block)


def run_random_requests(
    session: MixedSession,
    draw: random.Random,
    num_requests: int,
    *,
    prefix: tuple[int, int],
    longest_tail: int,
    most_output: int,
) -> None:
    """Add requests that share four prefixes of some length while others run, abort a few, and finish all."""
    prefixes = [random_prompt(draw.randint(*prefix), seed=100 + i) for i in range(4)]
    num_added = 0
    while num_added < num_requests or session.core.has_work:
        if num_added < num_requests and draw.random() < 0.4:
            prompt = draw.choice(prefixes)
            prompt = prompt + random_prompt(draw.randint(1, longest_tail), seed=num_added)
            sampling = {"temperature": 0.8, "seed": num_added, "ignore_eos": True}
            max_tokens = draw.randint(1, most_output)
            session.add([request(f"r{num_added}", prompt, max_tokens=max_tokens, **sampling)])
            num_added += 1
        if draw.random() < 0.05 and num_added:
            session.abort(f"r{draw.randrange(num_added)}")
        session.step()


@pytest.mark.parametrize("seed", range(3))
def test_memory_counted_is_memory_there_is(decoder, seed):
    """Random requests with common prefixes in a pool far too small, with preemption and aborts."""
    draw = random.Random(seed)
    core = mixed_core(decoder, 48, max_running=6, max_batch_tokens=48)
    run_random_requests(
        MixedSession(core), draw, 40, prefix=(20, 70), longest_tail=40, most_output=50
    )
    core.check_invariants()
    stats = core._manager.stats()
    assert stats.num_demotions_by_age > 50
    assert stats.num_demotions_for_room > 20
    assert stats.num_evictions > 20
    assert stats.num_hit_tokens > 500
    assert stats.num_partial_copies > 5


def test_answers_stay_near_those_of_raw_blocks(decoder):
    prompt = random_prompt(150, seed=5)
    params = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    raw = mixed_core(decoder, 64, "recent:4096=raw16,rest=int8")
    mixed = mixed_core(decoder, 64)
    [expected] = Session(raw).run([request("a", prompt, **params)]).values()
    [received] = MixedSession(mixed).run([request("a", prompt, **params)]).values()
    assert mixed._manager.stats().num_demotions_by_age > 15
    assert raw._manager.stats().num_demotions_by_age == 0
    # A random model has near ties; from the first of them on, the two go different ways.
    agreement = sum(a == b for a, b in zip(expected.token_ids, received.token_ids, strict=True))
    assert agreement >= 8


def test_more_is_cached_in_the_same_memory(decoder):
    """The tokens that a full cache holds, against one that keeps 16 bits."""

    def cached_blocks(core) -> int:
        for number in range(20):
            Session(core).run([request(f"r{number}", random_prompt(33, seed=number))])
        return core._manager.stats().num_evictable

    small = cached_blocks(mixed_core(decoder, 32, "recent:8=raw16,rest=int8"))
    large = cached_blocks(
        mixed_core(decoder, 32, "recent:4096=raw16,rest=int8", demote_before_evict=False)
    )
    ratio = block_bytes(decoder, "raw16") / block_bytes(decoder, "int8")
    assert large <= 32
    assert small > 0.9 * ratio * large


def test_hits_are_used_whatever_their_codec(decoder):
    prompt = random_prompt(100, seed=9)
    core = mixed_core(decoder, 64)
    params = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    MixedSession(core).run([request("a", prompt, **params)])
    again = MixedSession(core).run([request("b", prompt, **params)])
    [answer] = again.values()
    assert answer.num_cached_tokens == 99
    # A copy out of a small block: decoded into one that can be written.
    head = [*prompt[:44], 1, 2, 3]
    [answer] = MixedSession(core).run([request("c", head, **params)]).values()
    assert answer.num_cached_tokens == 44


LADDER_RULES = (
    "sink=int8,recent:1=raw16,rest=int4",
    "sink=int8,recent:1=raw16,rest=int3",
    "sink=raw16,recent:64=raw16,recent:150=int8,rest=int4",
    "sink=int8,recent:1=raw16,recent:100=int8,recent:200=int4,rest=int3",
)


def span_core(decoder: NativeDecoder, num_blocks: int, rule: str, **changes) -> EngineCore:
    """Return an engine with blocks of 64 tokens."""
    return mixed_core(decoder, num_blocks, rule, **(span_options(decoder, num_blocks) | changes))


def span_options(decoder: NativeDecoder, num_blocks: int) -> dict[str, object]:
    spec = decoder.spec
    raw = KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=64,
    )
    return {
        "block_size": 64,
        "kv_bytes": num_blocks * raw.block_bytes,
        "raw_block_bytes": raw.block_bytes,
        "max_context_len": 700,
        "transforms": "none",
    }


@pytest.mark.parametrize("rule", LADDER_RULES)
def test_memory_counted_is_memory_there_is_with_blocks_of_spans(decoder, rule):
    draw = random.Random(rule)
    core = span_core(decoder, 14, rule, max_running=6, max_batch_tokens=100)
    run_random_requests(
        MixedSession(core), draw, 30, prefix=(70, 330), longest_tail=200, most_output=90
    )
    core.check_invariants()
    stats = core._manager.stats()
    assert stats.num_demotions_by_age > 30
    assert stats.num_evictions > 5
    assert stats.num_hit_tokens > 500
    assert stats.num_partial_copies > 0
    assert core._scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("rule", LADDER_RULES)
def test_it_does_not_matter_who_else_runs_or_how_prompts_are_cut(decoder, rule):
    """Greedy answers of one request in steps of whole blocks, alone and beside others that it shares nothing with."""
    prompt = random_prompt(300, seed=5)
    params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    [alone] = (
        MixedSession(span_core(decoder, 40, rule)).run([request("a", prompt, **params)]).values()
    )
    others = [request(f"b{i}", random_prompt(150, seed=50 + i), **params) for i in range(3)]
    beside = MixedSession(span_core(decoder, 40, rule)).run(
        [request("a", prompt, **params), *others]
    )
    agreement = sum(a == b for a, b in zip(alone.token_ids, beside["a", 0].token_ids, strict=True))
    # What was old when a step computed depends on how the prompt was cut, and random models have near ties.
    assert agreement >= 4


@pytest.mark.parametrize("rule", LADDER_RULES)
@pytest.mark.parametrize("length", [20, 65, 100, 200])
@pytest.mark.parametrize("num_output", [3, 100])
def test_every_warm_repeat_gives_the_same_to_the_bit(decoder, rule, length, num_output):
    """A copied head was decoded, encoded anew with what followed, and put in place of the first: two came differently.

    Prompts that end inside a block, whose outputs complete it or not, and go past it or not.
    """
    core = span_core(decoder, 40, rule, max_demotions=1)
    prompt = random_prompt(length, seed=length)
    params = {"temperature": 0.0, "max_tokens": num_output, "ignore_eos": True, "logprobs": 5}
    warm = []

    class Seeing(MixedSession):
        def _take(self, chunks):
            chunks = list(chunks)
            warm[-1].extend(entry for chunk in chunks for entry in chunk.logprobs)
            super()._take(chunks)

    for number in range(6):
        warm.append([])
        session = Seeing(core)
        [answer] = session.run([request(f"r{number}", prompt, **params)]).values()
        session.rest()
        assert len(warm[-1]) == num_output
        if number:
            assert answer.num_cached_tokens >= (length - 1) // 64 * 64
    assert all(logprobs == warm[1] for logprobs in warm[2:])


def test_no_step_makes_more_blocks_smaller_than_it_may(decoder):
    """Sixteen requests that complete a block in the same step, and prompts that are much longer than a step."""
    core = span_core(
        decoder, 100, LADDER_RULES[0], max_running=16, max_batch_tokens=640, max_demotions=3
    )
    demoted = []
    arena = core._runner._arena
    original = arena.apply
    arena.apply = lambda ops: (demoted.append(_num_demotions(ops)), original(ops))
    session = Session(core)
    params = {"temperature": 0.0, "ignore_eos": True}
    session.run(
        [request(f"a{i}", random_prompt(30, seed=i), max_tokens=120, **params) for i in range(16)]
    )
    session.run([request("b", random_prompt(690, seed=99), max_tokens=1, **params)])
    assert core._manager.has_due_demotions
    while core.has_background_work:
        core.background_step()
    core.check_invariants()
    stats = core._manager.stats()
    assert stats.num_urgent_demotions == 0
    assert max(demoted) == 3
    assert sum(demoted) == stats.num_demotions_by_age + stats.num_demotions_for_room >= 16 + 9


def test_memory_that_is_promised_is_there_although_blocks_become_smaller_late(decoder):
    draw = random.Random(7)
    core = span_core(
        decoder, 14, LADDER_RULES[0], max_running=6, max_batch_tokens=100, max_demotions=1
    )
    run_random_requests(
        MixedSession(core), draw, 30, prefix=(70, 330), longest_tail=200, most_output=90
    )
    stats = core._manager.stats()
    assert stats.num_urgent_demotions > 0
    assert stats.num_evictions > 0
    assert core._scheduler.stats().num_preemptions == 0


def test_what_watchers_are_told_names_the_codecs_that_there_are(decoder):
    """Metrics and dashboard said raw16 of everything, and counted blocks of all sizes as if they were alike."""
    rule = LADDER_RULES[0]
    core = span_core(decoder, 40, rule, max_demotions=2)
    prompt = random_prompt(300, seed=9)
    session = MixedSession(core)
    session.run([request("a", prompt, temperature=0.0, max_tokens=4, ignore_eos=True)])
    session.rest()
    plan = mixed_plan(decoder, 40, rule, **span_options(decoder, 40))
    engine = AsyncEngine(core, IdTokenizer(), plan)
    got = {
        (sample.name, *sample.labels.values()): sample.value
        for family in EngineCollector(engine, "tiny", Refusals()).collect()
        for sample in family.samples
    }
    assert got["kvist_info", "tiny", rule, __version__] == 1
    for codec, number in {"raw16": 1, "int8": 1, "int4": 3}.items():
        assert got["kvist_blocks", "evictable", codec, "device"] == number
        assert got["kvist_blocks", "held", codec, "device"] == 0
    assert ("kvist_reused_tokens_total", "raw16") not in got
    assert got["kvist_due_demotions",] == 0
    memory = engine.stats().memory
    assert memory.codec == rule
    values = Dashboard(engine, "tiny", Refusals(), Gate(), is_private=False)._values(
        engine.stats(), 0
    )
    [tier] = values["tiers"]
    assert tier["codec"] == rule
    assert {codec: number for codec, (number, _) in tier["codecs"].items()} == {
        "raw16": 1,
        "int8": 1,
        "int4": 3,
    }
    assert sum(size for _, size in tier["codecs"].values()) == tier["used_bytes"]
    assert tier["num_blocks"] > 40
    assert tier["compression"] > 1.9


def _num_demotions(ops) -> int:
    return sum(1 for op in ops if getattr(op, "kind", "") == "demote")


def test_usage_says_in_which_codec_reused_tokens_were(decoder):
    prompt = random_prompt(300, seed=9)
    core = span_core(decoder, 40, LADDER_RULES[0])
    params = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    usages = []

    class Seeing(MixedSession):
        def _take(self, chunks):
            chunks = list(chunks)
            usages.extend(chunk.usage for chunk in chunks if chunk.usage is not None)
            super()._take(chunks)

    Seeing(core).run([request("a", prompt, **params)])
    Seeing(core).run([request("b", [*prompt, 5, 6, 7], **params)])
    Seeing(core).run([request("c", [*prompt[:100], 5, 6, 7], **params)])
    # The head of a block of spans is not copied.
    assert [usage.num_cached_tokens for usage in usages] == [0, 300, 64]
    assert usages[0].cached_by_codec == {}
    # The tail was not complete.
    assert usages[1].cached_by_codec == {"int8": 64, "int4": 192, "raw16": 44}
    assert usages[2].cached_by_codec == {"int8": 64}
    assert usages[2].miss.main.reason is MissReason.BELOW_BLOCK_SIZE
    assert (usages[2].miss.spans[0].start, usages[2].miss.spans[0].end) == (64, 100)
    assert core.stats().requests.reused_by_codec == {"int8": 128, "int4": 192, "raw16": 44}


def test_spans_hold_several_times_the_requests_and_tokens_of_16_bits(decoder):
    def running_at_once(rule: str) -> int:
        core = span_core(
            decoder, 30, rule, max_batch_tokens=64, max_running=64, max_context_len=900
        )
        session = Session(core)
        params = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True}
        session.add([request(f"r{i}", random_prompt(400, seed=i), **params) for i in range(30)])
        most = 0
        while core.has_work:
            session.step()
            most = max(most, core._scheduler.num_running)
        return most

    assert running_at_once("recent:4096=raw16,rest=int4") == 3
    assert running_at_once(LADDER_RULES[0]) >= 5


def test_codecs_of_spans_need_transforms(decoder):
    with pytest.raises(ConfigError, match="int4 cannot be without transforms"):
        span_core(decoder, 40, LADDER_RULES[0], transforms="")

"""Blocks that are damaged after they were sealed: found, taken away, and the answer is that of a clean engine.

On a tiny random model, on both planes and in every codec of each.
"""

from __future__ import annotations

import logging

import pytest
import torch
from tests.support.tiny_engine import IdTokenizer, Session, request, tiny_plan
from tests.support.tiny_models import TINY_MODELS, build_reference, random_prompt, save

from kvist.engine.build import assemble
from kvist.engine.core import EngineCore, RequestFailure
from kvist.kernels import kv_rows, native
from kvist.model.loader import iterate_tensors, load_decoder
from kvist.model.native_decoder import NativeDecoder, pack_weights
from kvist.model.spec_readers import read_spec
from kvist.types import MissReason

KINDS = [
    ("torch", "float32"),
    ("torch", "raw16"),
    ("torch", "int8"),
    ("native", "raw16"),
    ("native", "int8"),
]
PROMPT = random_prompt(75, seed=1)
NUM_OUTPUT = 12
POISONED = 3
"""A block in the middle of the prompt; blocks have 8 tokens."""


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    torch.set_num_threads(1)
    model = next(model for model in TINY_MODELS if model.name == "llama-gqa")
    path = save(build_reference(model), tmp_path_factory.mktemp("tiny"))
    spec = read_spec(path)
    found = {"torch": load_decoder(path, spec, torch.float32)}
    if native.available():
        pool = native.extension().Pool(1)
        weights = pack_weights(spec, iterate_tensors(path, spec), "int8", pool)
        found["native"] = NativeDecoder(spec, weights, pool)
    return found


@pytest.fixture(params=KINDS, ids=["/".join(kind) for kind in KINDS])
def kind(request, decoders):
    if request.param[0] not in decoders:
        pytest.skip("the native kernels were not built")
    return request.param


def make(decoders, kind, **changes) -> EngineCore:
    plane, codec = kind
    weights = {"plane": plane, "weights": "int8" if plane == "native" else "float32"}
    plan = tiny_plan(codec=codec, num_blocks=64, **{**weights, **changes})
    core = assemble(plan, decoders[plane], IdTokenizer(), "tiny")
    arena(core).slab.fill_(0xFF)  # NaN in every codec: whatever was not written must not be read
    return core


def arena(core: EngineCore):
    return core._runner._arena


def ask(core: EngineCore, name: str = "r", prompt=PROMPT, **params) -> list[int]:
    values = {"temperature": 0.0, "max_tokens": NUM_OUTPUT, "ignore_eos": True, **params}
    return Session(core).run([request(name, prompt, **values)])[name, 0].token_ids


def work_through(core: EngineCore) -> None:
    while core.has_background_work:
        core.background_step()
        core.check_invariants()


def nodes(core: EngineCore, prompt=PROMPT):
    manager = core._manager
    namespace = next(iter(manager._tree.roots))
    chain = manager.new_chain(namespace, prompt)
    return manager.match(chain, len(prompt)).nodes


def poison(core: EngineCore, block_id: int, *, is_key: bool) -> None:
    """Write a NaN for one position and head of the middle layer."""
    row = arena(core).head(block_id, 8)[1, 0 if is_key else 1, 1, 2]
    if row.dtype == torch.uint8:
        row[-2:] = torch.tensor([float("nan")], dtype=torch.float16).view(torch.uint8)
    else:
        row[3] = float("nan")


def flip(core: EngineCore, block_id: int, bit: int) -> None:
    block = arena(core).block_bytes(block_id)
    block[bit // 8] ^= 1 << (bit % 8)


@pytest.mark.parametrize("is_key", [True, False], ids=["key", "value"])
@pytest.mark.parametrize("audit_fraction", [0.0, 1.0])
def test_a_nan_in_a_reused_block(decoders, kind, is_key, audit_fraction, caplog):
    clean = ask(make(decoders, kind))
    core = make(decoders, kind, audit_fraction=audit_fraction)
    assert ask(core) == clean
    bad = nodes(core)[POISONED]
    poison(core, bad.block.block_id, is_key=is_key)
    with caplog.at_level(logging.WARNING):
        assert ask(core) == clean
    assert bad.block.node is not bad
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    stats = core.stats()
    assert stats.cache.num_invalidated_blocks >= 9 - POISONED
    assert stats.guards.num_recomputed_sequences == (audit_fraction == 0.0)
    assert stats.guards.num_checksum_failures == (audit_fraction == 1.0)
    assert stats.num_failed == 0
    # What was computed again serves the next one, which finds nothing wrong.
    assert ask(core) == clean
    assert core.stats().guards.num_recomputed_sequences == stats.guards.num_recomputed_sequences
    assert core.stats().cache.num_hit_tokens > stats.cache.num_hit_tokens


@pytest.mark.parametrize("bit", [0, 15, -1])
def test_a_flipped_bit_in_a_sealed_block_when_all_reuses_are_audited(decoders, kind, bit, caplog):
    clean = ask(make(decoders, kind))
    core = make(decoders, kind, audit_fraction=1.0)
    ask(core)
    bad = nodes(core)[POISONED]
    num_bits = 8 * arena(core).kv_spec.block_bytes
    flip(core, bad.block.block_id, bit % num_bits)
    session = Session(core)
    values = {"temperature": 0.0, "max_tokens": NUM_OUTPUT, "ignore_eos": True}
    answer = session.run([request("r", PROMPT, **values)])["r", 0]
    assert answer.token_ids == clean
    assert answer.num_cached_tokens == POISONED * 8
    assert bad.block.node is not bad
    assert core.stats().guards.num_checksum_failures == 1
    assert core.stats().cache.missed_tokens[MissReason.VERIFICATION_FAILED.value] == (
        len(PROMPT) - 1 - POISONED * 8
    )
    assert "is not what it was when it was sealed" in caplog.text


def test_a_flipped_bit_goes_unnoticed_without_audits(decoders):
    """The check of the test above: the same flip changes the answer where nothing looks."""
    kind = ("torch", "float32")
    clean, core = ask(make(decoders, kind)), make(decoders, kind)
    ask(core)
    for node in nodes(core)[:6]:
        for offset in range(3, 4000, 4):
            flip(core, node.block.block_id, 8 * offset + 7)  # signs
    assert ask(core) != clean


def test_a_flipped_bit_in_a_head_that_is_copied(decoders, kind):
    clean = ask(make(decoders, kind))
    core = make(decoders, kind, audit_fraction=1.0)
    ask(core, "first", PROMPT[:70], max_tokens=1)
    (partial,) = [node for node in core._manager._tree.nodes() if node.is_partial]
    flip(core, partial.block.block_id, 6)
    assert ask(core) == clean
    assert core.stats().guards.num_checksum_failures == 1


def test_a_fraction_of_the_reuses(decoders):
    core = make(decoders, ("torch", "float32"), audit_fraction=0.25)
    for index in range(40):
        ask(core, str(index), max_tokens=1)
    share = core.stats().guards.num_checksums / (39 * 9)
    assert 0.1 < share < 0.4


def test_clean_blocks_pass_every_check(decoders, kind):
    core = make(decoders, kind, audit_fraction=1.0, max_batch_tokens=24)
    prompts = [PROMPT, PROMPT[:40] + random_prompt(30, seed=5), random_prompt(90, seed=6)]
    for _ in range(3):
        for prompt in prompts:
            ask(core, prompt=prompt, max_tokens=30)
            work_through(core)
    stats = core.stats().guards
    assert stats.num_checksums > 40
    assert stats.num_recomputed_blocks > 15
    assert (stats.num_checksum_failures, stats.num_recompute_failures) == (0, 0)
    assert stats.num_recomputed_sequences == 0
    # Each block once, however often it is reused.
    assert stats.num_recomputed_blocks <= 40


def test_what_was_wrong_before_it_was_sealed_is_found_in_the_background(decoders, kind, caplog):
    core = make(decoders, kind, audit_fraction=1.0)
    clean = ask(core)
    bad = nodes(core)[POISONED]
    # As if it had been computed so: other K and V, and a checksum that says that all is well.
    arena(core).head(bad.block.block_id, 8).copy_(
        arena(core).head(nodes(core)[1].block.block_id, 8)
    )
    core._guards.seal(bad)
    ask(core)
    work_through(core)
    assert bad.block.node is not bad
    assert core.stats().guards.num_recompute_failures == 1
    assert "differs from what its tokens give" in caplog.text
    assert ask(core) == clean


def test_running_requests_that_hold_a_bad_block_are_computed_again(decoders, kind):
    clean = ask(make(decoders, kind))
    core = make(decoders, kind, audit_fraction=1.0)
    ask(core, "first")
    values = {"temperature": 0.0, "max_tokens": NUM_OUTPUT, "ignore_eos": True}
    session = Session(core)
    session.add([request("running", PROMPT, **values)])
    session.step()
    # It was fine when that one was admitted; a later admission finds it.
    flip(core, nodes(core)[POISONED].block.block_id, 3)
    session.add([request("later", PROMPT, **values)])
    answers = session.run()
    assert answers["later", 0].token_ids == clean
    assert answers["running", 0].token_ids == clean
    assert core.stats().guards.num_recomputed_sequences == 1


def test_others_in_the_step_go_on(decoders, kind):
    other = random_prompt(40, seed=9)
    core = make(decoders, kind)
    clean, clean_other = ask(core), ask(make(decoders, kind), prompt=other)
    poison(core, nodes(core)[POISONED].block.block_id, is_key=False)
    values = {"temperature": 0.0, "max_tokens": NUM_OUTPUT, "ignore_eos": True}
    answers = Session(core).run(
        [request("bad", PROMPT, n=3, **values), request("other", other, **values)]
    )
    assert {tuple(answers["bad", i].token_ids) for i in range(3)} == {tuple(clean)}
    assert answers["other", 0].token_ids == clean_other
    assert core.stats().scheduler.num_preemptions == core.stats().guards.num_recomputed_sequences


def test_numbers_that_stay_wrong_fail_the_request_and_no_other(decoders, kind, caplog):
    core = make(decoders, kind)
    run = core._runner.run

    def broken(plan, meanwhile):
        result = run(plan, meanwhile)
        names = frozenset(s.request_id for s in plan.sequences if s.request_id == "bad")
        samples = {k: v for k, v in result.samples.items() if k not in names}
        return result._replace(
            samples=samples, failed=dict.fromkeys(names, "no number"), damaged=names
        )

    core._runner.run = broken
    values = {"temperature": 0.0, "max_tokens": NUM_OUTPUT, "ignore_eos": True}
    core.add(request("bad", PROMPT, **values))
    core.add(request("good", random_prompt(30, seed=3), **values))
    outputs = []
    while core.has_work:
        outputs += core.step()
        core._manager.check_invariants()
    (failure,) = [output for output in outputs if isinstance(output, RequestFailure)]
    assert failure.request_id == "bad"
    assert "no number" in str(failure.error)
    assert "computed again from its tokens, with nothing from the cache, and failed" in str(
        failure.error
    )
    assert len([o for o in outputs if o.request_id == "good"]) == NUM_OUTPUT
    assert core.stats().guards.num_damaged_sequences == 2
    assert [r.levelname for r in caplog.records if "recovery" in r.message] == ["WARNING"]


def test_a_request_waits_for_one_chunk_in_the_background_at_most(decoders):
    core = make(decoders, ("torch", "float32"), audit_fraction=1.0, max_batch_tokens=8)
    ask(core, "first")
    session = Session(core)
    values = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    session.add([request("long", PROMPT, **values)])
    session.run()
    assert core.stats().guards.num_background_chunks == 1
    assert core.has_background_work
    session.add([request("next", PROMPT, **values)])
    session.run()
    assert core.stats().guards.num_background_chunks == 2


def turned(stored: torch.Tensor) -> torch.Tensor:
    """Return (blocks, L, 2, K, n, D) K and V with K turned, as blocks of int8 hold it."""
    return torch.stack((kv_rows.turn(stored[:, :, 0]), stored[:, :, 1]), dim=2)


class TestRefresh:
    def stored(self, core, prompt):
        codec, blocks = arena(core).codec, arena(core)
        return torch.stack(
            [codec.decode(blocks.head(n.block.block_id, 8)) for n in nodes(core, prompt)]
        )

    def exact(self, decoders, plane, prompt):
        core = make(decoders, (plane, "raw16" if plane == "native" else "float32"))
        ask(core, prompt=prompt)
        return self.stored(core, prompt)

    @pytest.mark.parametrize("plane", ["torch", "native"])
    def test_renewed_blocks_are_off_by_their_own_encoding_only(self, decoders, plane):
        if plane not in decoders:
            pytest.skip("the native kernels were not built")
        core = make(decoders, (plane, "int8"), refresh_every=2)
        ask(core)
        exact = turned(self.exact(decoders, plane, PROMPT))
        bound = arena(core).codec.error_bound(exact)
        before = self.stored(core, PROMPT)
        assert ((before - exact).abs() > bound).float().mean() > 0.1
        ask(core)
        assert not core.has_background_work
        ask(core)
        # Computed beside the request, and put in place after it.
        assert core.stats().guards.num_refreshed_blocks == 0
        work_through(core)
        after = self.stored(core, PROMPT)
        assert core.stats().guards.num_refreshed_blocks == 9
        # Computing in other steps than the exact ones moves a value now and then.
        assert ((after - exact).abs() > bound).float().mean() < 0.01
        core.check_invariants()

    def test_blocks_that_somebody_reads_are_left_alone(self, decoders):
        core = make(decoders, ("torch", "int8"), refresh_every=1)
        ask(core)
        ask(core)
        session = Session(core)
        session.add([request("r", PROMPT[:40], temperature=0.0, max_tokens=50, ignore_eos=True)])
        session.step()
        held = [n.block.block_id for n in nodes(core)[:4]]
        before = [arena(core).block_bytes(b).clone() for b in held]
        for _ in range(3):
            core._guards.run_once()
        assert 0 < core.stats().guards.num_refreshed_blocks <= 5
        for block_id, content in zip(held, before, strict=True):
            assert torch.equal(arena(core).block_bytes(block_id), content)
        session.run()
        work_through(core)
        assert core.stats().guards.num_refreshed_blocks >= 9

    def test_a_renewed_block_has_a_new_checksum(self, decoders):
        core = make(decoders, ("torch", "int8"), refresh_every=1, audit_fraction=1.0)
        for _ in range(4):
            ask(core)
            work_through(core)
        stats = core.stats().guards
        assert stats.num_refreshed_blocks >= 9
        assert (stats.num_checksum_failures, stats.num_recompute_failures) == (0, 0)


DOCUMENT = """\
The ferry to the island leaves at seven, at noon and at five. In winter it leaves at noon only, and not at all when the
wind is stronger than fourteen metres per second. Tickets are sold on board; dogs travel free, cars must be booked a day
ahead. The crossing takes fifty minutes. On the island there is one shop, one school with eleven children, and a church
whose bell was cast in 1689. The lighthouse at the north end has been dark since 1967, but its keeper's house is let to
guests from May to September. Water comes from a well behind the church, and in dry summers it is rationed.
"""


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plane", [pytest.param("torch", marks=pytest.mark.slow), "native"])
@pytest.mark.parametrize("harm", ["nan", "bit"])
def test_the_real_model(smollm2_path, plane, harm):
    """A NaN, and a flipped bit, in the middle of a cached document: found and taken away, the answer a clean one."""
    from kvist.engine.api import Engine

    if plane == "native" and not native.available():
        pytest.skip("the native kernels were not built")
    options = {"dtype": "float32"} if plane == "torch" else {"weights": "int8"}
    question = DOCUMENT + "Question: When was the bell cast?\nAnswer:"
    with Engine.from_pretrained(
        str(smollm2_path),
        memory_gib=0.1,
        block_size=16,
        audit_fraction=1.0 if harm == "bit" else 0.0,
        **options,
    ) as engine:
        params = {"temperature": 0, "max_tokens": 16}
        clean = engine.generate(question, **params)[0]
        core = engine._engine._core
        manager = core._manager
        # The engine sleeps between requests, so this thread may touch its blocks.
        (root,) = manager._tree.roots.values()
        node = next(iter(root.children.values()))
        for _ in range(3):
            node = next(iter(node.children.values()))
        head = arena(core).head(node.block.block_id, 16)
        if harm == "nan":
            head[12, 0, 1, 5, 3] = float("nan")
        else:
            block = arena(core).block_bytes(node.block.block_id)
            block[len(block) // 3] ^= 0x40
        again = engine.generate(question, **params)[0]
        assert again.token_ids == clean.token_ids
        assert node.block.node is not node
        stats = engine.stats()
        assert stats.cache.num_invalidated_blocks > 0
        assert stats.guards.num_checksum_failures == (harm == "bit")
        assert stats.guards.num_recomputed_sequences == (harm == "nan")
        third = engine.generate(question, **params)[0]
        assert third.token_ids == clean.token_ids
        assert third.usage.num_cached_tokens > 100

"""A whole engine on a tiny random model, whose allocations fail: in the control plane, the arena and the runner.

Whichever fail, each request is answered, or refused with a reason; answers are those of an engine with all the memory
it wants; and nothing is left behind.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.allocations import CONTROL_PLANE, SLABS, Failures, Site
from tests.support.tiny_engine import IdTokenizer, request, tiny_plan, unshared_batches
from tests.support.tiny_models import TINY_MODELS, build_reference, random_prompt, save

from kvist.codecs.transforms import uncalibrated
from kvist.engine import core as core_module
from kvist.engine.build import assemble
from kvist.engine.core import EngineCore, RequestFailure
from kvist.errors import EngineOverloaded
from kvist.kernels import native
from kvist.kernels.batch import AttentionBatch
from kvist.model.decoder import Decoder
from kvist.model.loader import iterate_tensors, load_decoder
from kvist.model.native_decoder import NativeDecoder, pack_weights
from kvist.model.spec_readers import read_spec
from kvist.runner import native_runner, runner
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena
from kvist.storage.inspection import BlockInspector
from kvist.types import FinishReason, OutputChunk

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = (Site(core_module, "Request"), Site(core_module, "Detokenizer"))
TORCH = (
    Site(BlockArena, "copy"),
    Site(AttentionBatch, "from_sequences"),
    Site(Decoder, "forward"),
    Site(Decoder, "logits"),
    Site(runner, "sample"),
    Site(BlockInspector, "checksum"),
)
NATIVE = (Site(NativeDecoder, "step"), Site(native_runner, "sample_rows"))
NOT_ASKED = {"CacheManager.retain"}
"""Sites of requests that these tests do not send."""
needs_native = pytest.mark.skipif(
    not native.available(), reason="the native kernels were not built"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = next(model for model in TINY_MODELS if model.name == "llama-gqa")
    return save(build_reference(model), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def torch_decoder(folder: Path) -> Decoder:
    return load_decoder(folder, read_spec(folder), torch.float32)


@pytest.fixture(scope="module")
def native_decoder(folder: Path) -> NativeDecoder:
    spec = read_spec(folder)
    pool = native.extension().Pool(1)
    return NativeDecoder(
        spec, pack_weights(spec, iterate_tensors(folder, spec), "bf16", pool), pool
    )


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None


class Clients:
    """Sends requests with common prefixes to an engine, and takes what comes back."""

    def __init__(self, core: EngineCore, failures: Failures, seed: int, longest: int) -> None:
        self._core, self._failures = core, failures
        self._draw = random.Random(seed)
        self._prefixes = [
            random_prompt(self._draw.randint(longest // 4, longest * 2 // 3), seed=i)
            for i in range(3)
        ]
        self._longest_tail = longest // 3
        self.groups: dict[str, Any] = {}
        self.outcomes: dict[str, Outcome] = {}

    def serve(self, num_requests: int) -> None:
        draw = self._draw
        num_steps = 0
        while len(self.groups) < num_requests or self._core.has_work:
            if len(self.groups) < num_requests and draw.random() < 0.6:
                self._send(f"r{len(self.groups)}")
            if draw.random() < 0.03 and self.groups:
                self._take(self._core.abort(draw.choice(list(self.groups))))
            # Mostly a failure now and then; sometimes nothing goes at all for a while.
            with self._failures.storm(1.0 if num_steps % 97 > 85 else 0.02):
                self._take(self._core.step())
            self._core._manager.check_invariants()
            num_steps += 1
        self._take(self._core.step())

    def _send(self, name: str) -> None:
        draw = self._draw
        prompt = draw.choice(self._prefixes)
        prompt = prompt[: draw.randint(1, len(prompt))]
        prompt = prompt + random_prompt(draw.randint(1, self._longest_tail), seed=len(self.groups))
        max_tokens = draw.choice([None, 1, 5, 12])
        group = request(name, prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.groups[name] = group
        self.outcomes[name] = Outcome()
        try:
            with self._failures.storm(0.03):
                self._core.add(group)
        except EngineOverloaded as error:
            self.outcomes[name].error = error

    def _take(self, outputs: list[OutputChunk | RequestFailure]) -> None:
        for output in outputs:
            outcome = self.outcomes[output.request_id]
            assert outcome.finish_reason is None, "an output after the last one"
            assert outcome.error is None, "an output after the last one"
            if isinstance(output, RequestFailure):
                outcome.error = output.error
            else:
                outcome.token_ids += output.token_ids
                outcome.finish_reason = output.finish_reason

    def check(self) -> None:
        """Everybody was told how it ended, some were refused, and many were answered."""
        whole = [o for o in self.outcomes.values() if o.finish_reason is FinishReason.LENGTH]
        refused = [o for o in self.outcomes.values() if o.error is not None]
        for outcome in self.outcomes.values():
            assert (outcome.finish_reason is None) != (outcome.error is None)
        assert all(isinstance(outcome.error, EngineOverloaded) for outcome in refused)
        assert len(whole) > len(self.outcomes) // 3
        assert refused
        self._core.check_invariants()


@pytest.mark.parametrize("schedule", ["fcfs", "prefix"])
def test_answers_are_those_of_an_engine_with_memory(
    torch_decoder: Decoder, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny_plan(
        schedule=schedule,
        num_blocks=24,
        max_running=6,
        max_batch_tokens=48,
        max_queue=40,
        audit_fraction=1.0,
    )
    core = assemble(plan, torch_decoder, IdTokenizer(), "tiny")
    failures = Failures((*CONTROL_PLANE, *ENGINE, *TORCH), random.Random(1), monkeypatch)
    clients = Clients(core, failures, seed=1, longest=60)
    clients.serve(30)
    clients.check()
    told = {name for name, count in failures.num_failures.items() if count}
    assert told >= failures.num_failures.keys() - NOT_ASKED
    expected = unshared_batches(torch_decoder, clients.groups.values())
    for name, outcome in clients.outcomes.items():
        num_tokens = len(outcome.token_ids)
        assert outcome.token_ids == expected[name, 0][:num_tokens], name
        if outcome.finish_reason is FinishReason.LENGTH:
            assert num_tokens == len(expected[name, 0])


RULES = {
    "one codec": "",
    "two codecs": "sink=raw16,recent:16=raw16,rest=int8",
    "three codecs": "sink=raw16,recent:64=raw16,recent:150=int8,rest=int4",
}


@needs_native
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_blocks_of_several_codecs_keep_their_memory(
    native_decoder: NativeDecoder, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = native_decoder.spec
    has_spans = "int4" in rule
    block_size = 64 if has_spans else 8
    shape = KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
    )
    num_blocks = 20 if has_spans else 28
    plan = tiny_plan(
        plane="native",
        weights="bf16",
        codec="raw16",
        precision=rule,
        demote_before_evict=bool(rule),
        transforms="none" if has_spans else "",
        block_size=block_size,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * shape.block_bytes,
        max_context_len=600 if has_spans else 160,
        max_running=6,
        max_batch_tokens=96 if has_spans else 48,
        max_queue=40,
    )
    transforms = uncalibrated(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    core = assemble(plan, native_decoder, IdTokenizer(), "tiny", transforms if has_spans else None)
    sites = (*CONTROL_PLANE, *ENGINE, *NATIVE, *(SLABS if rule else ()))
    failures = Failures(sites, random.Random(2), monkeypatch)
    clients = Clients(core, failures, seed=2, longest=300 if has_spans else 60)
    clients.serve(30)
    clients.check()
    told = {name for name, count in failures.num_failures.items() if count}
    assert told >= failures.num_failures.keys() - NOT_ASKED
    if rule:
        arena, manager = core._runner._arena, core._manager
        arena.apply(manager.take_memory_ops())
        assert dict(arena.stats().num_blocks) == dict(manager.stats().blocks_by_codec)
        assert manager.stats().num_demotions_by_age > 10

"""A whole engine around a tiny random model, driven step by step with every law checked after each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from tests.support.tiny_models import TINY_MODELS, build_reference, save

from kvist.engine.build import assemble
from kvist.engine.core import EngineCore, RequestGroup
from kvist.model.loader import load_decoder
from kvist.model.spec_readers import read_spec
from kvist.plan import EnginePlan
from kvist.types import FinishReason, OutputChunk, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kvist.model.decoder import Decoder

EOS = 2
CONTEXT = 192


class IdTokenizer:
    """A tokeniser for tests that look at token ids only."""

    vocab_size = 160
    eos_token_ids = (EOS,)
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


def load_tiny_decoder(folder: Path) -> Decoder:
    """Write the small llama-like model of the table and load it with Kvist's own loader."""
    model = next(model for model in TINY_MODELS if model.name == "llama-gqa")
    path = save(build_reference(model), folder)
    return load_decoder(path, read_spec(path), torch.float32)


def tiny_plan(**changes) -> EnginePlan:
    values = {
        "model": "tiny",
        "vocab_size": IdTokenizer.vocab_size,
        "plane": "torch",
        "isa": "",
        "weights": "float32",
        "weight_cache": False,
        "dtype": "float32",
        "codec": "float32",
        "block_size": 8,
        "num_blocks": 256,
        "kv_bytes": 0,
        "weight_bytes": 0,
        "max_context_len": CONTEXT,
        "threads": 1,
        "prefix_cache": True,
        "keep_kv": True,
        "eviction": "default",
        "cache_shares": (),
        "cache_ttl_s": 0.0,
        "pin_fraction": 0.0,
        "schedule": "fcfs",
        "max_overtakes": 64,
        "max_batch_tokens": 128,
        "max_running": 16,
        "max_queue": 2000,
        "reserve_tokens": 16,
        "notes": (),
    }
    values |= changes
    values.setdefault("max_pinned_blocks", int(values["num_blocks"] * values["pin_fraction"]))
    return EnginePlan(**values)


def make_core(decoder: Decoder, **changes) -> EngineCore:
    """Return a core around the decoder; ``changes`` are fields of the plan."""
    return assemble(tiny_plan(**changes), decoder, IdTokenizer(), "tiny")


@dataclass
class Answer:
    """What one sequence gave."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0


def request(name: str, prompt: Sequence[int], **params) -> RequestGroup:
    return RequestGroup(
        request_id=name, prompt_token_ids=tuple(prompt), params=SamplingParams(**params)
    )


class Session:
    """Answers so far of a core that is stepped by hand."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: dict[tuple[str, int], Answer] = {}

    def add(self, groups: Iterable[RequestGroup]) -> None:
        for group in groups:
            self.core.add(group)

    def step(self) -> None:
        self._take(self.core.step())
        self.core._manager.check_invariants()

    def abort(self, name: str) -> None:
        self._take(self.core.abort(name))
        self.core._manager.check_invariants()

    def run(self, groups: Iterable[RequestGroup] = ()) -> dict[tuple[str, int], Answer]:
        """Add the requests, step until idle, and return every answer."""
        self.add(groups)
        while self.core.has_work:
            self.step()
        self.core.check_invariants()
        return self.answers

    def _take(self, chunks: Iterable[object]) -> None:
        for chunk in chunks:
            assert isinstance(chunk, OutputChunk), chunk
            answer = self.answers.setdefault((chunk.request_id, chunk.index), Answer())
            assert answer.finish_reason is None, "a chunk after the last one"
            answer.token_ids += chunk.token_ids
            answer.finish_reason = chunk.finish_reason
            if chunk.usage is not None:
                answer.num_cached_tokens = chunk.usage.num_cached_tokens
                assert chunk.usage.num_output_tokens == len(answer.token_ids)


def unshared(decoder: Decoder, groups: Iterable[RequestGroup]) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of each sequence when every request is alone in an engine that shares nothing."""
    core = make_core(decoder, prefix_cache=False, max_batch_tokens=4096)
    answers: dict[tuple[str, int], list[int]] = {}
    for group in groups:
        got = Session(core).run([group])
        answers.update({key: answer.token_ids for key, answer in got.items()})
    return answers


def unshared_batches(
    decoder: Decoder, groups: Iterable[RequestGroup], **changes
) -> dict[tuple[str, int], list[int]]:
    """Return the same for many requests in less time: batched, but every sequence computes its own prompt."""
    plan = {"prefix_cache": False, "max_batch_tokens": 4096, "max_running": 32, "num_blocks": 1024}
    answers = Session(make_core(decoder, **{**plan, **changes})).run(groups)
    return {key: answer.token_ids for key, answer in answers.items()}

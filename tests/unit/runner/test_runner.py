"""The runner: a plan becomes inputs, copies, sampled rows and a result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvist.errors import InvariantViolation
from kvist.kernels import dispatch
from kvist.runner.runner import ModelRunner
from kvist.sched.output import BlockCopy, MemoryOp, SampleSpec, ScheduledSequence, StepPlan
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena
from kvist.types import SamplingParams

if TYPE_CHECKING:
    from kvist.kernels.batch import AttentionBatch

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, codec="float32")
VOCAB_SIZE = 17
GREEDY = SampleSpec(params=SamplingParams(temperature=0), seed=0, output_index=0)


class TinyDecoder:
    """Two layers of attention over random embeddings of tokens and positions."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.embeddings = torch.randn(VOCAB_SIZE, 8, generator=generator)
        self.positions = torch.randn(64, 8, generator=generator)
        self.batches: list[AttentionBatch] = []
        self.logit_rows: list[int] = []

    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, arena: BlockArena
    ) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        assert token_ids.dtype == torch.int64
        self.batches.append(batch)
        hidden = self.embeddings[token_ids] + self.positions[batch.positions]
        for layer in range(2):
            heads = hidden[:, None]
            arena.write(layer, batch.slots, heads, heads)
            hidden = hidden + dispatch.attention(heads, arena.layer(layer), batch, scale=0.3)[:, 0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logit_rows.append(len(hidden))
        return hidden @ self.embeddings.T


def sequence(
    name: str, start: int, tokens: list[int], table: list[int], sample: SampleSpec | None = GREEDY
) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=name,
        start=start,
        token_ids=tuple(tokens),
        block_table=tuple(table),
        sample=sample,
    )


def plan(*sequences: ScheduledSequence, copies: tuple[BlockCopy, ...] = ()) -> StepPlan:
    return StepPlan(step_index=3, copies=copies, sequences=sequences)


def make_runner() -> tuple[ModelRunner, TinyDecoder, BlockArena]:
    decoder, arena = TinyDecoder(), BlockArena(SPEC, 12)
    return ModelRunner(decoder, arena), decoder, arena


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def next_token(prompt: list[int]) -> int:
    runner, _, _ = make_runner()
    result = runner.run(plan(sequence("alone", 0, prompt, list(range(12)))))
    assert result.sample_ns > 0
    return result.samples["alone"].token_id


def test_inputs_are_flattened_in_plan_order() -> None:
    runner, decoder, _ = make_runner()
    runner.run(plan(sequence("a", 0, PROMPT, [7, 2, 9], None)))
    runner.run(plan(sequence("a", 9, [3, 5], [7, 2, 9]), sequence("b", 0, [4, 4, 4, 4, 4], [0, 5])))
    batch = decoder.batches[-1]
    assert batch.query_starts == (0, 2, 7)
    assert batch.context_lens == (11, 5)
    assert batch.positions.tolist() == [9, 10, 0, 1, 2, 3, 4]
    assert batch.slots.tolist() == [37, 38, 0, 1, 2, 3, 20]
    assert [table.tolist() for table in batch.block_tables] == [[7, 2, 9], [0, 5]]


def test_only_sampled_rows_get_logits() -> None:
    runner, decoder, _ = make_runner()
    result = runner.run(
        plan(
            sequence("a", 0, PROMPT, [7, 2, 9]),
            sequence("b", 0, [4, 4], [0], None),
            sequence("c", 0, [8], [1]),
        )
    )
    assert result.step_index == 3
    assert set(result.samples) == {"a", "c"}
    assert decoder.logit_rows == [2]
    assert result.samples["a"].token_id == next_token(PROMPT)
    assert result.samples["c"].token_id == next_token([8])


def test_a_step_without_samples_computes_no_logits() -> None:
    runner, decoder, _ = make_runner()
    result = runner.run(plan(sequence("a", 0, PROMPT, [7, 2, 9], None)))
    assert result.sample_ns == 0
    assert result.samples == {}
    assert result.failed == {}
    assert decoder.logit_rows == []


@pytest.mark.parametrize("chunk", range(1, 10))
def test_chunks_add_up_to_the_whole_prompt(chunk: int) -> None:
    runner, _, _ = make_runner()
    for start in range(0, len(PROMPT), chunk):
        result = runner.run(plan(sequence("a", start, PROMPT[start : start + chunk], [7, 2, 9])))
    assert result.samples["a"].token_id == next_token(PROMPT)


def test_copies_run_first_and_in_plan_order() -> None:
    """Block 5 gets the head of block 2 before block 2 is overwritten with block 0."""
    runner, _, arena = make_runner()
    runner.run(plan(sequence("a", 0, PROMPT, [0, 2, 9], None)))
    copies = (
        BlockCopy(source=2, target=5, num_tokens=3),
        BlockCopy(source=0, target=2, num_tokens=4),
    )
    forked = [*PROMPT[:7], 11]
    result = runner.run(plan(sequence("fork", 7, [11], [2, 5]), copies=copies))
    assert result.samples["fork"].token_id == next_token(forked)
    assert torch.equal(arena.block_bytes(0), arena.block_bytes(2))


def test_a_damaged_sequence_fails_alone_and_is_named() -> None:
    runner, decoder, _ = make_runner()
    decoder.embeddings[13] = float("nan")
    # The output projection is tied to the embeddings: keep that row out of the others' logits.
    logits = decoder.logits
    decoder.logits = lambda hidden: logits(hidden)[:, :13]  # type: ignore[method-assign]
    result = runner.run(
        plan(
            sequence("good", 0, [1, 2], [0]),
            sequence("bad", 0, [13], [1]),
            sequence("also good", 0, [3], [2]),
        )
    )
    assert set(result.samples) == {"good", "also good"}
    assert set(result.failed) == {"bad"}
    assert result.damaged == {"bad"}
    assert "expected finite K and V, received others at position 0" in result.failed["bad"]
    assert "(request bad)" in result.failed["bad"]


def test_nan_left_in_reused_blocks_reaches_no_other_sequence() -> None:
    runner, _, arena = make_runner()
    for block in range(12):
        arena.block_bytes(block).fill_(255)
    assert torch.isnan(arena.layer(0)).all()
    result = runner.run(
        plan(sequence("a", 0, PROMPT, [7, 2, 9], None), sequence("b", 0, [8], [1], None))
    )
    assert result.failed == {}
    result = runner.run(plan(sequence("a", 9, [5], [7, 2, 9]), sequence("b", 1, [8], [1])))
    assert result.failed == {}
    assert result.samples["a"].token_id == next_token([*PROMPT, 5])


def test_memory_operations_are_refused() -> None:
    runner, decoder, _ = make_runner()
    with pytest.raises(InvariantViolation, match=r"no memory operations .* received 1, the first"):
        runner.run(
            StepPlan(
                step_index=7,
                copies=(),
                sequences=(sequence("a", 0, [1], [9]),),
                memory_ops=(MemoryOp("free", 2, ""),),
            )
        )
    assert not decoder.batches

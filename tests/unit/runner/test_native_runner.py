"""The runner of the native plane: a plan becomes arrays, and scores become a result."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvist.errors import InvariantViolation
from kvist.kernels import native
from kvist.model.native_decoder import StepScores, StepSequence
from kvist.runner.native_runner import NativeRunner
from kvist.sched.output import BlockCopy, MemoryOp, SampleSpec, ScheduledSequence, StepPlan
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena
from kvist.storage.slabs import SlabArena
from kvist.types import SamplingParams

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, codec="raw16")
VOCAB_SIZE = 17
GREEDY = SampleSpec(params=SamplingParams(temperature=0), seed=0, output_index=0)
DRAWN = SampleSpec(
    params=SamplingParams(temperature=1.0, logit_bias={5: 90.0}), seed=0, output_index=0
)


class ScoreDecoder:
    """Scores token ``(3 * token) % VOCAB_SIZE`` best after each token; reports the rows it is told to."""

    def __init__(self) -> None:
        self.steps: list[list[StepSequence]] = []
        self.blocks: list[torch.Tensor] = []
        self.damaged_rows: list[int] = []

    def wake(self) -> None:
        pass

    def step(self, sequences: list[StepSequence], arena: BlockArena, meanwhile=None) -> StepScores:
        self.steps.append(sequences)
        self.blocks.append(arena.slab.clone())
        last = [sequence.token_ids[-1] for sequence in sequences if sequence.num_logits]
        best = 3 * np.array(last, np.int64) % VOCAB_SIZE
        # More rows than were asked for: the buffer is kept from larger steps.
        logits = np.zeros((len(best) + 2, VOCAB_SIZE), np.float32)
        logits[np.arange(len(best)), best] = 2.0
        return StepScores(
            logits=logits,
            best_logits=[2.0] * len(best),
            best_ids=best.tolist(),
            damaged_rows=self.damaged_rows,
        )


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


def make_runner() -> tuple[NativeRunner, ScoreDecoder, BlockArena]:
    decoder, arena = ScoreDecoder(), BlockArena(SPEC, 12)
    return NativeRunner(decoder, arena), decoder, arena


def test_sequences_are_handed_over_in_plan_order() -> None:
    runner, decoder, _ = make_runner()
    result = runner.run(
        plan(
            sequence("a", 9, [3, 5], [7, 2, 9, 11]),
            sequence("b", 0, [4, 4, 4, 4, 4], [0, 5], None),
            sequence("c", 3, [6], [8]),
        )
    )
    assert decoder.steps == [
        [
            (9, (3, 5), (7, 2, 9, 11), 1),
            (0, (4, 4, 4, 4, 4), (0, 5), 0),
            (3, (6,), (8,), 1),
        ]
    ]
    assert result.step_index == 3
    assert {name: token.token_id for name, token in result.samples.items()} == {"a": 15, "c": 1}
    assert result.failed == {}


def test_rows_that_are_not_plain_are_sampled_from_their_logits() -> None:
    runner, _, _ = make_runner()
    result = runner.run(plan(sequence("a", 0, [2], [0]), sequence("b", 0, [2], [1], DRAWN)))
    assert {name: token.token_id for name, token in result.samples.items()} == {"a": 6, "b": 5}


def test_copies_run_first_and_in_plan_order() -> None:
    runner, decoder, arena = make_runner()
    arena.slab.copy_(torch.arange(12, dtype=torch.uint8)[:, None].expand_as(arena.slab))
    copies = (
        BlockCopy(source=2, target=5, num_tokens=4),
        BlockCopy(source=0, target=2, num_tokens=4),
    )
    runner.run(plan(sequence("a", 0, [1], [9]), copies=copies))
    assert decoder.blocks[-1][5].unique().tolist() == [2]
    assert decoder.blocks[-1][2].unique().tolist() == [0]


def test_a_sequence_that_wrote_damaged_values_fails_alone_and_is_named() -> None:
    runner, decoder, _ = make_runner()
    decoder.damaged_rows = [3, 4]
    result = runner.run(
        plan(
            sequence("good", 0, [1, 2], [0]),
            sequence("bad", 6, [8, 9, 10], [1, 2, 3], None),
            sequence("also good", 0, [3], [4]),
        )
    )
    assert set(result.samples) == {"good", "also good"}
    assert set(result.failed) == {"bad"}
    # The first damaged row: the second of its three, at position 7.
    assert "at position 7 (request bad)" in result.failed["bad"]


@pytest.mark.skipif(not native.available(), reason="the native kernels were not built")
def test_memory_operations_run_before_anything_else_and_in_order() -> None:
    decoder = ScoreDecoder()
    arena = SlabArena(SPEC, ("raw16", "int8"), 2**16, native.extension().Pool(1))
    runner = NativeRunner(decoder, arena)
    arena.apply([MemoryOp("allocate", 2, "raw16")])
    arena.block(2)[:] = 0
    runner.run(
        StepPlan(
            step_index=3,
            copies=(),
            sequences=(sequence("a", 0, [1], [9]),),
            memory_ops=(
                MemoryOp("demote", 2, "int8"),
                MemoryOp("allocate", 9, "raw16"),
                BlockCopy(source=2, target=9, num_tokens=4),
                MemoryOp("free", 2, ""),
            ),
        )
    )
    start = int(arena.offsets[9])
    step_memory = decoder.blocks[-1].reshape(-1)
    assert not step_memory[start : start + SPEC.block_bytes].any()
    assert arena.stats().num_blocks == {"raw16": 1, "int8": 0}


def test_memory_operations_on_blocks_of_one_codec_are_refused() -> None:
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
    assert not decoder.steps

"""From a plan to its result on the native plane: the same contract as ``runner.ModelRunner``, one call a step.

Responsible for handing a plan's sequences to the decoder and for sampling from what comes back. Keeps nothing between
steps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from kvist.errors import InvariantViolation
from kvist.model.native_decoder import StepSequence
from kvist.runner.damage import damage_messages
from kvist.runner.sampler import SampleFailure, sample_rows
from kvist.sched.output import StepResult
from kvist.storage.slabs import SlabArena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvist.model.native_decoder import StepScores
    from kvist.runner.sampler import DrawTokens
    from kvist.sched.output import SampledToken, SampleSpec, ScheduledSequence, StepPlan
    from kvist.storage.arena import BlockArena
    from kvist.types import BlockCopy, MemoryOp, RequestId


class Decoder(Protocol):
    """The model, as this runner sees it."""

    def wake(self) -> None:
        """Be told that a step is near."""
        ...

    def step(
        self,
        sequences: list[StepSequence],
        arena: BlockArena | SlabArena,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepScores:
        """Compute the step's tokens, store their K and V, and score the rows asked for."""
        ...


class NativeRunner:
    """Runs plans, one at a time, on the engine's thread.

    Args:
        decoder: The model.
        arena: Its KV blocks, in the machine's memory.
        draw_all: Carries out the draws of a step; default: numpy.
    """

    def __init__(
        self,
        decoder: Decoder,
        arena: BlockArena | SlabArena,
        draw_all: DrawTokens | None = None,
    ) -> None:
        self._decoder = decoder
        self._arena = arena
        self._slabs = arena if isinstance(arena, SlabArena) else None
        self._draw_all = draw_all

    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Carry out one step and return the tokens it chose.

        Args:
            plan: What to compute.
            meanwhile: Called once the kernels run; None: there is nothing to do.

        Raises:
            InvariantViolation: The plan changes the memory of blocks, and the arena's blocks have one codec.
            MemoryError: There was none for computing the step. It may be run again, or another one with its copies.

        Mutates: The arena: memory of blocks, targets of copies and slots of the scheduled tokens.
        """
        self._decoder.wake()
        begin_ns = time.perf_counter_ns()
        if self._slabs is not None or plan.memory_ops:
            self.change_memory(plan.memory_ops)
        # In plan order: a later copy may overwrite the source of an earlier one.
        for copy in plan.copies:
            self._arena.copy(copy.source, copy.target, copy.num_tokens)
        memory_ns = time.perf_counter_ns() - begin_ns
        steps: list[StepSequence] = []
        sampled: list[ScheduledSequence] = []
        specs: list[SampleSpec] = []
        for sequence in plan.sequences:
            if sequence.sample is not None:
                sampled.append(sequence)
                specs.append(sequence.sample)
            steps.append(
                StepSequence(
                    sequence.start,
                    sequence.token_ids,
                    sequence.block_table,
                    0 if sequence.sample is None else 1,
                )
            )
        scores = self._decoder.step(steps, self._arena, meanwhile)
        started_ns = time.perf_counter_ns()
        outcomes = sample_rows(
            scores.logits, scores.best_logits, scores.best_ids, specs, self._draw_all
        )
        sample_ns = time.perf_counter_ns() - started_ns
        samples: dict[RequestId, SampledToken] = {}
        failed: dict[RequestId, str] = {}
        if scores.damaged_rows:
            failed = damage_messages(plan.sequences, scores.damaged_rows)
        damaged = frozenset(failed)
        for index, outcome in enumerate(outcomes):
            request_id = sampled[index].request_id
            if request_id in failed:
                continue
            if isinstance(outcome, SampleFailure):
                failed[request_id] = f"{outcome.message} (request {request_id})"
                if outcome.is_damage:
                    damaged |= {request_id}
            else:
                samples[request_id] = outcome
        return StepResult(plan.step_index, samples, failed, damaged, sample_ns, memory_ns)

    def change_memory(self, ops: Sequence[MemoryOp | BlockCopy]) -> None:
        """Carry out what happens to the memory of blocks between two steps, in order.

        Raises:
            InvariantViolation: There is something, and the arena's blocks have one codec.

        Mutates: The arena.
        """
        if self._slabs is not None:
            self._slabs.apply(ops)  # after what an earlier call had no memory for
        elif ops:
            raise InvariantViolation(
                "[runner] expected no memory operations where blocks have one codec, received "
                f"{len(ops)}, the first of them {ops[0]}"
            )

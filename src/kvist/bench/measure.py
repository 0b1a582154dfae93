"""The measurement: every peer, every row, several runs, one peer at a time.

Responsible for the order, which is the fair one: run by run, row by row, peer after peer (ABAB), so that a noisy minute
of the machine hits everybody alike; and for handing every output to the checker. Knows nothing of how peers work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.bench.work import KV_CACHE, ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvist.bench.check import Checker
    from kvist.bench.peers import Peer
    from kvist.bench.work import Output, Row, Task, Workload

SANITY = "sanity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of the table."""

    run: int
    """From 0."""
    row: Row
    peer: Peer
    value: float
    """In the row's unit."""
    num_prompt_tokens: int
    """Of the timed requests."""
    num_cached_tokens: int | None
    """Of those, by the peer's own count; None when it does not say."""


def rows_of(peer: Peer, rows: Sequence[Row], cacheless: frozenset[str]) -> list[Row]:
    """Return the rows that a peer takes part in.

    Args:
        peer: Any.
        rows: All rows of the table.
        cacheless: Names of the peers that run without a KV cache: they are in the row about that and in no other.
    """
    if peer.name in cacheless:
        return [row for row in rows if row.name == KV_CACHE]
    return [row for row in rows if row.name != KV_CACHE or peer.is_kvist]


def measure(
    peers: Mapping[Peer, Sequence[Row]],
    workload: Workload,
    checker: Checker,
    num_runs: int,
    on_measured: Callable[[Sample], None],
) -> list[Sample]:
    """Run everything and return the values.

    Args:
        peers: And the rows that each takes part in.
        workload: What to ask.
        checker: Gets every output.
        num_runs: Runs of each row.
        on_measured: Called with each value as it comes.

    Raises:
        BenchError: A peer died or did not do what it was asked to.
    """
    rows = {row.name: row for taken in peers.values() for row in taken}
    samples: list[Sample] = []
    for peer in peers:
        for batch in workload.sanity():
            checker.add(peer.name, batch, peer.run(SANITY, batch), is_compared=True)
    for run in range(num_runs):
        for row in sorted(rows.values(), key=ROWS.index):
            task = workload.task(row, run)
            for peer in [peer for peer, taken in peers.items() if row in taken]:
                answers = _run(peer, row, task, checker)
                sample = _sample(run, row, peer, task, answers)
                samples.append(sample)
                on_measured(sample)
    return samples


def _run(peer: Peer, row: Row, task: Task, checker: Checker) -> list[list[Output]]:
    for batch in task.primes:
        checker.add(peer.name, batch, peer.run(row.name, batch), is_compared=False)
    answers = [peer.run(row.name, batch) for batch in task.timed]
    for batch, outputs in zip(task.timed, answers, strict=True):
        checker.add(peer.name, batch, outputs, is_compared=row.is_checked)
    return answers


def _sample(run: int, row: Row, peer: Peer, task: Task, answers: list[list[Output]]) -> Sample:
    cached = [output.num_cached_tokens for outputs in answers for output in outputs]
    said = [count for count in cached if count is not None]
    return Sample(
        run=run,
        row=row,
        peer=peer,
        value=row.measure(task, answers),
        num_prompt_tokens=sum(len(prompt) for batch in task.timed for prompt in batch.prompts),
        num_cached_tokens=sum(said) if len(said) == len(cached) else None,
    )


def checked_prompts(workload: Workload, rows: Sequence[Row], num_runs: int) -> list[list[int]]:
    """Return every prompt whose output is compared, each once."""
    batches = list(workload.sanity())
    for run in range(num_runs):
        for row in rows:
            if row.is_checked:
                batches += workload.task(row, run).timed
    prompts = {tuple(prompt): prompt for batch in batches for prompt in batch.prompts}
    return list(prompts.values())

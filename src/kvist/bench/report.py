"""What is said of the values: medians, spreads and ratios.

Responsible for the document that is printed as JSON and drawn. Knows nothing of how the values were measured.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.bench.measure import Sample
    from kvist.bench.peers import Peer
    from kvist.bench.work import Row

Document = dict[str, Any]  # Any: JSON values


def rows_document(samples: Sequence[Sample]) -> list[Document]:
    """Return for each row the summaries of all peers, and how many times faster Kvist is.

    A ratio is of medians, and above 1 where Kvist is ahead, whichever way the row counts. It is taken against the best
    member of each family; ``is_clear`` says that no run of the one was within the spread of the other.
    """
    rows = list(dict.fromkeys(sample.row for sample in samples))
    documents: list[Document] = []
    for row in rows:
        columns = _columns([sample for sample in samples if sample.row == row])
        documents.append(
            {
                "row": row.name,
                "title": row.title,
                "unit": row.unit,
                "peers": {column.peer.name: _summary(column) for column in columns},
                "ratios": _ratios(row, columns),
            }
        )
    return documents


@dataclass(frozen=True, slots=True)
class _Column:
    """The samples of one peer in one row."""

    peer: Peer
    samples: list[Sample]

    @property
    def values(self) -> list[float]:
        return [sample.value for sample in self.samples]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def _columns(samples: Sequence[Sample]) -> list[_Column]:
    peers = {sample.peer.name: sample.peer for sample in samples}
    return [
        _Column(peer, [sample for sample in samples if sample.peer.name == name])
        for name, peer in peers.items()
    ]


def _summary(column: _Column) -> Document:
    cached = [sample.num_cached_tokens for sample in column.samples]
    return {
        "median": column.median,
        "min": min(column.values),
        "max": max(column.values),
        "runs": column.values,
        "prompt_tokens": [sample.num_prompt_tokens for sample in column.samples],
        "cached_tokens": None if None in cached else cached,
    }


def _ratios(row: Row, columns: Sequence[_Column]) -> list[Document]:
    families: dict[str, list[_Column]] = {}
    for column in columns:
        if not column.peer.is_kvist:
            families.setdefault(column.peer.family, []).append(column)
    ratios: list[Document] = []
    for own in [column for column in columns if column.peer.is_kvist]:
        for family, members in families.items():
            best = (max if row.is_speed else min)(members, key=lambda column: column.median)
            ratio = own.median / best.median
            ratios.append(
                {
                    "kvist": own.peer.name,
                    "family": family,
                    "peer": best.peer.name,
                    "ratio": ratio if row.is_speed else 1 / ratio,
                    "is_clear": min(own.values) > max(best.values)
                    or max(own.values) < min(best.values),
                }
            )
    return ratios

"""Recorded traces, read into one kind of record.

Responsible for three public file formats and for saying which line of a file is wrong. Knows no cache and no cost of
anything. Records come out in the order of their arrival.

    mooncake   JSON lines, one request each: timestamp (ms), input_length, output_length, hash_ids (one id for each 512
               tokens of the prompt, the last one for what is left; equal ids mean equal prefixes)
    sessions   JSON lines, one coding-agent session each, with its requests, and those of its sub-agents: t (s), in,
               out, hash_runs ([first id, number of ids] for the whole blocks of the prompt)
    azure      CSV, one request each: arrival time, prompt tokens, output tokens; nothing about prefixes

A file whose name ends in .gz is decompressed. Ids of a session file hold within their session; they are moved apart
here, so in every record of every format an id stands for one block and its whole prefix.

Source: kvcache-ai/Mooncake (FAST25-release/traces), callanjfox/kv-cache-tester (traces), Azure/AzurePublicDataset
(AzureLLMInferenceTrace).
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TextIO, cast

from kvist.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

MOONCAKE_BLOCK_SIZE = 512
"""Tokens for each id of a mooncake file."""
_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_NUM_AZURE_FIELDS = 3
_MS_PER_S = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Seconds since the trace began, >= 0."""
    num_input_tokens: int
    """Tokens of the prompt, >= 0."""
    num_output_tokens: int
    """Tokens generated, >= 0."""
    session: str
    """What it belongs to; empty when the format does not say."""
    block_size: int
    """Tokens for each block id; 0: the format says nothing about prefixes."""
    block_runs: tuple[range, ...] = ()
    """Ids of the prompt's blocks in order, as runs of consecutive ids. An id stands for the block and its prefix; the
    last block may have fewer tokens, and tokens after the last block are nobody else's."""

    @property
    def num_blocks(self) -> int:
        """Block ids of the prompt."""
        return sum([len(run) for run in self.block_runs])

    @property
    def block_ids(self) -> list[int]:
        """Ids of the prompt's blocks in order. O(blocks)."""
        return list(chain.from_iterable(self.block_runs))

    def num_block_tokens(self, num_blocks: int) -> int:
        """Return the tokens in the first ``num_blocks`` blocks of the prompt."""
        return min(num_blocks * self.block_size, self.num_input_tokens)


def read_trace(
    path: Path, format_name: str, *, max_sessions: int | None = None
) -> Iterator[TraceRequest]:
    """Yield the requests of a trace in the order of their arrival.

    A mooncake or azure file is read line by line. A session file is read whole first, since every session begins at
    zero; runs of ids keep it small.

    Args:
        path: The file.
        format_name: A name in ``FORMATS``.
        max_sessions: Read so many sessions, the first of the file; None: all. Formats without sessions refuse it.

    Raises:
        TraceError: The format is unknown, the file cannot be read, or a line is malformed; the message has its number.
    """
    if format_name not in FORMATS:
        raise TraceError(
            f"[replay] unknown trace format {format_name!r}; known: {', '.join(FORMATS)}"
        )
    if max_sessions is not None and format_name != "sessions":
        raise TraceError(f"[replay] a {format_name} trace has no sessions to choose from")
    try:
        with _open(path) as lines:
            if format_name == "sessions":
                yield from read_sessions(lines, max_sessions=max_sessions)
            else:
                yield from FORMATS[format_name](lines)
    # A gzip file cut short raises EOFError.
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"[replay] cannot read the trace {path.name}: {error}") from error


def read_mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Yield the requests of a mooncake file; see ``read_trace``."""
    last_ms = 0.0
    for number, line in enumerate(lines, start=1):
        with _at_line(number):
            fields = _json_object(line)
            arrival_ms = _number(fields, "timestamp", minimum=last_ms)
            num_input_tokens = _count(fields, "input_length")
            block_ids = _ids(fields.get("hash_ids"))
            num_expected = -(-num_input_tokens // MOONCAKE_BLOCK_SIZE)
            if len(block_ids) != num_expected:
                raise ValueError(
                    f"{num_input_tokens} tokens have {num_expected} ids, received {len(block_ids)}"
                )
            request = TraceRequest(
                arrival_s=arrival_ms / _MS_PER_S,
                num_input_tokens=num_input_tokens,
                num_output_tokens=_count(fields, "output_length"),
                session="",
                block_size=MOONCAKE_BLOCK_SIZE,
                block_runs=_runs(block_ids),
            )
        last_ms = arrival_ms
        yield request


def read_sessions(
    lines: Iterable[str], *, max_sessions: int | None = None
) -> Iterator[TraceRequest]:
    """Yield the requests of a file of coding-agent sessions, all of which begin at zero; see ``read_trace``.

    Complexity: O(requests log requests), and their runs in memory.
    """
    requests: list[TraceRequest] = []
    first_id = 0
    for number, line in enumerate(islice(lines, max_sessions), start=1):
        with _at_line(number):
            session = _session(_json_object(line), first_id)
        requests += session
        first_id = max(
            [run.stop for request in session for run in request.block_runs], default=first_id
        )
    # Stable: requests of one moment stay in the order of the file.
    requests.sort(key=lambda request: request.arrival_s)
    yield from requests


def read_azure(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Yield the requests of an azure file; see ``read_trace``."""
    first: datetime | None = None
    last_s = 0.0
    for number, line in enumerate(lines, start=1):
        with _at_line(number):
            if number == 1:
                if line.strip() != _AZURE_HEADER:
                    raise ValueError(f"expected the header {_AZURE_HEADER}")
                continue
            values = line.strip().split(",")
            if len(values) != _NUM_AZURE_FIELDS:
                raise ValueError(f"expected {_NUM_AZURE_FIELDS} fields, received {len(values)}")
            arrival = datetime.fromisoformat(values[0])
            first = arrival if first is None else first
            arrival_s = (arrival - first).total_seconds()
            fields: dict[str, object] = {
                "arrival": arrival_s,
                "ContextTokens": int(values[1]),
                "GeneratedTokens": int(values[2]),
            }
            last_s = _number(fields, "arrival", minimum=last_s)
            request = TraceRequest(
                arrival_s=arrival_s,
                num_input_tokens=_count(fields, "ContextTokens"),
                num_output_tokens=_count(fields, "GeneratedTokens"),
                session="",
                block_size=0,
            )
        yield request


FORMATS: Mapping[str, Callable[[Iterable[str]], Iterator[TraceRequest]]] = {
    "mooncake": read_mooncake,
    "sessions": read_sessions,
    "azure": read_azure,
}
"""Readers by the name of their format."""


# --- parts of lines


class _at_line:  # noqa: N801  # reads as a verb where it is used
    """Turns what is wrong with a line into an error with the number of the line."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, (ValueError, TypeError, KeyError)):
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"[replay] line {self._number} of the trace: {what}") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return cast("TextIO", gzip.open(path, "rt", encoding="utf-8"))
    return path.open(encoding="utf-8")


def _json_object(line: str) -> dict[str, object]:
    return _object(json.loads(line))


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a JSON object, received {type(value).__name__}")
    return value


def _number(fields: Mapping[str, object], name: str, *, minimum: float) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"expected a number as {name}, received {value!r}")
    # The comparison is false for NaN too.
    if not minimum <= value < float("inf"):
        raise ValueError(f"expected {name} >= {minimum}, received {value}")
    return value


def _count(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a whole number as {name}, received {value!r}")
    if value < 0:
        raise ValueError(f"expected {name} >= 0, received {value}")
    return value


def _list(value: object, name: str) -> list[Any]:  # Any: elements are checked one by one
    if not isinstance(value, list):
        raise TypeError(f"expected a list as {name}, received {value!r}")
    return value


def _ids(value: object) -> list[int]:
    ids = _list(value, "hash_ids")
    if not all(type(block_id) is int and block_id >= 0 for block_id in ids):
        raise ValueError("hash_ids must be whole numbers >= 0")
    return ids


def _runs(ids: list[int]) -> tuple[range, ...]:
    """Cut ids into runs of consecutive ones."""
    starts = [index for index, value in enumerate(ids) if index == 0 or value != ids[index - 1] + 1]
    ends = [*starts[1:], len(ids)]
    return tuple(
        [
            range(ids[start], ids[start] + end - start)
            for start, end in zip(starts, ends, strict=False)
        ]
    )


def _session(fields: Mapping[str, object], first_id: int) -> list[TraceRequest]:
    """Return the requests of one session, its ids moved up by ``first_id``."""
    name = str(fields["id"])
    block_size = _count(fields, "block_size")
    if block_size == 0:
        raise ValueError("expected block_size >= 1, received 0")
    requests = []
    for entry in _list(fields["requests"], "requests"):
        nested = _object(entry).get("requests")
        # A sub-agent's clock starts with it.
        start_s = 0.0 if nested is None else _number(entry, "t", minimum=0.0)
        for request in (entry,) if nested is None else map(_object, _list(nested, "requests")):
            num_input_tokens = _count(request, "in")
            runs = _shifted_runs(_list(request["hash_runs"], "hash_runs"), first_id)
            num_ids = sum([len(run) for run in runs])
            if num_ids * block_size > num_input_tokens:
                raise ValueError(f"{num_ids} blocks do not fit {num_input_tokens} tokens")
            requests.append(
                TraceRequest(
                    arrival_s=start_s + _number(request, "t", minimum=0.0),
                    num_input_tokens=num_input_tokens,
                    num_output_tokens=_count(request, "out"),
                    session=name,
                    block_size=block_size,
                    block_runs=runs,
                )
            )
    return requests


def _shifted_runs(pairs: list[Any], offset: int) -> tuple[range, ...]:
    runs = []
    for pair in pairs:
        if not isinstance(pair, list) or [type(value) for value in pair] != [int, int]:
            raise TypeError(f"expected [first id, number of ids] in hash_runs, received {pair!r}")
        first, count = pair
        if first < 0 or count < 1:
            raise ValueError(f"expected first id >= 0 and number >= 1, received {pair!r}")
        runs.append(range(offset + first, offset + first + count))
    return tuple(runs)

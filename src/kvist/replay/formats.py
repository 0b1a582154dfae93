"""Which format a trace file has, told from its first line.

Responsible for that guess and for the size of a trace. Knows no cache.
"""

from __future__ import annotations

import gzip
import json
from itertools import islice
from typing import TYPE_CHECKING

from kvist.errors import TraceError
from kvist.replay.traces import FORMATS, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvist.replay.traces import TraceRequest

ALIASES = {"claude-code": "sessions"}
"""Other names that people know a format by."""
_MAX_FIRST_LINE = 2**24


def detect_format(path: Path) -> str:
    """Return the name of the format, a key of ``traces.FORMATS``.

    Raises:
        TraceError: The file cannot be read, or its first line is of no known format.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            line = file.readline(_MAX_FIRST_LINE).decode(errors="replace")
    except (OSError, EOFError) as error:
        raise TraceError(f"[replay] cannot read the trace {path.name}: {error}") from error
    if line.startswith("TIMESTAMP,"):
        return "azure"
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if isinstance(fields, dict):
        if "hash_ids" in fields:
            return "mooncake"
        if "requests" in fields:
            return "sessions"
    raise TraceError(
        f"[replay] the first line of {path.name} is of no known format; name one with --format: "
        f"{', '.join([*FORMATS, *ALIASES])}"
    )


def load_trace(
    path: Path, format_name: str | None, *, max_requests: int | None, max_sessions: int | None
) -> list[TraceRequest]:
    """Return the requests of a trace in the order of their arrival.

    Args:
        path: The file.
        format_name: A key of ``traces.FORMATS`` or of ``ALIASES``; None: told from the first line.
        max_requests: Keep so many, the first; None: all.
        max_sessions: As ``read_trace``.

    Raises:
        TraceError: The file cannot be read, a line is malformed, or there is no request in it.
    """
    name = detect_format(path) if format_name is None else ALIASES.get(format_name, format_name)
    try:
        records = list(islice(read_trace(path, name, max_sessions=max_sessions), max_requests))
    except TraceError as error:
        message = str(error)
        if path.name in message:
            raise
        raise TraceError(message.replace("[replay]", f"[replay] {path.name}:", 1)) from error
    if not records:
        raise TraceError(f"[replay] {path.name} holds no requests")
    return records


def block_size_of(records: Sequence[TraceRequest], default: int) -> int:
    """Return the tokens per block id of a trace; ``default`` when it says nothing about prefixes.

    Raises:
        TraceError: Its requests differ.
    """
    sizes = {record.block_size for record in records}
    if len(sizes) > 1:
        raise TraceError(
            f"[replay] all requests must have blocks of one size, received {sorted(sizes)}"
        )
    return sizes.pop() or default


def num_distinct_blocks(records: Sequence[TraceRequest], block_size: int) -> int:
    """Return the blocks that an endless cache would hold at the end, of prompts alone. O(blocks)."""
    num_unshared = 0
    block_ids: set[int] = set()
    for record in records:
        if record.block_size == 0:
            num_unshared += -(-record.num_input_tokens // block_size)
        for run in record.block_runs:
            block_ids.update(run)
    return num_unshared + len(block_ids)

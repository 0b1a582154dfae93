"""The three trace formats, and what is said of a file that is wrong."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from kvist.errors import TraceError
from kvist.replay.traces import TraceRequest, read_trace

if TYPE_CHECKING:
    from pathlib import Path

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def mooncake(**changes: object) -> str:
    fields = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 5]}
    return json.dumps({**fields, **changes})


def request(t: float, runs: list[list[int]], **changes: object) -> dict[str, object]:
    return {"t": t, "type": "n", "in": 1000, "out": 9, "hash_runs": runs, **changes}


def session(name: str, *requests: object, **changes: object) -> str:
    return json.dumps({"id": name, "block_size": 64, "requests": list(requests), **changes})


def read(tmp_path: Path, name: str, text: str, **options: int) -> list[TraceRequest]:
    path = tmp_path / "trace"
    path.write_text(text)
    return list(read_trace(path, name, **options))


def test_reads_mooncake(tmp_path: Path) -> None:
    (record,) = read(tmp_path, "mooncake", mooncake())
    assert record == TraceRequest(
        arrival_s=1.5,
        num_input_tokens=1100,
        num_output_tokens=7,
        session="",
        block_size=512,
        block_runs=(range(2), range(5, 6)),
    )
    assert record.block_ids == [0, 1, 5]
    assert record.num_blocks == 3
    assert [record.num_block_tokens(n) for n in range(4)] == [0, 512, 1024, 1100]


def test_sessions_are_interleaved_and_their_ids_moved_apart(tmp_path: Path) -> None:
    text = "\n".join(
        [
            session("a", request(0, [[1, 3]]), request(5, [[1, 2], [4, 1]])),
            session("b", request(0, [[1, 1]]), request(2.5, [[1, 2]])),
        ]
    )
    records = read(tmp_path, "sessions", text)
    seen = [(record.session, record.arrival_s, record.block_ids) for record in records]
    assert seen == [
        ("a", 0, [1, 2, 3]),
        ("b", 0, [6]),
        ("b", 2.5, [6, 7]),
        ("a", 5, [1, 2, 4]),
    ]
    assert {record.block_size for record in records} == {64}
    assert {r.session for r in read(tmp_path, "sessions", text, max_sessions=1)} == {"a"}


def test_the_clock_of_a_sub_agent_starts_with_it(tmp_path: Path) -> None:
    nested = {"t": 100.5, "type": "subagent", "requests": [request(0, [[9, 1]]), request(2, [])]}
    records = read(tmp_path, "sessions", session("a", nested, request(101, [[1, 1]])))
    assert [(r.arrival_s, r.block_ids) for r in records] == [(100.5, [9]), (101, [1]), (102.5, [])]


def test_reads_azure(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    first, second = read(tmp_path, "azure", text)
    assert (first.arrival_s, first.num_input_tokens, first.num_output_tokens) == (0, 374, 44)
    assert second.arrival_s == pytest.approx(4.3145790, abs=1e-6)
    assert (second.num_blocks, second.block_size, second.session) == (0, 0, "")


def test_reads_gzip(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(mooncake().encode()))
    assert len(list(read_trace(path, "mooncake"))) == 1
    path.write_bytes(gzip.compress(mooncake().encode())[:-9])
    with pytest.raises(TraceError, match=r"cannot read the trace trace.jsonl.gz: "):
        list(read_trace(path, "mooncake"))


def test_mooncake_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(mooncake() + "\nnonsense")
    records = read_trace(path, "mooncake")
    assert next(records).num_input_tokens == 1100
    with pytest.raises(TraceError, match="line 2"):
        next(records)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timestamp": "x"}, "expected a number as timestamp, received 'x'"),
        ({"timestamp": True}, "expected a number as timestamp, received True"),
        ({"timestamp": -1}, "expected timestamp >= 1500, received -1"),
        ({"timestamp": float("nan")}, "expected timestamp >= 1500, received nan"),
        ({"timestamp": float("inf")}, "expected timestamp >= 1500, received inf"),
        ({"input_length": 1.5}, "expected a whole number as input_length, received 1.5"),
        ({"input_length": None}, "expected a whole number as input_length, received None"),
        ({"output_length": -1}, "expected output_length >= 0, received -1"),
        ({"hash_ids": "x"}, "expected a list as hash_ids, received 'x'"),
        ({"hash_ids": [1, True, 2]}, "hash_ids must be whole numbers >= 0"),
        ({"hash_ids": [1, -1, 2]}, "hash_ids must be whole numbers >= 0"),
        ({"hash_ids": [1]}, "1100 tokens have 3 ids, received 1"),
    ],
)
def test_a_wrong_mooncake_line_is_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, "mooncake", f"{mooncake()}\n{mooncake(**changes)}\n")
    assert str(caught.value) == f"[replay] line 2 of the trace: {message}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        ("[]", "expected a JSON object, received list"),
        ("{}", "no field 'id'"),
        (session("a", 5), "expected a JSON object, received int"),
        (session("a", {"requests": [5], "t": 0}), "expected a JSON object, received int"),
        (session("a", {"requests": 5, "t": 0}), "expected a list as requests, received 5"),
        (session("a", {"requests": []}), "expected a number as t, received None"),
        (session("a", block_size=0), "expected block_size >= 1, received 0"),
        (session("a", request(-1, [])), "expected t >= 0.0, received -1"),
        (session("a", request(0, [[1, 16]])), "16 blocks do not fit 1000 tokens"),
        (session("a", request(0, [[1]])), r"expected \[first id, number of ids\] in hash_runs"),
        (session("a", request(0, [5])), r"expected \[first id, number of ids\] in hash_runs"),
        (session("a", request(0, [[-1, 1]])), "expected first id >= 0 and number >= 1"),
        (session("a", request(0, [[1, 0]])), "expected first id >= 0 and number >= 1"),
    ],
)
def test_a_wrong_session_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(TraceError, match=rf"\[replay\] line 2 of the trace: {message}"):
        read(tmp_path, "sessions", f"{session('z')}\n{line}\n")


@pytest.mark.parametrize(
    ("text", "number", "message"),
    [
        ("a,b,c\n", 1, "expected the header TIMESTAMP,ContextTokens,GeneratedTokens"),
        (AZURE + "2023-11-16 18:15:46,1\n", 2, "expected 3 fields, received 2"),
        (AZURE + "yesterday,1,1\n", 2, "Invalid isoformat string: 'yesterday'"),
        (AZURE + "2023-11-16 18:15:46,x,1\n", 2, "invalid literal"),
        (AZURE + "2023-11-16 18:15:46,-1,1\n", 2, "expected ContextTokens >= 0, received -1"),
        (
            AZURE + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n",
            3,
            "expected arrival >= 0.0, received -1.0",
        ),
    ],
)
def test_a_wrong_azure_line_is_named(tmp_path: Path, text: str, number: int, message: str) -> None:
    with pytest.raises(TraceError, match=rf"\[replay\] line {number} of the trace: {message}"):
        read(tmp_path, "azure", text)


def test_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="unknown trace format 'x'; known: mooncake, sessions"):
        read(tmp_path, "x", "")
    with pytest.raises(TraceError, match="a mooncake trace has no sessions to choose from"):
        read(tmp_path, "mooncake", mooncake(), max_sessions=1)
    with pytest.raises(TraceError, match="cannot read the trace absent: "):
        list(read_trace(tmp_path / "absent", "azure"))


@pytest.mark.shared_data
def test_the_public_traces_are_what_their_authors_say(shared_data: Path) -> None:
    traces = shared_data / "traces"
    chats = list(read_trace(traces / "mooncake_conversation.jsonl", "mooncake"))
    assert len(chats) == 12_031
    assert len({block_id for chat in chats for block_id in chat.block_ids}) == 182_790
    assert sum(1 for _ in read_trace(traces / "azure_2023_conv.csv", "azure")) == 19_366
    path = traces / "claude_code_sessions_rle.jsonl.gz"
    records = list(read_trace(path, "sessions", max_sessions=50))
    assert len({record.session for record in records}) == 50
    assert [r.arrival_s for r in records] == sorted(r.arrival_s for r in records)

"""The comparison of strategies runs and says what scripts read; what the default must reach is checked."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from benchmarks import eviction

from kvist.replay.belady import belady
from kvist.replay.traces import read_trace

if TYPE_CHECKING:
    from pathlib import Path


def test_prints_a_table_and_ends_with_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [
        {"timestamp": i, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1 + i % 7]}
        for i in range(50)
    ]
    path = tmp_path / "mooncake_conversation.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    monkeypatch.setitem(eviction.TRACES, "mooncake", (path.name, "mooncake", None, 0.5))
    arguments = ["eviction", "--data", str(tmp_path), "--workloads", "mooncake,sweep"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--strategies", "default,lru"])
    assert eviction.main() == 0
    output = capsys.readouterr().out.splitlines()
    runs = json.loads(output[-1])["runs"]
    assert [(run["workload"], run["strategy"]) for run in runs] == [
        ("mooncake", "belady"),
        ("mooncake", "default"),
        ("mooncake", "lru"),
        ("sweep at_once", "default"),
        ("sweep between", "default"),
        ("sweep at_once", "lru"),
        ("sweep between", "lru"),
    ]
    assert len(output) == len(runs) + 2
    assert all(0 < run["of_ceiling"] <= 1 for run in runs)


@pytest.mark.parametrize("mode", ["at_once", "between"])
@pytest.mark.parametrize("memory", [1.5, 2, 4])
def test_a_sweep_costs_live_chats_next_to_nothing(mode: str, memory: float) -> None:
    num_blocks = int(memory * eviction.num_chat_blocks())
    quiet = eviction.sweep(num_blocks, "default", "none")
    assert eviction.sweep(num_blocks, "default", mode) >= 0.95 * quiet


@pytest.mark.shared_data
def test_default_beats_lru_on_the_first_half_of_mooncake(shared_data: Path) -> None:
    path = shared_data / "traces" / "mooncake_conversation.jsonl"
    requests = list(read_trace(path, "mooncake"))[:6000]
    num_blocks = int(0.1 * eviction.num_distinct_blocks(requests))
    shares = {
        strategy: eviction.run_trace(requests, num_blocks, strategy)["hit_share"]
        for strategy in ("default", "lru")
    }
    ceiling = belady(requests, num_blocks).hit_share
    assert shares["lru"] < shares["default"] < ceiling

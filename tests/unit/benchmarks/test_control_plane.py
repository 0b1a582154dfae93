"""The benchmark runs and says what scripts read; its cost is gated by counting calls, which no load changes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from benchmarks import control_plane
from tests.support.cache import make_manager

from kvist.cache.namespaces import Namespace

if TYPE_CHECKING:
    from types import FrameType

    import pytest


def test_prints_a_table_and_ends_with_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["control_plane", "--tokens", "40", "--block-size", "8", "--repetitions", "5"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert control_plane.main() == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert (result["num_tokens"], result["num_hit_tokens"], result["block_size"]) == (40, 39, 8)
    for name in (*control_plane.PHASES, "all", "ceiling"):
        row = result["results"][name]
        assert row["n"] == 5
        assert 0 <= row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert any(line.startswith(name) for line in lines[:-1])


def count_calls(num_tokens: int) -> int:
    """Return the Python calls that one fully cached prompt costs."""
    manager = make_manager(200, 64)
    namespace = Namespace(model="m")
    token_ids = list(range(num_tokens))
    control_plane.serve_once(manager, namespace, token_ids)
    calls = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        _, num_hit_tokens = control_plane.serve_once(manager, namespace, token_ids)
    finally:
        sys.setprofile(None)
    assert num_hit_tokens == num_tokens - 1
    return len(calls)


def test_cost_of_a_hit_is_linear_in_blocks_and_small() -> None:
    short, long, longer = (count_calls(num_blocks * 64) for num_blocks in (16, 64, 112))
    # But for a few calls, which depend on where a run of blocks happens to be cut.
    assert abs((longer - long) - (long - short)) <= 8
    # 12 calls a block when this was written, 64 blocks of a 4,096-token prompt in 0.3 ms.
    assert (long - short) / 48 <= 14

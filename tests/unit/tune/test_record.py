"""The record of scores: nothing measured twice, nothing wrong believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.tune.quality import Score
from kvist.tune.record import ScoreRecord

if TYPE_CHECKING:
    from pathlib import Path

SETTING = {"model": "a", "window_tokens": 128}


def test_what_was_put_is_there_in_the_next_process(tmp_path: Path) -> None:
    score = Score(positions=5, kl=0.25, agreed=4)
    ScoreRecord(tmp_path / "new", SETTING).put("int4", 3, score)
    record = ScoreRecord(tmp_path / "new", SETTING)
    assert record.get("int4", 3) == score
    assert record.get("int4", 2) is None
    assert record.get("int3", 3) is None


def test_another_setting_has_another_file(tmp_path: Path) -> None:
    ScoreRecord(tmp_path, SETTING).put("int4", 0, Score(positions=1))
    assert ScoreRecord(tmp_path, {**SETTING, "model": "b"}).get("int4", 0) is None


def test_damaged_lines_are_measured_again(tmp_path: Path) -> None:
    record = ScoreRecord(tmp_path, SETTING)
    for window in range(3):
        record.put("int4", window, Score(positions=window + 1))
    content = record.path.read_text()
    lines = [line for line in content.splitlines() if line]
    bad = [
        "{",
        "[]",
        "null",
        "7",
        '{"codec": "int4"}',
        '{"codec": "int4", "window": "x", "score": {}}',
    ]
    bad += [
        lines[0].replace('"kl": 0.0', '"kl": NaN'),
        "[" * 100_000,
        "\0\0",
        '{"codec":4,"window":[],"score":1}',
    ]
    record.path.write_text("\n".join([*bad, lines[1], lines[2][:-20]]))
    again = ScoreRecord(tmp_path, SETTING)
    assert [again.get("int4", window) for window in range(3)] == [None, Score(positions=2), None]
    # A line that follows a torn one is whole.
    again.put("int3", 0, Score(positions=9))
    assert ScoreRecord(tmp_path, SETTING).get("int3", 0) == Score(positions=9)


def test_clear_forgets_on_disk_as_well(tmp_path: Path) -> None:
    record = ScoreRecord(tmp_path, SETTING)
    record.clear()
    record.put("int4", 0, Score(positions=1))
    record.clear()
    assert record.get("int4", 0) is None
    assert ScoreRecord(tmp_path, SETTING).get("int4", 0) is None

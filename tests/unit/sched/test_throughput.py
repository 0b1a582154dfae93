from __future__ import annotations

import pytest

from kvist.sched.throughput import Throughput


def test_knows_nothing_before_the_first_step() -> None:
    throughput = Throughput()
    assert throughput.tokens_per_s == 0
    assert throughput.retry_after_s(10**9) == 1.0


def test_divides_the_work_by_the_speed_within_bounds() -> None:
    throughput = Throughput()
    throughput.record(200, 2.0)
    assert throughput.tokens_per_s == 100
    assert throughput.retry_after_s(500) == 5.0
    assert throughput.retry_after_s(7) == 1.0
    assert throughput.retry_after_s(10**9) == 60.0


def test_the_last_steps_count_most() -> None:
    throughput = Throughput()
    for _ in range(100):
        throughput.record(100, 1.0)
    for _ in range(32):
        throughput.record(200, 1.0)
    assert throughput.tokens_per_s == pytest.approx(150, rel=0.05)

"""The pool of threads, and the choice of an instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

_native = pytest.importorskip("kvist._native")


def total(phases: int, items: int) -> int:
    """Return what ``check`` sums up when each item of each phase is claimed exactly once."""
    return phases * items * (items + 1) // 2


@pytest.fixture
def restored_isa():
    before = _native.isa()
    yield before
    _native.force_isa(before)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("items", [0, 1, 2, 7, 64, 1000])
def test_every_item_of_every_phase_is_claimed_once(num_threads, items):
    pool = _native.Pool(num_threads)
    assert pool.num_threads == num_threads
    for phases in (0, 1, 2, 17):
        assert pool.check(phases, items) == total(phases, items)


def test_a_pool_serves_run_after_run_with_pauses_in_which_its_threads_fall_asleep():
    pool = _native.Pool(3)
    waiter = threading.Event()
    for index in range(200):
        if index % 50 == 0:
            waiter.wait(0.01)  # far longer than the threads spin
        assert pool.check(3, index % 5) == total(3, index % 5)


def test_threads_woken_for_nothing_serve_the_next_run():
    pool = _native.Pool(3)
    waiter = threading.Event()
    for index in range(100):
        if index % 10 == 0:
            waiter.wait(0.005)
        pool.wake()
        if index % 3 == 0:
            pool.wake()
            waiter.wait(0.001)  # until they sleep again
        assert pool.check(3, index % 5) == total(3, index % 5)


def test_waking_while_others_run_harms_nobody():
    pool = _native.Pool(3)
    is_done = threading.Event()

    def wake() -> None:
        while not is_done.is_set():
            pool.wake()

    waker = threading.Thread(target=wake)
    waker.start()
    try:
        assert all(pool.check(5, items) == total(5, items) for items in range(60))
    finally:
        is_done.set()
        waker.join()


def test_callers_on_several_threads_take_turns():
    pool = _native.Pool(2)
    start = threading.Barrier(4)

    def call(items: int) -> bool:
        start.wait()
        return all(pool.check(5, items) == total(5, items) for _ in range(100))

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(call, (1, 3, 10, 50)))


def test_a_long_run_lets_other_python_threads_go_on():
    """A run that kept the interpreter's lock would stop the other thread's clock for as long as it lasts."""
    pool = _native.Pool(1)
    is_started, is_done, gaps = threading.Event(), threading.Event(), []

    def watch() -> None:
        last = time.perf_counter()
        is_started.set()
        while not is_done.is_set():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=watch)
    thread.start()
    is_started.wait()
    begin = time.perf_counter()
    pool.check(1, 20_000_000)
    took = time.perf_counter() - begin
    is_done.set()
    thread.join()
    assert max(gaps) < took / 2


def test_pools_do_not_disturb_each_other_and_end_while_their_threads_sleep():
    for _ in range(20):
        pools = [_native.Pool(n) for n in (1, 2, 4)]
        assert [pool.check(4, 9) for pool in pools] == [total(4, 9)] * 3


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_refuses_a_number_of_threads_no_machine_has(num_threads):
    with pytest.raises(ValueError, match=rf"1 to 1024 threads, received {num_threads}"):
        _native.Pool(num_threads)


def test_serial_is_always_there_and_the_last_choice():
    assert _native.isas()[-1] == "serial"
    assert len(set(_native.isas())) == len(_native.isas())


def test_forcing_an_instruction_set_selects_it(restored_isa):
    for name in _native.isas():
        _native.force_isa(name)
        assert _native.isa() == name


@pytest.mark.parametrize("name", ["", "sse9", "AVX2", "serial "])
def test_an_unknown_instruction_set_is_refused_by_name_and_changes_nothing(name, restored_isa):
    with pytest.raises(ValueError, match=f"one of {', '.join(_native.isas())}, received '{name}'"):
        _native.force_isa(name)
    assert _native.isa() == restored_isa


@pytest.mark.parametrize("name", _native.isas())
def test_the_environment_chooses_the_instruction_set(name):
    code = "from kvist import _native; print(_native.isa())"
    result = run_python(code, KVIST_ISA=name)
    assert result.stdout.strip() == name, result.stderr


def test_an_empty_variable_leaves_the_choice_to_the_cpu():
    code = "from kvist import _native; print(_native.isa(), _native.isas()[0])"
    result = run_python(code, KVIST_ISA="")
    current, best = result.stdout.split()
    assert current == best


def test_a_wrong_variable_is_an_exception_and_not_a_guess():
    code = "from kvist import _native; _native.isa()"
    result = run_python(code, KVIST_ISA="sse9")
    assert result.returncode == 1
    assert "ValueError" in result.stderr
    assert "received 'sse9'" in result.stderr

"""The end of a command's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

LEAVE = """
import atexit, sys, threading, time
from kvist.cli.console import end_process
atexit.register(time.sleep, 60)
threading.Thread(target=time.sleep, args=(60,)).start()
sys.stdout.write("result")
sys.stderr.write("note")
end_process()
"""


def test_end_of_the_process_waits_for_nothing_and_loses_no_output():
    """A model library's own end took seconds, longer than a server has after SIGTERM."""
    ended = subprocess.run(
        [sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "result", "note")


def test_end_of_the_process_without_a_reader_is_no_failure():
    # Buffered, so that the flush is what fails.
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", LEAVE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as child:
        child.stdout.close()
        assert child.wait(30) == 0


def test_interrupts_can_be_ignored():
    source = (
        "import os, signal\nfrom kvist.cli.console import ignore_interrupts\nignore_interrupts()\n"
        f"for number in ({int(signal.SIGTERM)}, {int(signal.SIGINT)}): os.kill(os.getpid(), number)"
    )
    assert subprocess.run([sys.executable, "-c", source], timeout=30, check=False).returncode == 0

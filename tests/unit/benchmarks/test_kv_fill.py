"""Filling the memory of an engine that computes nothing, and counting what it holds."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from benchmarks import kv_fill

from kvist.kernels import native

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels were not built")


def test_int4_holds_more_tokens_in_the_same_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], smollm2_path: Path
) -> None:
    arguments = ["--model", str(smollm2_path), "--memory-gib", "0.1", "--prompt-tokens", "1000"]
    monkeypatch.setattr(sys, "argv", ["kv_fill", *arguments, "--codecs", "raw16,int4"])
    kv_fill.main()
    raw, int4 = json.loads(capsys.readouterr().out.splitlines()[-1])["codecs"]
    assert raw["ratio"] == 1.0
    assert int4["ratio"] > 2.5
    assert int4["evicted"] > 0

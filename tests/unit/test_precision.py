"""The rule that says in which codec a block is kept."""

from __future__ import annotations

import pytest

from kvist.errors import ConfigError
from kvist.precision import MIXED, KVPrecision


def test_rule_is_read_and_written_the_same() -> None:
    rule = KVPrecision.parse(MIXED)
    assert rule == KVPrecision(sink="raw16", windows=((256, "raw16"),), rest="int8")
    assert str(rule) == MIXED
    assert rule.codecs == ("raw16", "int8")


def test_sink_is_as_all_others_when_left_out() -> None:
    assert KVPrecision.parse("recent:64=raw16, rest=int8").sink == "int8"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rest=int8",
        "recent:256=raw16",
        "recent:256=int8,rest=int8",
        "recent:256=raw16,recent:128=raw16,rest=int8",
        "recent:0=raw16,rest=int8",
        "recent:-4=raw16,rest=int8",
        "recent:1e3=raw16,rest=int8",
        "recent:٢٥=raw16,rest=int8",
        "recent:256=raw16,rest=int7",
        "recent:256=raw16,rest=",
        "recent:256=raw16,rest=int8,rest=raw16",
        "sink=raw16,sink=raw16,recent:256=raw16,rest=int8",
        "recent:256=raw16,rest=int8,old=int8",
        "recent:64=raw16,recent:128=int8,rest=raw16",
        "recent:99999999999=raw16,rest=int8",
        "sink=float32,recent:256=raw16,rest=int8",
    ],
)
def test_what_is_no_rule_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-precision"):
        KVPrecision.parse(text)

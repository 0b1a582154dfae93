"""Configuration: unknown and invalid options are refused with the flag to change."""

from __future__ import annotations

import pytest

from kvist.config import EngineConfig, ServerConfig
from kvist.errors import ConfigError


def test_flat_options_reach_their_group() -> None:
    config = EngineConfig.from_options(model="m", block_size=16, max_running=2)
    assert (config.model.model, config.cache.block_size, config.scheduler.max_running) == (
        "m",
        16,
        2,
    )


def test_unknown_option_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'blok_size'; did you mean 'block_size'"):
        EngineConfig.from_options(blok_size=16)
    with pytest.raises(
        ConfigError, match=r"unknown option 'zzz'; known options: audit_fraction, block_size"
    ):
        EngineConfig.from_options(zzz=1)


@pytest.mark.parametrize(
    ("option", "value", "flag"),
    [
        ("dtype", "float16", "--dtype"),
        ("kv_cache_dtype", "int2", "--kv-cache-dtype"),
        ("prefix_cache", "yes", "--prefix-cache"),
        ("kv_cache", "", "--kv-cache"),
        ("schedule", "lifo", "--schedule"),
        ("block_size", 0, "--block-size"),
        ("max_batch_tokens", 0, "--max-batch-tokens"),
        ("max_running", 0, "--max-running"),
        ("max_queue", 0, "--max-queue"),
        ("reserve_tokens", 0, "--reserve-tokens"),
        ("max_overtakes", -1, "--max-overtakes"),
        ("max_context", 1, "--max-context"),
        ("eviction", "fifo", "--eviction"),
        ("cache_share", {"a": 0.0}, "--cache-share"),
        ("cache_share", {"a": 1.5}, "--cache-share"),
        ("cache_share", {"a": 0.6, "b": 0.5}, "--cache-share"),
        ("cache_share", {"a": "b"}, "--cache-share"),
        ("cache_share", {"two words": 0.5}, "--cache-share"),
        ("cache_share", {"": 0.5}, "--cache-share"),
        ("cache_ttl_s", 0.0, "--cache-ttl-s"),
        ("cache_ttl_s", float("inf"), "--cache-ttl-s"),
        ("pin_fraction", -0.1, "--pin-fraction"),
        ("pin_fraction", 1.0, "--pin-fraction"),
        ("pin_fraction", float("nan"), "--pin-fraction"),
        ("threads", 0, "--threads"),
        ("memory_gib", 0.0, "--memory-gib"),
        ("memory_gib", float("nan"), "--memory-gib"),
        ("memory_gib", float("inf"), "--memory-gib"),
    ],
)
def test_invalid_values_name_the_flag(option: str, value: object, flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[config\] {flag} must be"):
        EngineConfig.from_options(**{option: value})


def test_shares_written_in_decimal_may_fill_the_whole_cache() -> None:
    shares = {"a": 0.1, "b": 0.1, "c": 0.1, "d": 0.7}
    assert EngineConfig.from_options(cache_share=shares).cache.cache_share == shares


@pytest.mark.parametrize("off", ["prefix_cache", "kv_cache"])
@pytest.mark.parametrize(
    "kept", [{"cache_share": {"a": 0.5}}, {"cache_ttl_s": 1.0}, {"pin_fraction": 0.5}]
)
def test_what_only_a_prefix_cache_can_do_is_refused_without_one(
    off: str, kept: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="must be left out without a prefix cache"):
        EngineConfig.from_options(**{off: "off"}, **kept)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("max_body_mib", 0.0),
        ("drain_s", -1.0),
        ("drain_s", float("nan")),
    ],
)
def test_invalid_server_values_name_the_flag(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=r"--(port|max-body-mib|drain-s) must be"):
        ServerConfig(**{option: value})


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"audit_fraction": -0.1}, "--audit-fraction"),
        ({"audit_fraction": 1.5}, "--audit-fraction"),
        ({"audit_fraction": float("nan")}, "--audit-fraction"),
        ({"audit_fraction": 0.5, "prefix_cache": "off"}, "--audit-fraction"),
        ({"refresh_every": 0}, "--refresh-every"),
        ({"refresh_every": 3, "kv_cache": "off"}, "--refresh-every"),
    ],
)
def test_guards_that_cannot_work_are_refused_by_name(options, flag) -> None:
    with pytest.raises(ConfigError, match=flag):
        EngineConfig.from_options(**options)

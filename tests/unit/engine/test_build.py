"""Wiring: the identity of a model, and what a plan becomes."""

from __future__ import annotations

import os

import pytest
import torch
from tests.support.tiny_engine import IdTokenizer, load_tiny_decoder, tiny_plan

from kvist.cache.eviction import Lru
from kvist.config import EngineConfig
from kvist.engine.build import assemble, build_engine, model_fingerprint
from kvist.errors import ConfigError, ModelLoadError
from kvist.plan import Hardware, resolve


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return load_tiny_decoder(tmp_path_factory.mktemp("tiny"))


def test_fingerprint_changes_with_any_file_and_with_the_specification(tmp_path, decoder):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    os.utime(file, ns=(1, 1))
    seen = {model_fingerprint(tmp_path, decoder.spec), model_fingerprint(file, decoder.spec)}
    assert len(seen) == 1  # a folder of one file is that file
    os.utime(file, ns=(2, 2))
    seen.add(model_fingerprint(tmp_path, decoder.spec))
    (tmp_path / "config.json").write_text("{}")
    seen.add(model_fingerprint(tmp_path, decoder.spec))
    seen.add(model_fingerprint(tmp_path, "another specification"))
    assert len(seen) == 4
    assert model_fingerprint(tmp_path, decoder.spec) in seen


def test_allocates_what_the_plan_says(decoder):
    config = EngineConfig.from_options(
        model="tiny", dtype="float32", memory_gib=0.01, block_size=16
    )
    plan = resolve(config, decoder.spec, Hardware(cpus=1, available_bytes=2**30))
    core = assemble(plan, decoder, IdTokenizer(), "tiny")
    # The pool, and the block that audits compute into.
    assert core._runner._arena.num_bytes == plan.kv_bytes * (plan.num_blocks + 1) // plan.num_blocks
    assert abs(decoder.num_bytes - plan.weight_bytes) < 0.01 * plan.weight_bytes
    assert core.stats().cache.num_blocks == plan.num_blocks


def test_what_the_plan_says_of_the_cache_reaches_it(decoder):
    plan = tiny_plan(eviction="lru", cache_shares=(("a", 0.25),), pin_fraction=0.5)
    manager = assemble(plan, decoder, IdTokenizer(), "tiny")._manager
    partition = manager._pool.partitions.of("a")
    assert isinstance(partition.strategy, Lru)
    assert partition.num_share == 0.25 * plan.num_blocks
    assert manager.max_pinned == plan.num_blocks // 2


def test_each_engine_has_its_own_hash_key(decoder):
    namespace = assemble(tiny_plan(), decoder, IdTokenizer(), "tiny")._namespace
    roots = {
        assemble(tiny_plan(), decoder, IdTokenizer(), "tiny")
        ._manager.new_chain(namespace, [1])
        .parent_hash(0)
        for _ in range(3)
    }
    assert len(roots) == 3


def test_layout_of_the_blocks_is_part_of_the_namespace(decoder):
    plans = (tiny_plan(), tiny_plan(codec="raw16"), tiny_plan(dtype="bfloat16"))
    layouts = {assemble(plan, decoder, IdTokenizer(), "tiny")._namespace.layout for plan in plans}
    assert len(layouts) == 3


def test_memory_that_cannot_be_allocated_is_refused_by_name(decoder):
    with pytest.raises(ConfigError, match="--memory-gib"):
        assemble(tiny_plan(num_blocks=2**36), decoder, IdTokenizer(), "tiny")


def test_unknown_model_is_refused_before_anything_is_allocated(tmp_path):
    num_threads = torch.get_num_threads()
    with pytest.raises(ModelLoadError):
        build_engine(EngineConfig.from_options(model=str(tmp_path / "nothing.gguf"), threads=1))
    assert torch.get_num_threads() == num_threads

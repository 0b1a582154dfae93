"""From a configuration to an engine that can be started.

Responsible for the order in which the parts are made and for wiring them together; the only place that knows all of
them. Starts no thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import random
import secrets
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvist import plan as planning
from kvist.cache.hash import KEY_BYTES, BlockHasher
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.audit import Auditor
from kvist.engine.core import EngineCore
from kvist.engine.guards import Guards
from kvist.engine.recovery import Recovery
from kvist.engine.refresh import Refresher
from kvist.errors import ConfigError
from kvist.kernels import native
from kvist.model import catalog
from kvist.model.loader import load_decoder
from kvist.model.native_decoder import NativeDecoder
from kvist.model.native_loader import load_native_decoder
from kvist.model.tokenizer import load_tokenizer
from kvist.precision import KVBudget, KVPrecision
from kvist.runner.native_runner import NativeRunner
from kvist.runner.runner import ModelRunner
from kvist.sched import policy
from kvist.sched.scheduler import Scheduler
from kvist.storage.arena import BlockArena
from kvist.storage.inspection import BlockInspector
from kvist.storage.slabs import SlabArena
from kvist.tune.start import profile_at_start, reduction_at_start, transforms_at_start
from kvist.types import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvist.codecs.transforms import KVTransforms
    from kvist.config import EngineConfig
    from kvist.engine.core import Runner
    from kvist.model.decoder import Decoder
    from kvist.model.tokenizer import Tokenizer
    from kvist.plan import EnginePlan
    from kvist.sched.output import StepPlan, StepResult
    from kvist.spec import ModelSpec
    from kvist.tune.start import Progress

CALIBRATION_MEMORY_FRACTION = 0.75
"""Share of the available memory that the weights of a calibration may take, beside activations and the page cache."""

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, on_progress: Progress | None = None) -> AsyncEngine:
    """Load a model and make an engine of it, ready for ``start``.

    Args:
        config: What the user asked for.
        on_progress: Is told how far a calibration is, where one is needed first.

    Raises:
        ConfigError: The configuration cannot work with this model on this machine.
        ModelLoadError: The model is missing, corrupt or unsupported.

    Side effects:
        Sets the tensor library's thread count for the whole process; logs the plan in one INFO line; keeps a new
        calibration in ``envvars.tune_folder()``.
    """
    resolved = catalog.resolve(config.model.model)
    named = dataclasses.replace(config.model, model=resolved.name)
    spec = planning.read_spec(resolved.path)
    config, profile = profile_at_start(config, resolved.path, spec)
    hardware = planning.detect_hardware()
    plan = planning.resolve(dataclasses.replace(config, model=named), spec, hardware)
    logger.info("[engine] %s", plan.one_line())
    tokenizer = load_tokenizer(resolved.path)
    fingerprint = model_fingerprint(resolved.path, spec)
    # Before the weights and the blocks are there: a calibration needs memory for weights of its own.
    left = int(hardware.available_bytes * CALIBRATION_MEMORY_FRACTION)
    tell = on_progress or (lambda *_: None)
    reduction = transforms = None
    if plan.kv_head_dim:
        torch.set_num_threads(plan.threads)
        reduction = reduction_at_start(plan.kv_head_dim, resolved.path, spec, left, tell)
    if plan.transforms:
        torch.set_num_threads(plan.threads)
        transforms = transforms_at_start(
            plan.transforms, resolved.path, spec, left, tell, reduction
        )
        if profile is not None:
            profile.check(transforms)
    decoder = load_model(plan, resolved.path, spec, fingerprint)
    if reduction is not None:
        decoder = decoder.reduced(reduction)
    core = assemble(plan, decoder, tokenizer, fingerprint, transforms)
    return AsyncEngine(core, tokenizer, plan)


def load_model(
    plan: EnginePlan, path: Path, spec: ModelSpec, fingerprint: str
) -> Decoder | NativeDecoder:
    """Return the model for the plan's plane, and keep the other plane's threads from the CPUs.

    Args:
        plan: Plane, precision and threads.
        path: The checkpoint.
        spec: What it describes.
        fingerprint: Of the checkpoint; packed weights are kept on disk under it.

    Raises:
        ModelLoadError: The checkpoint cannot be read.

    Side effects: sets the tensor library's thread count for the whole process.
    """
    if plan.plane == "native":
        torch.set_num_threads(1)
        pool = native.extension().Pool(plan.threads)
        return load_native_decoder(
            path, spec, plan.weights, pool, fingerprint=fingerprint if plan.weight_cache else None
        )
    torch.set_num_threads(plan.threads)
    return load_decoder(path, spec, getattr(torch, plan.dtype))


def assemble(
    plan: EnginePlan,
    decoder: Decoder | NativeDecoder,
    tokenizer: Tokenizer,
    fingerprint: str,
    transforms: KVTransforms | None = None,
) -> EngineCore:
    """Return the core that a plan describes, around a model that is loaded already.

    Args:
        plan: Its numbers are taken as they are.
        decoder: Weights in ``plan.weights``, of the plan's plane; reduced where the plan says so.
        tokenizer: The model's.
        fingerprint: Identity of the weights; cached blocks are never shared between different ones.
        transforms: What int4 and int3 know of the model; None where the plan has neither.

    Raises:
        ConfigError: The KV memory cannot be allocated, there are no transforms and the plan needs them, or the decoder
            keeps other dimensions of a head than the plan has memory for.

    Side effects: allocates the KV memory. The key of the cache's hashes is new and secret each time.
    """
    kept = plan.kv_head_dim or decoder.spec.head_dim
    if decoder.kv_head_dim != kept:
        raise ConfigError(
            f"[engine] expected a decoder that keeps {kept} dimensions of a head, received {decoder.kv_head_dim=}"
        )
    # First, so that memory that is not there is refused before there is an object for each block of it.
    arena = _make_arena(plan, decoder, transforms)
    runner = make_runner(decoder, arena)
    manager = CacheManager(
        num_blocks=plan.num_blocks,
        budget=_budget(plan, arena),
        block_size=plan.block_size,
        hasher=BlockHasher(secrets.token_bytes(KEY_BYTES)),
        prefix_cache=plan.prefix_cache,
        max_ghosts=plan.explain_blocks,
        eviction=plan.eviction,
        shares=dict(plan.cache_shares),
        pin_fraction=plan.pin_fraction,
    )
    scheduler = Scheduler(
        manager,
        max_batch_tokens=plan.max_batch_tokens,
        max_running=plan.max_running,
        max_queue=plan.max_queue,
        max_context_len=plan.max_context_len,
        reserve_tokens=plan.reserve_tokens,
        policy=policy.get(plan.schedule),
        keep_kv=plan.keep_kv,
        max_overtakes=plan.max_overtakes,
    )
    return EngineCore(
        namespace=Namespace(
            model=fingerprint,
            layout=f"{plan.plane}/{plan.weights}/{plan.dtype}/{plan.kv_format}/{_kept_of(decoder)}",
        ),
        manager=manager,
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        windows=sorted(set(plan.layer_windows) - {0}),
        guards=_make_guards(plan, manager, scheduler, decoder, arena),
    )


def _kept_of(decoder: Decoder | NativeDecoder) -> str:
    """Return what tells blocks of one reduction from those of another; of whole heads, nothing."""
    return "" if decoder.reduction is None else decoder.reduction.digest


def _make_arena(
    plan: EnginePlan, decoder: Decoder | NativeDecoder, transforms: KVTransforms | None
) -> BlockArena | SlabArena:
    """Allocate the memory of all blocks."""
    kv_spec = planning.kv_spec_of(plan, decoder.spec)
    if not plan.precision:
        # One more than the pool has: audits compute into it.
        return BlockArena(kv_spec, plan.num_blocks + plan.prefix_cache)
    assert isinstance(decoder, NativeDecoder), "a plan with several codecs is native"
    codecs = KVPrecision.parse(plan.precision).codecs
    return SlabArena(kv_spec, codecs, plan.kv_bytes, decoder.pool, transforms)


def _budget(plan: EnginePlan, arena: BlockArena | SlabArena) -> KVBudget | None:
    """Return what the cache may fill where blocks have several codecs."""
    if isinstance(arena, BlockArena):
        return None
    precision = KVPrecision.parse(plan.precision)
    return KVBudget(
        num_bytes=arena.budget_bytes,
        block_bytes={codec: arena.cell_bytes(codec) for codec in precision.codecs},
        precision=precision,
        demote_before_evict=plan.demote_before_evict,
        max_chunk=plan.max_batch_tokens,
        max_demotions=plan.max_demotions or None,
    )


def _make_guards(
    plan: EnginePlan,
    manager: CacheManager,
    scheduler: Scheduler,
    decoder: Decoder | NativeDecoder,
    arena: BlockArena | SlabArena,
) -> Guards:
    """Return what watches over the blocks, with the manager told of it."""
    run = make_runner(decoder, arena).run
    inspector = BlockInspector(arena)
    auditor = Auditor(
        fraction=plan.audit_fraction,
        manager=manager,
        inspector=inspector,
        run=run,
        spare_block=BlockId(plan.num_blocks)
        if plan.prefix_cache and isinstance(arena, BlockArena)
        else None,
        max_tokens=plan.max_batch_tokens,
        draw=random.Random().random,  # noqa: S311  # a choice of samples, not a secret
    )

    def scratch(num_blocks: int) -> tuple[BlockArena, Callable[[StepPlan], StepResult]]:
        codec = "raw16" if plan.plane == "native" or plan.dtype == "bfloat16" else "float32"
        blocks = BlockArena(dataclasses.replace(arena.kv_spec, codec=codec), num_blocks)
        return blocks, make_runner(decoder, blocks).run

    refresher = None
    if plan.refresh_every and isinstance(arena, BlockArena):
        refresher = Refresher(
            every=plan.refresh_every,
            manager=manager,
            arena=arena,
            scratch=scratch,
            max_tokens=plan.max_batch_tokens,
        )
    guards = Guards(scheduler, auditor, Recovery(manager, scheduler, inspector, auditor), refresher)
    if plan.prefix_cache:
        manager.guard = guards
    return guards


def make_runner(decoder: Decoder | NativeDecoder, arena: BlockArena | SlabArena) -> Runner:
    """Return the runner of the decoder's plane."""
    if isinstance(decoder, NativeDecoder):
        return NativeRunner(decoder, arena, partial(native.extension().draw_tokens, decoder.pool))
    assert isinstance(arena, BlockArena), "blocks of several codecs are native"
    return ModelRunner(decoder, arena)


def model_fingerprint(path: Path, spec: ModelSpec) -> str:
    """Return an identity of the weights: of the specification and of name, size and time of change of each file.

    Not of the contents: reading gigabytes at every start would cost more than the cache saves, and in memory an engine
    only ever has the one model it loaded.
    """
    digest = hashlib.sha256(repr(spec).encode())
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        status = file.stat()
        digest.update(f"\n{file.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()

"""K and V in fewer dimensions: both planes compute the same, and all dimensions lose nothing.

On tiny random models, whose heads have no dimensions that do not matter: what a reduction costs is measured on real
ones (docs/decisions/0005-head-dimension.md).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.differential.test_native_decoder import NativeSteps, Rows, oracle_of
from tests.support.decoding import run_decoder
from tests.support.tiny_engine import IdTokenizer, Session, make_core, request, tiny_plan
from tests.support.tiny_models import TINY_MODELS, build_reference, random_prompt, save

from kvist.codecs.reduction import KVReduction
from kvist.codecs.transforms import uncalibrated
from kvist.engine.build import assemble
from kvist.errors import ConfigError, ModelLoadError
from kvist.kernels import native
from kvist.kernels.rotation import rotation
from kvist.model.decoder import Decoder
from kvist.model.loader import iterate_tensors
from kvist.model.native_decoder import NativeDecoder, StepSequence, pack_weights
from kvist.model.spec_readers import read_spec
from kvist.spec import KVSpec, ModelSpec
from kvist.storage.slabs import SlabArena
from kvist.tune.calibration import calibrate
from kvist.tune.reduction import calibrate_reduction
from kvist.types import BlockId, MemoryOp

PROMPT = random_prompt(41)
MODELS = [
    model
    for model in TINY_MODELS
    if model.name in {"llama-gqa", "llama-biases", "mistral-window", "qwen3", "gemma3"}
]
needs_native = pytest.mark.skipif(
    not native.available(), reason="the native kernels were not built"
)


def random_reduction(spec: ModelSpec, kept: int, seed: int = 0) -> KVReduction:
    """Return orthonormal matrices, of their own in each layer and head, shared by queries and keys."""
    random = np.random.default_rng(seed)
    shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.head_dim)
    keys, values = (
        np.ascontiguousarray(np.linalg.qr(random.standard_normal(shape))[0][..., :kept], np.float32)
        for _ in range(2)
    )
    outputs = np.ascontiguousarray(np.swapaxes(values, -1, -2))
    return KVReduction(
        fingerprint="", text="", queries=keys, keys=keys, values=values, outputs=outputs
    )


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def checkpoint(request, tmp_path_factory):
    folder = save(build_reference(request.param), tmp_path_factory.mktemp(request.param.name))
    spec = read_spec(folder)
    return spec, {name: tensor.clone() for name, tensor in iterate_tensors(folder, spec)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = next(model for model in TINY_MODELS if model.name == "llama-gqa")
    folder = save(build_reference(model), tmp_path_factory.mktemp("tiny"))
    spec = read_spec(folder)
    return spec, dict(iterate_tensors(folder, spec))


def native_of(checkpoint, kind: str = "bf16") -> tuple[NativeDecoder, Decoder]:
    spec, tensors = checkpoint
    pool = native.extension().Pool(2)
    packed = pack_weights(spec, ((name, t.clone()) for name, t in tensors.items()), kind, pool)
    return NativeDecoder(spec, packed, pool), oracle_of(spec, tensors, packed)


def test_all_dimensions_in_another_basis_lose_nothing(checkpoint):
    spec, tensors = checkpoint
    decoder = Decoder(spec, tensors)
    turned = decoder.reduced(random_reduction(spec, spec.head_dim))
    expected = run_decoder(decoder, PROMPT)
    torch.testing.assert_close(run_decoder(turned, PROMPT), expected, atol=1e-4, rtol=0)
    # The test could fail: half of them do lose something.
    half = decoder.reduced(random_reduction(spec, spec.head_dim // 2))
    assert float((run_decoder(half, PROMPT) - expected).abs().max()) > 0.05


def test_what_is_left_out_is_what_the_factors_leave_out(checkpoint):
    """The same as whole heads of which K and V have been projected."""
    spec, tensors = checkpoint
    kept = spec.head_dim // 2
    reduction = random_reduction(spec, kept)
    projections = {
        name: matrices @ np.swapaxes(matrices, -1, -2)
        for name, matrices in (("keys", reduction.keys), ("values", reduction.values))
    }
    whole = random_reduction(spec, spec.head_dim)
    identity = np.broadcast_to(np.eye(spec.head_dim, dtype=np.float32), whole.keys.shape)
    projected = KVReduction(
        fingerprint="",
        text="",
        queries=identity,
        keys=projections["keys"],
        values=projections["values"],
        outputs=identity,
    )
    decoder = Decoder(spec, tensors)
    torch.testing.assert_close(
        run_decoder(decoder.reduced(reduction), PROMPT),
        run_decoder(decoder.reduced(projected), PROMPT),
        atol=1e-4,
        rtol=0,
    )


def test_calibration_of_all_dimensions_loses_nothing(tiny):
    spec, tensors = tiny
    decoder = Decoder(spec, tensors)
    reduction = calibrate_reduction(decoder, ([1], random_prompt(600)), "model", spec.head_dim)
    expected = run_decoder(decoder, PROMPT)
    received = run_decoder(decoder.reduced(reduction), PROMPT)
    torch.testing.assert_close(received, expected, atol=2e-3, rtol=0)


def test_calibration_loses_less_than_chance(tiny):
    spec, tensors = tiny
    decoder = Decoder(spec, tensors)
    text = random_prompt(600, seed=9)
    expected = run_decoder(decoder, PROMPT)

    def loss(reduction: KVReduction) -> float:
        return float((run_decoder(decoder.reduced(reduction), PROMPT) - expected).square().mean())

    learnt = loss(calibrate_reduction(decoder, ([1], text), "model", 8))
    assert learnt < min(loss(random_reduction(spec, 8, seed)) for seed in range(4))


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("codec", ["raw16", "int8"])
def test_native_logits_are_those_of_torch(checkpoint, codec, isa):
    spec, _ = checkpoint
    with native.forced_isa(isa):
        decoder, oracle = native_of(checkpoint)
        for kept in (8, spec.head_dim):
            reduction = random_reduction(spec, kept)
            steps = NativeSteps(decoder.reduced(reduction), 3, codec)
            logits = steps.run([Rows(0, PROMPT, [2, 0, 1])])
            expected = run_decoder(oracle.reduced(reduction), PROMPT, codec=codec)
            difference = logits - expected
            assert float(difference.abs().max()) < 0.06
            assert float(difference.square().mean().sqrt()) < 0.012


@needs_native
def test_native_chunks_and_chosen_rows_give_the_same_logits(checkpoint):
    spec, _ = checkpoint
    decoder = native_of(checkpoint)[0].reduced(random_reduction(spec, 8))
    whole = NativeSteps(decoder, 3).run([Rows(0, PROMPT, [2, 0, 1])])
    steps = NativeSteps(decoder, 3)
    chunks = [range(7), range(7, 8), range(8, 33), range(33, 41)]
    parts = [
        steps.run([Rows(chunk.start, [PROMPT[i] for i in chunk], [2, 0, 1])]) for chunk in chunks
    ]
    torch.testing.assert_close(torch.cat(parts), whole, atol=0.02, rtol=0)
    # One row of logits out of many: those that attention gave are picked before they are brought back.
    last = NativeSteps(decoder, 3).run([Rows(0, PROMPT, [2, 0, 1])], 1)
    torch.testing.assert_close(last, whole[-1:], atol=0.02, rtol=0)


@needs_native
def test_whole_heads_compute_what_they_did(checkpoint):
    spec, _ = checkpoint
    decoder, _ = native_of(checkpoint)
    turned = decoder.reduced(random_reduction(spec, spec.head_dim))
    expected = NativeSteps(decoder, 3).run([Rows(0, PROMPT, [2, 0, 1])])
    received = NativeSteps(turned, 3).run([Rows(0, PROMPT, [2, 0, 1])])
    assert float((received - expected).abs().max()) < 0.1
    assert float((received - expected).square().mean().sqrt()) < 0.015


@needs_native
@pytest.mark.parametrize(("codec", "most"), [("int4", 0.6), ("int3", 2.5)])
def test_blocks_of_spans_hold_kept_dimensions(tiny, codec, most):
    """Transforms are learnt of the kept dimensions, and blocks made of them are read.

    Scores of unrelated texts are up to 7 apart.
    """
    spec, tensors = tiny
    reduction = random_reduction(spec, 8)
    oracle = Decoder(spec, tensors).reduced(reduction)
    transforms = calibrate(oracle, ([1], random_prompt(600)), "model")
    assert transforms.mean.shape == (spec.num_layers, spec.num_kv_heads, 8)
    assert transforms.key_metric is None
    decoder = native_of(tiny)[0].reduced(reduction)
    kv_spec = KVSpec(
        num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=8, block_size=64
    )
    prompt = random_prompt(140)
    logits = {}
    for target in ("raw16", codec):
        arena = SlabArena(
            kv_spec,
            ("raw16", "int8", codec),
            128 * kv_spec.block_bytes,
            decoder.pool,
            transforms,
        )
        arena.apply([MemoryOp("allocate", BlockId(i), "raw16") for i in range(3)])
        native_step(decoder, arena, 0, prompt[:128])
        if target != "raw16":
            arena.apply([MemoryOp("demote", BlockId(1), codec)])
        logits[target] = native_step(decoder, arena, 128, prompt[128:])
    difference = (logits[codec] - logits["raw16"]).abs().max()
    assert 0 < float(difference) < most


def native_step(decoder: NativeDecoder, arena, start: int, tokens: list[int]) -> torch.Tensor:
    scores = decoder.step(
        [StepSequence(start, tuple(tokens), (0, 1, 2), len(tokens))],
        arena,
    )
    return torch.from_numpy(scores.logits[: len(tokens)].copy())


@needs_native
def test_blocks_of_other_dimensions_are_refused(tiny):
    decoder, _ = native_of(tiny)
    reduced = decoder.reduced(random_reduction(decoder.spec, 8))
    with pytest.raises(ValueError, match="bytes"):
        reduced.step([StepSequence(0, (1, 2), (0,), 1)], NativeSteps(decoder, 1).arena)


def test_a_reduction_of_another_model_is_refused(checkpoint, tiny):
    spec, tensors = checkpoint
    other = random_reduction(tiny[0], 8)
    if other.keys.shape[:3] == (spec.num_layers, spec.num_kv_heads, spec.head_dim):
        pytest.skip("of the same sizes")
    with pytest.raises(ModelLoadError, match="a reduction should have"):
        Decoder(spec, tensors).reduced(other)


def test_an_engine_keeps_and_shares_what_is_reduced(tiny):
    spec, tensors = tiny
    whole = Decoder(spec, tensors)
    reduced = whole.reduced(random_reduction(spec, 8))
    cores = {
        "whole": make_core(whole),
        "reduced": make_core(reduced, kv_head_dim=8),
        "other": make_core(whole.reduced(random_reduction(spec, 8, seed=1)), kv_head_dim=8),
    }
    layouts = {name: core._namespace.layout for name, core in cores.items()}
    assert len(set(layouts.values())) == 3
    sizes = {name: core._runner._arena.num_bytes for name, core in cores.items()}
    assert sizes["reduced"] * spec.head_dim == sizes["whole"] * 8
    prompt = random_prompt(60)
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    session = Session(cores["reduced"])
    cold = session.run([request("cold", prompt, **params)])["cold", 0]
    warm = session.run([request("warm", prompt, **params)])["warm", 0]
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 59)
    assert cold.token_ids == warm.token_ids
    alone = run_greedily(reduced, prompt, 12)
    assert cold.token_ids == alone


def run_greedily(decoder: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(run_decoder(decoder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_a_plan_and_a_decoder_that_disagree_are_refused(tiny):
    spec, tensors = tiny
    with pytest.raises(ConfigError, match="kv_head_dim"):
        assemble(tiny_plan(kv_head_dim=8), Decoder(spec, tensors), IdTokenizer(), "tiny")


def test_kept_dimensions_are_turned_for_int8(tiny):
    """The rotation is that of the kept dimensions, on both planes the same (see the test against torch)."""
    spec, tensors = tiny
    reduced = Decoder(spec, tensors).reduced(random_reduction(spec, 8))
    assert rotation(reduced.kv_head_dim).shape == (8, 8)
    exact = run_decoder(reduced, PROMPT)
    stored = run_decoder(reduced, PROMPT, codec="int8")
    assert 0 < float((stored - exact).abs().max()) < 0.2


def test_uncalibrated_transforms_fit_kept_dimensions(tiny):
    spec, _ = tiny
    assert uncalibrated(spec.num_layers, spec.num_kv_heads, 8).mean.shape[-1] == 8

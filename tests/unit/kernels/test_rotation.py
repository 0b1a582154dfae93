"""The rotation of queries and keys: the same in torch and in the native kernels, and of no effect on scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.support.tiny_models import TINY_MODELS, build_reference, random_prompt, save

from kvist.kernels import native
from kvist.kernels.batch import AttentionBatch
from kvist.kernels.kv_rows import read, turn, turn_back
from kvist.kernels.rotation import rotation
from kvist.model.loader import iterate_tensors, load_decoder
from kvist.model.native_decoder import NativeDecoder, StepSequence, pack_weights
from kvist.model.spec_readers import read_spec
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 80, 96, 128, 248, 256])
def test_the_rotation_is_orthonormal_and_spreads_a_channel_over_all(head_dim: int) -> None:
    matrix = rotation(head_dim).astype(np.float64)
    assert np.allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-6)
    # A power of two: evenly. An odd factor goes through cosines, of which one is twice its mean square at most.
    assert np.abs(matrix).max() <= np.sqrt(2 / head_dim) * 1.0001
    assert np.abs(matrix.sum(axis=0)).max() < 0.9 * np.sqrt(head_dim), "constants stay in one place"


def test_the_rotation_of_8_channels_is_that_of_the_format() -> None:
    signs = (rotation(8)[:, 0] > 0).astype(int).tolist()
    assert signs == [1, 0, 0, 0, 1, 0, 1, 1]
    assert np.allclose(np.abs(rotation(8)), 8**-0.5)
    assert not rotation(8).flags.writeable


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_turned_queries_and_keys_have_the_same_products(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, 3, 64, generator=generator).to(dtype) for _ in range(2))
    tolerance = 0.2 if dtype is torch.bfloat16 else 1e-4
    assert turn(q).dtype == dtype
    assert torch.allclose((turn(q) * turn(k)).sum(-1), (q * k).sum(-1), atol=tolerance)
    assert torch.allclose(turn_back(turn(k)), k, atol=tolerance / 10)


@pytest.mark.parametrize("head_dim", [16, 24, 80, 120])
def test_native_kernels_store_the_keys_that_torch_stores(head_dim: int, tmp_path: Path) -> None:
    """The first layer's, before the precision of weights and attention can make a difference."""
    if not native.available():
        pytest.skip(native.why_not())
    tiny = next(model for model in TINY_MODELS if model.name == "llama-head-dim")
    tiny = type(tiny)(tiny.name, tiny.family, {**tiny.options, "head_dim": head_dim})
    path = save(build_reference(tiny), tmp_path)
    spec = read_spec(path)
    tokens = random_prompt(16)
    arenas = []
    for codec in ("int8", "raw16"):
        kv_spec = KVSpec(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=head_dim,
            block_size=16,
            codec=codec,
        )
        arenas += [BlockArena(kv_spec, 1), BlockArena(kv_spec, 1)]
    decoder = load_decoder(path, spec, torch.float32)
    pool = native.extension().Pool(1)
    for isa in native.isas():
        with native.forced_isa(isa):
            weights = pack_weights(spec, iterate_tensors(path, spec), "bf16", pool)
            native_decoder = NativeDecoder(spec, weights, pool)
            for in_torch, in_native in (arenas[:2], arenas[2:]):
                batch = AttentionBatch.from_sequences(
                    starts=[0], num_tokens=[16], block_tables=[[0]], block_size=16
                )
                with torch.inference_mode():
                    decoder.forward(torch.tensor(tokens), batch, in_torch)
                native_decoder.step([StepSequence(0, tuple(tokens), (0,), 0)], in_native)
        (expected, received), (plain, _) = (
            [read(arena.layer(0)[0], head_dim) for arena in pair]
            for pair in (arenas[:2], arenas[2:])
        )
        assert torch.allclose(received, expected, atol=0.03 * float(expected.abs().max()))
        assert torch.allclose(
            turn_back(expected[0]), plain[0], atol=0.03 * float(plain.abs().max())
        )
        assert torch.allclose(expected[1], plain[1], atol=0.03 * float(plain.abs().max()))
        assert not torch.allclose(expected[0], plain[0], atol=0.1 * float(plain.abs().max()))

"""Which dimensions of a head matter: the statistics that are taken of a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.tiny_engine import load_tiny_decoder
from tests.support.tiny_models import random_prompt
from tests.unit.codecs.test_reduction import pair_gram

from kvist.errors import ConfigError
from kvist.tune.calibration import text_digest
from kvist.tune.reduction import _gram, calibrate_reduction

D = 16


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return load_tiny_decoder(tmp_path_factory.mktemp("tiny"))


def test_shares_are_those_of_scores_and_what_keys_have_in_common_does_not_count():
    random = np.random.default_rng(0)
    query, keys = random.standard_normal(D), random.standard_normal((30, D))
    weights = random.uniform(size=30)
    weights /= weights.sum()

    def received(keys: np.ndarray) -> np.ndarray:
        return _gram(torch.tensor(query), torch.tensor(keys), torch.tensor(weights)).numpy()

    centred = keys - weights @ keys
    expected = pair_gram(query[None], centred * np.sqrt(30 * weights)[:, None])
    np.testing.assert_allclose(received(keys), expected, atol=1e-9)
    np.testing.assert_allclose(received(keys + 5), expected, atol=1e-9)
    # The sum of all shares is the score.
    share = np.repeat([1.0, 0.0], D // 2)
    scores = centred @ query
    assert share @ expected @ share == pytest.approx(weights @ scores**2)


def test_a_reduction_names_its_model_and_text(decoder):
    told: list[tuple[int, int]] = []
    text = ([1], random_prompt(600))
    reduction = calibrate_reduction(decoder, text, "model", 8, lambda *x: told.append(x))
    assert (reduction.fingerprint, reduction.text) == ("model", text_digest(*text))
    assert reduction.keys.shape == (3, 2, D, 8)
    assert reduction.outputs.shape == (3, 2, 8, D)
    assert told[-1][0] > 512
    again = calibrate_reduction(decoder, text, "model", 8)
    assert again.digest == reduction.digest


def test_little_text_is_refused(decoder):
    with pytest.raises(ConfigError, match="--calibration-text"):
        calibrate_reduction(decoder, ([1], random_prompt(100)), "model", 8)

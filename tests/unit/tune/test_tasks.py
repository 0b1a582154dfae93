"""Tasks: what stays of a continuation, what is found by its key, and prompts that fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.tiny_engine import load_tiny_decoder
from tests.support.tiny_models import random_prompt

from kvist.codecs.transforms import uncalibrated
from kvist.errors import ConfigError
from kvist.tune import tasks
from kvist.tune.quality import Chunk, Score, TorchComputer
from kvist.tune.tasks import (
    Continuation,
    Question,
    continuation,
    greedy_score,
    read_questions,
    retrieval_score,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvist.codecs.transforms import KVTransforms


@pytest.fixture(scope="module")
def computer(tmp_path_factory: pytest.TempPathFactory) -> TorchComputer:
    return TorchComputer(load_tiny_decoder(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def transforms(computer: TorchComputer) -> KVTransforms:
    spec = computer.spec
    return uncalibrated(spec.num_layers, spec.num_kv_heads, spec.head_dim)


class Letters:
    """One token for a letter, and one in front of each sequence."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]


def silent(_: int) -> None:
    pass


def told_by(monkeypatch: pytest.MonkeyPatch, best: dict[str, list[int]], vocabulary: int) -> None:
    """Have the pass over a text find these tokens the most probable ones, in two parts."""

    def side_by_side(*arguments: Any) -> Iterator[Chunk]:
        rows = {name: torch.eye(vocabulary)[tokens] for name, tokens in best.items()}
        for part in (slice(0, 3), slice(3, None)):
            for name in arguments[3]:
                yield Chunk(name, part.start, rows[""][part], rows[name][part], 0)

    monkeypatch.setattr(tasks, "side_by_side", side_by_side)


def test_a_continuation_is_what_the_model_says_step_by_step(computer: TorchComputer) -> None:
    prompt = random_prompt(70)
    tokens = [*prompt, *continuation(computer, prompt, 6)]
    for end in range(70, 76):
        assert continuation(computer, tokens[:end], 1) == [tokens[end]]


def test_a_codec_without_loss_keeps_all_of_it(
    computer: TorchComputer, transforms: KVTransforms
) -> None:
    text = Continuation(prompt=tuple(random_prompt(70)), num_tokens=6)
    told: list[int] = []
    scores = greedy_score(computer, transforms, text, ["raw16", "float32"], told.append)
    assert scores["float32"] == Score(generated=6, generated_agreed=6)
    assert sum(told) == 75


@pytest.mark.parametrize(
    ("others", "agreed"),
    [([9, 9, 3, 4, 5], 3), ([0, 1, 3, 9, 5], 1), ([0, 1, 9, 4, 5], 0), ([0, 1, 3, 4, 9], 2)],
)
def test_agreement_ends_at_the_first_difference(
    monkeypatch: pytest.MonkeyPatch, others: list[int], agreed: int
) -> None:
    """Three tokens before, three generated; what comes after the last one is not looked at."""
    told_by(monkeypatch, {"": [0, 1, 3, 4, 5], "int4": others}, 10)
    monkeypatch.setattr(tasks, "continuation", lambda *_: [3, 4, 5])
    text = Continuation(prompt=(7, 8, 2), num_tokens=3)
    scores = greedy_score(None, None, text, ["int4"], silent)  # type: ignore[arg-type]
    assert scores == {"int4": Score(generated=3, generated_agreed=agreed)}


@pytest.mark.parametrize(("last", "is_found"), [(5, True), (6, False)])
def test_an_answer_is_right_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, last: int, *, is_found: bool
) -> None:
    told_by(monkeypatch, {"": [0, 0, 3, 4, 5], "int4": [0, 0, 3, 4, last]}, 10)
    question = Question(prompt=(7, 8, 2), answer=(3, 4, 5))
    scores = retrieval_score(None, None, question, ["int4"], silent)  # type: ignore[arg-type]
    assert scores["int4"] == Score(asked=1, retrieved=is_found, reference_retrieved=1)


def line(count: int, wanted: int) -> str:
    pairs = [[f"k{i:02}", f"v{i:02}"] for i in range(count)]
    return json.dumps(
        {"ordered_kv_records": pairs, "key": pairs[wanted][0], "value": f"v{wanted:02}"}
    )


@pytest.mark.parametrize("wanted", [0, 7, 19])
def test_prompts_are_cut_around_the_wanted_pair(wanted: int) -> None:
    (whole,) = read_questions([line(20, wanted)], 1, 10_000, Letters())
    text = "".join(map(chr, whole.prompt[1:]))
    assert whole.prompt[0] == 1
    assert all(f'"k{i:02}": "v{i:02}"' in text for i in range(20))
    assert text.endswith(f'\n"k{wanted:02}":')
    assert "".join(map(chr, whole.answer)) == f' "v{wanted:02}"'
    (cut,) = read_questions([line(20, wanted)], 1, 200, Letters())
    assert 200 - 15 <= len(cut.tokens) <= 200
    text = "".join(map(chr, cut.prompt))
    kept = [i for i in range(20) if f'"k{i:02}": ' in text]
    assert wanted in kept
    assert kept == list(range(kept[0], kept[-1] + 1))
    assert abs(kept.index(wanted) - wanted * (len(kept) - 1) / 19) <= 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has 0 prompts, and 1 are asked for; lower --retrieval-prompts"),
        (["x"], "line 1 of --retrieval is no object"),
        (["[]"], "line 1 of --retrieval is no object"),
        ([line(2, 0).replace('"value": "v00"', '"value": "v01"')], "line 1 of --retrieval"),
    ],
)
def test_files_that_are_none_are_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_questions(lines, 1, 1000, Letters())
    with pytest.raises(ConfigError, match="raise --window-tokens"):
        read_questions([line(2, 0)], 1, 10, Letters())

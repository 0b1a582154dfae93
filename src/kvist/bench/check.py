"""Whether a peer computed what it was asked to: without that, its times mean nothing.

Responsible for comparing outputs with a reference (transformers, float32, one sequence at a time). Knows
nothing of speed.

Every peer rounds its weights in its own way, so greedy outputs part after a while even where all is well, and with
4-bit weights soon. So an output is followed for as long as it goes the reference's way: each of its tokens must be
among the ten that the reference finds likeliest there (of some 50,000), and at the first that is not the very likeliest
the comparison ends. A peer passes when every output has the length that was asked for, and when enough outputs agree:
of the single requests (known prompts, warm questions, decode) and, apart from those, of the concurrent ones.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from kvist.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvist.bench.work import Batch, Output, Prompt

Candidates = list[list[int]]
"""The likeliest tokens after a prompt, then those after the prompt and the likeliest of them, and so on."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """The part of a tokeniser that is needed here."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""


class Checker:
    """Collects the outputs of all peers and judges them.

    Args:
        tokenizer: The model's; peers that tell only text are compared by text.
        reference: What may follow each prompt that is checked.
        min_agreement: Share of outputs that must agree, in [0, 1].
    """

    def __init__(
        self,
        tokenizer: Decoder,
        reference: Mapping[tuple[int, ...], Candidates],
        min_agreement: float,
    ) -> None:
        self._tokenizer = tokenizer
        self._reference = reference
        self._min_agreement = min_agreement
        self._agreed: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))

    def add(self, peer: str, batch: Batch, outputs: Sequence[Output], *, is_compared: bool) -> None:
        """Take the outputs of one batch.

        Raises:
            BenchError: An output is not as long as it should be.
        """
        for output in outputs:
            if output.num_tokens != batch.max_tokens:
                raise BenchError(
                    f"[bench] {peer} was asked for {batch.max_tokens} tokens and produced {output.num_tokens}; "
                    "nothing is reported"
                )
        if is_compared:
            group = "single" if len(batch.prompts) == 1 else "concurrent"
            for prompt, output in zip(batch.prompts, outputs, strict=True):
                self._agreed[peer][group].append(self._agrees(prompt, output))

    def agreement(self) -> dict[str, dict[str, float]]:
        """Return the share of outputs that agree: by peer, then single or concurrent."""
        return {
            peer: {group: sum(agreed) / len(agreed) for group, agreed in groups.items()}
            for peer, groups in self._agreed.items()
        }

    def require_agreement(self) -> None:
        """Raise unless every peer computed what the reference did.

        Raises:
            BenchError: Too few outputs of a peer agree; the message names all such peers.
        """
        wrong = [
            f"{peer} ({group} requests: {share:.0%})"
            for peer, groups in self.agreement().items()
            for group, share in groups.items()
            if share < self._min_agreement
        ]
        if wrong:
            raise BenchError(
                f"[bench] expected {self._min_agreement:.0%} of outputs to follow the reference, "
                f"received wrong outputs from {', '.join(wrong)}; nothing is reported"
            )

    def _agrees(self, prompt: Prompt, output: Output) -> bool:
        candidates = self._reference[tuple(prompt)]
        if output.token_ids is not None:
            return _follows(output.token_ids, candidates)
        assert output.text is not None
        texts = [
            [self._tokenizer.decode([token_id]).rstrip(REPLACEMENT) for token_id in token_ids]
            for token_ids in candidates
        ]
        return _text_follows(output.text, texts)


def _follows(token_ids: Sequence[int], candidates: Candidates) -> bool:
    """Return whether tokens stay among the candidates for as long as they are the likeliest."""
    for token_id, likeliest in zip(token_ids, candidates, strict=False):
        if token_id != likeliest[0]:
            return token_id in likeliest
    return True


def _text_follows(text: str, candidates: Sequence[Sequence[str]]) -> bool:
    """Return the same of a text, whose tokens are not known; characters that a token only begins are left out."""
    for likeliest in candidates:
        if not text.startswith(likeliest[0]):
            return any(text.startswith(candidate) for candidate in likeliest)
        text = text[len(likeliest[0]) :]
    return True

"""Whether a peer computed what it was asked to: without that, its times mean nothing.

Responsible for comparing outputs with those of a reference (transformers, float32, one sequence at a time). Knows
nothing of speed.

Every peer rounds its weights in its own way, so greedy outputs part after a while even where all is well. Compared are
the first tokens of an output: it agrees when they are all the reference's. A peer passes when every output has the
length that was asked for, and when enough outputs agree: of the single requests (known prompts, warm questions, decode)
and, apart from those, of the requests that ran at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from kvist.bench.work import CHECKED_TOKENS
from kvist.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvist.bench.work import Batch, Output, Prompt

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """The part of a tokeniser that is needed here."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""


class Checker:
    """Collects the outputs of all peers and judges them.

    Args:
        tokenizer: The model's; peers that tell only text are compared by text.
        reference: The first tokens that follow each prompt that is checked.
        min_agreement: Share of outputs that must agree, in [0, 1].
    """

    def __init__(
        self,
        tokenizer: Decoder,
        reference: Mapping[tuple[int, ...], Sequence[int]],
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
                f"[bench] expected {self._min_agreement:.0%} of outputs to begin as the reference's, "
                f"received wrong outputs from {', '.join(wrong)}; nothing is reported"
            )

    def _agrees(self, prompt: Prompt, output: Output) -> bool:
        expected = list(self._reference[tuple(prompt)])[:CHECKED_TOKENS]
        if output.token_ids is not None:
            return list(output.token_ids[: len(expected)]) == expected
        assert output.text is not None
        text = self._tokenizer.decode(expected).rstrip(REPLACEMENT)
        return output.text.startswith(text)

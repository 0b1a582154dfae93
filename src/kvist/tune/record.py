"""Scores of windows on disk, so that a measurement that was cut goes on where it was.

Responsible for one file per setting: a line of JSON for each window and codec, appended when it is done. Whatever is in
a file that is no such line, a half-written last one above all, is passed over: it is measured again. Knows nothing of
how a score comes about.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from blake3 import blake3

from kvist.tune.quality import Score

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class ScoreRecord:
    """The scores of one setting. Written by one process at a time; of two, each appends whole lines.

    Args:
        folder: Where the file is; made when the first score is.
        setting: What the scores depend on, JSON values; another setting has another file.
    """

    def __init__(self, folder: Path, setting: Mapping[str, object]) -> None:
        digest = blake3(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:32]
        self.path = folder / f"{digest}.jsonl"
        self._scores: dict[tuple[str, int], Score] = {}
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                self._read(line)

    def get(self, codec: str, window: int) -> Score | None:
        """Return a score; None: it has not been measured."""
        return self._scores.get((codec, window))

    def put(self, codec: str, window: int, score: Score) -> None:
        """Keep a score.

        Raises:
            OSError: The file cannot be written.
        """
        self._scores[codec, window] = score
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"codec": codec, "window": window, "score": asdict(score)})
        # A leading end of line closes what an interrupted process left open.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")

    def clear(self) -> None:
        """Forget everything, on disk as well."""
        self._scores.clear()
        self.path.unlink(missing_ok=True)

    def _read(self, line: str) -> None:
        try:
            entry = json.loads(line)
            score = Score.from_document(entry["score"])
            self._scores[str(entry["codec"]), int(entry["window"])] = score
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return

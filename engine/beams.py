"""Beam search as decisions on numbers: which continuations live on, which are kept as finished, when it is over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core import FinishReason, InvalidRequestError

MAX_BEAM_WIDTH = 64


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Raises InvalidRequestError naming field and limit.

    A finished sequence's score is its cumulative log probability / length ** length_penalty, so that a penalty above 0
    favours longer ones. early_stopping: end with the `beam_width`-th finished sequence; else go on until no running one
    can do better at its present length. stop_token_ids: tokens that finish a sequence.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidRequestError(
                f"beam_width must be an integer between 1 and {MAX_BEAM_WIDTH}, got {self.beam_width}",
                field="beam_width",
            )
        if self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {self.max_tokens}", field="max_tokens")
        if not math.isfinite(self.length_penalty):
            raise InvalidRequestError(
                f"length_penalty must be a finite number, got {self.length_penalty}", field="length_penalty"
            )

    @property
    def candidates(self) -> int:
        """How many of the best continuations to look at: enough that `beam_width` of them do not end."""
        return max(2, 1 + len(self.stop_token_ids)) * self.beam_width


@dataclass(frozen=True, slots=True)
class Continuation:
    """One more token for running beam `parent` (its index). logprob: of the whole continued sequence."""

    parent: int
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class RunningBeam:
    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """token_ids: what was generated, a stop token included."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason


class BeamGroup:
    """The beams of one prompt. running: best first; finished: best score first, at most `beam_width`."""

    def __init__(self, params: BeamParams) -> None:
        self._params = params
        self.running: Sequence[RunningBeam] = [RunningBeam()]
        self.finished: Sequence[FinishedBeam] = []
        self.done = False

    def extend(self, best: Sequence[Continuation]) -> Sequence[Continuation]:
        """Takes the `params.candidates` best continuations of the running beams, best first. Those returned are the
        running beams from now on, in order."""
        assert not self.done, "a search that is over was continued"
        width = self._params.beam_width
        survivors: list[Continuation] = []
        finished = list(self.finished)
        for rank, continuation in enumerate(best):
            token_ids = (*self.running[continuation.parent].token_ids, continuation.token_id)
            reason = self._finish_reason(token_ids)
            if reason is None:
                survivors.append(continuation)
            elif rank < width:  # the others are only there so that enough go on
                score = self._score(continuation.logprob, len(token_ids))
                finished.append(FinishedBeam(token_ids, continuation.logprob, score, reason))
        del survivors[width:]
        self.finished = sorted(finished, key=lambda beam: -beam.score)[:width]
        self.running = [
            RunningBeam((*self.running[beam.parent].token_ids, beam.token_id), beam.logprob) for beam in survivors
        ]
        self.done = not survivors or not self._can_improve()
        return survivors

    def _finish_reason(self, token_ids: Sequence[int]) -> FinishReason | None:
        if token_ids[-1] in self._params.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) >= self._params.max_tokens else None

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _can_improve(self) -> bool:
        if len(self.finished) < self._params.beam_width:
            return True
        if self._params.early_stopping:
            return False
        best = self.running[0]
        return self._score(best.logprob, len(best.token_ids)) > self.finished[-1].score

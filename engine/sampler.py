"""Choosing tokens: one vectorised pass over a step's logits.

Random numbers are a pure function of (seed, position), so a request gives the same text on whichever
workers it is served, after a replay too. The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from kvferry.core import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1
_NUCLEUS = 1024
"""Candidates looked at for top_p; where a nucleus is larger, the whole rows are sorted."""
_STRETCH = 64
"""Tokens of one stretch, where the vocabulary is searched in two steps."""


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What to do with one row of logits.

    position: of the token to be chosen, counted from the prompt's start. prompt_ids, output_ids: the tokens so
    far; read only when a penalty is set. suppressed: ids that may not be chosen (stop ids before min_tokens).
    """

    sampling: SamplingParams
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    suppressed: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    return (_splitmix64(_splitmix64(seed) ^ _splitmix64(position * 0x9E3779B97F4A7C15 + 1)) >> 11) * 2.0**-53


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample(logits: torch.Tensor, rows: Sequence[RowRequest]) -> list[Sampled]:
    """Chooses one token per row. logits: float32 [rows, vocab]; changed in place."""
    if not rows:
        return []
    for index, row in enumerate(rows):
        _adjust(logits[index], row)
    chosen = [-1] * len(rows)
    for choose, wanted in (
        (_likeliest, [index for index, row in enumerate(rows) if row.sampling.greedy]),
        (_draw_filtered, [index for index, row in enumerate(rows) if _is_filtered(row.sampling)]),
        (_draw_plain, [i for i, row in enumerate(rows) if not row.sampling.greedy and not _is_filtered(row.sampling)]),
    ):
        if wanted:
            picks = choose(_select(logits, wanted), [rows[index] for index in wanted])
            for index, token_id in zip(wanted, picks, strict=True):
                chosen[index] = token_id
    logprobs = _logprobs(logits, rows, chosen)
    return [Sampled(token_id, logprob) for token_id, logprob in zip(chosen, logprobs, strict=True)]


def _is_filtered(sampling: SamplingParams) -> bool:
    return not sampling.greedy and (bool(sampling.top_k) or sampling.top_p < 1.0)


def _select(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Those rows; not copied when they are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _likeliest(logits: torch.Tensor, _rows: Sequence[RowRequest]) -> list[int]:
    """The first of the largest, in two steps: on the CPU maxima are found many at once, their places are not."""
    rows, vocab = logits.shape
    if vocab % _STRETCH:
        return logits.argmax(dim=-1).tolist()
    stretches = logits.view(rows, -1, _STRETCH)
    places = stretches.amax(dim=-1).argmax(dim=-1)
    inside = stretches.gather(1, places[:, None, None].expand(-1, 1, _STRETCH))[:, 0].argmax(dim=-1)
    return (places * _STRETCH + inside).tolist()


def _adjust(logits: torch.Tensor, row: RowRequest) -> None:
    """Penalties (as in the OpenAI API; repetition as in CTRL, arXiv:1909.05858), bias and suppressed ids."""
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}), device=logits.device)
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.output_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        counted = Counter(row.output_ids)
        ids = torch.tensor(list(counted), device=logits.device)
        counts = torch.tensor(list(counted.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    if row.suppressed:
        logits[list(row.suppressed)] = float("-inf")


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """[rows, 1], in like's type and place."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _points(rows: Sequence[RowRequest]) -> list[float]:
    return [uniform(row.sampling.seed or 0, row.position) for row in rows]


def _weights(logits: torch.Tensor, top: torch.Tensor, rows: Sequence[RowRequest]) -> torch.Tensor:
    """Unnormalised probabilities after temperature and min_p: 1 for the likeliest. top: each row's largest logit,
    [rows, 1]; subtracted first, since a tiny temperature would overflow otherwise."""
    weights = ((logits - top) / _column([row.sampling.temperature for row in rows], logits)).exp_()
    if any(row.sampling.min_p for row in rows):
        weights.masked_fill_(weights < _column([row.sampling.min_p for row in rows], weights), 0.0)
    return weights


def _draw_plain(logits: torch.Tensor, rows: Sequence[RowRequest]) -> list[int]:
    """Samples each row by inverting its cumulative distribution at `uniform(seed, position)`, in two steps: which
    stretch of the vocabulary, then which token in it."""
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), rows)
    stretches = pad(weights, (0, -weights.shape[1] % _STRETCH)).view(len(rows), -1, _STRETCH)
    sums = stretches.sum(dim=-1, dtype=torch.float64)
    targets = _column(_points(rows), sums) * sums.sum(dim=-1, keepdim=True)
    places, left = _invert(sums, targets)
    inside = stretches.gather(1, places[..., None].expand(-1, 1, _STRETCH))[:, 0]
    tokens, _ = _invert(inside.double(), left)
    return (places * _STRETCH + tokens)[:, 0].tolist()


def _invert(weights: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weights: float64 [rows, n], none negative; targets: [rows, 1]. The first index whose cumulative weight passes
    the target, never one of weight 0; and what is left of the target there. Both [rows, 1]."""
    cumulative = weights.cumsum(dim=-1)
    # right=True: a target that equals a boundary belongs to the next one, so a weight of 0 is never hit.
    found = torch.searchsorted(cumulative, targets, right=True)
    # Rounding may put a target past the end.
    positive = torch.arange(weights.shape[1], device=weights.device).masked_fill(weights <= 0, -1)
    places = torch.minimum(found, positive.amax(dim=-1, keepdim=True))
    before = cumulative.gather(1, places) - weights.gather(1, places)
    return places, (targets - before).clamp_(min=0.0)


def _draw_filtered(logits: torch.Tensor, rows: Sequence[RowRequest]) -> list[int]:
    """top_k, then top_p over what is left (the smallest set of likeliest tokens whose sum reaches top_p)."""
    picks = [-1] * len(rows)
    # Apart: top_k needs few candidates and nothing of the rest, top_p alone many and the whole row's sum.
    for bounded in (True, False):
        wanted = [index for index, row in enumerate(rows) if bool(row.sampling.top_k) == bounded]
        if wanted:
            drawn = _draw_candidates(_select(logits, wanted), [rows[index] for index in wanted], bounded)
            for index, token_id in zip(wanted, drawn, strict=True):
                picks[index] = token_id
    return picks


def _draw_candidates(logits: torch.Tensor, rows: Sequence[RowRequest], bounded: bool) -> list[int]:
    """bounded: every row has a top_k; else none has."""
    most = [row.sampling.top_k if bounded else _NUCLEUS for row in rows]
    values, ids = _largest(logits, min(max(most), logits.shape[1]))
    weights = _weights(values, values[:, :1], rows).double()
    shares = _column([row.sampling.top_p for row in rows], weights)
    if bounded:
        ranks = torch.arange(weights.shape[1], device=logits.device)
        weights.masked_fill_(ranks >= _column(most, weights), 0.0)
        totals = weights.sum(dim=-1, keepdim=True)
    else:
        totals = _weights(logits, values[:, :1], rows).sum(dim=-1, keepdim=True, dtype=torch.float64)
        if bool((weights.sum(dim=-1, keepdim=True) < shares * totals).any()):  # a nucleus larger than the candidates
            values, ids = logits.sort(dim=-1, descending=True)
            weights = _weights(values, values[:, :1], rows).double()
    before = weights.cumsum(dim=-1) - weights
    weights.masked_fill_((before >= shares * totals) & (shares < 1.0), 0.0)
    targets = _column(_points(rows), weights) * weights.sum(dim=-1, keepdim=True)
    places, _ = _invert(weights, targets)
    return ids.gather(1, places)[:, 0].tolist()


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As topk. The `count` largest lie in the stretches with the `count` largest maxima: only those are searched."""
    rows, vocab = logits.shape
    if vocab % _STRETCH or count * _STRETCH * 4 > vocab:
        return logits.topk(count)
    stretches = logits.view(rows, -1, _STRETCH)
    places = stretches.amax(dim=-1).topk(count).indices
    candidates = stretches.gather(1, places[..., None].expand(-1, -1, _STRETCH)).view(rows, -1)
    values, found = candidates.topk(count)
    return values, places.gather(1, found // _STRETCH) * _STRETCH + found % _STRETCH


def _logprobs(logits: torch.Tensor, rows: Sequence[RowRequest], chosen: Sequence[int]) -> list[TokenLogprob | None]:
    """Log probabilities after penalties and bias, before temperature; None where not asked for."""
    results: list[TokenLogprob | None] = [None] * len(rows)
    wanted = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not wanted:
        return results
    asked = _select(logits, wanted)
    norms = asked.logsumexp(dim=-1, keepdim=True)
    picks = torch.tensor([[chosen[index]] for index in wanted], device=logits.device)
    own = (asked.gather(1, picks) - norms)[:, 0].tolist()
    most = max(rows[index].sampling.logprobs or 0 for index in wanted)
    top_values, top_ids = _largest(asked, most) if most else (asked[:, :0], picks[:, :0])
    values, ids = (top_values - norms).tolist(), top_ids.tolist()
    for place, index in enumerate(wanted):
        count = rows[index].sampling.logprobs or 0
        top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        results[index] = TokenLogprob(chosen[index], own[place], top)
    return results

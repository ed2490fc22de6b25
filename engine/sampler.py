"""Choosing tokens: one vectorised pass over a step's logits.

Random numbers are a pure function of (seed, position), so a request gives the same text on whichever
workers it is served, after a replay too. The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvferry.core import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1
_NUCLEUS = 1024
"""Candidates sorted for top_p; a row whose nucleus is larger is sorted whole."""


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
    chosen = logits.argmax(dim=-1).tolist()
    random_rows = [index for index, row in enumerate(rows) if not row.sampling.greedy]
    if random_rows:
        picks = _draw(logits[random_rows], [rows[index] for index in random_rows])
        for index, token_id in zip(random_rows, picks, strict=True):
            chosen[index] = token_id
    logprobs = _logprobs(logits, rows, chosen)
    return [Sampled(token_id, logprob) for token_id, logprob in zip(chosen, logprobs, strict=True)]


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


def _draw(logits: torch.Tensor, rows: Sequence[RowRequest]) -> list[int]:
    """Samples each row by inverting its cumulative distribution at `uniform(seed, position)`."""
    temperatures = torch.tensor([row.sampling.temperature for row in rows], device=logits.device)
    # Subtract the maximum first: a tiny temperature would overflow otherwise.
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    probabilities = torch.softmax(shifted / temperatures[:, None], dim=-1)
    floors = torch.tensor([row.sampling.min_p for row in rows], device=logits.device)
    if bool(floors.any()):
        least = floors[:, None] * probabilities.max(dim=-1, keepdim=True).values
        probabilities = torch.where(probabilities >= least, probabilities, 0.0)
    points = [uniform(row.sampling.seed or 0, row.position) for row in rows]
    picks = [-1] * len(rows)
    filtered = [i for i, row in enumerate(rows) if row.sampling.top_k or row.sampling.top_p < 1.0]
    plain = [i for i in range(len(rows)) if i not in set(filtered)]
    if plain:
        for index, token in zip(plain, _invert(probabilities[plain], [points[i] for i in plain]), strict=True):
            picks[index] = token
    for index in filtered:
        picks[index] = _draw_filtered(probabilities[index], rows[index].sampling, points[index])
    return picks


def _invert(probabilities: torch.Tensor, points: Sequence[float]) -> list[int]:
    """The first index whose cumulative probability passes the point; probabilities [rows, n] need not sum to 1."""
    cumulative = probabilities.double().cumsum(dim=-1)
    targets = torch.tensor(points, dtype=torch.float64, device=probabilities.device)[:, None] * cumulative[:, -1:]
    # right=True: a point that equals a boundary belongs to the next token, so a token of probability 0 is never hit.
    found = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    last = (probabilities > 0).double().cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(found, last).tolist()


def _draw_filtered(probabilities: torch.Tensor, sampling: SamplingParams, point: float) -> int:
    """top_k, then top_p over what is left (the smallest set of likeliest tokens whose sum reaches top_p)."""
    vocab = probabilities.shape[0]
    width = min(vocab, sampling.top_k or _NUCLEUS)
    values, ids = probabilities.topk(width)
    if sampling.top_p < 1.0:
        if not sampling.top_k and float(values.sum()) < sampling.top_p * float(probabilities.sum()):
            values, ids = probabilities.sort(descending=True)
        total = values.double().sum() if sampling.top_k else probabilities.double().sum()
        before = values.double().cumsum(dim=0) - values
        values = torch.where(before < sampling.top_p * total, values, 0.0)
    return int(ids[_invert(values[None], [point])[0]])


def _logprobs(logits: torch.Tensor, rows: Sequence[RowRequest], chosen: Sequence[int]) -> list[TokenLogprob | None]:
    """Log probabilities after penalties and bias, before temperature; None where not asked for."""
    results: list[TokenLogprob | None] = [None] * len(rows)
    wanted = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not wanted:
        return results
    distribution = torch.log_softmax(logits[wanted], dim=-1)
    most = max(rows[index].sampling.logprobs or 0 for index in wanted)
    top_values, top_ids = distribution.topk(most) if most else (distribution[:, :0], distribution[:, :0].long())
    values, ids = top_values.tolist(), top_ids.tolist()
    for place, index in enumerate(wanted):
        count = rows[index].sampling.logprobs or 0
        top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        results[index] = TokenLogprob(chosen[index], float(distribution[place, chosen[index]]), top)
    return results

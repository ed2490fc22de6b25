"""Routing that chooses among the best groups of experts, by sigmoid scores (DeepSeek V3, Nemotron-H)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.core import CheckpointError
from kvferry.models.base import Config, Linear, LinearFactory, Weights
from kvferry.models.checked import count, number
from kvferry.models.feedforward import Routing
from kvferry.models.layers import PackedRow, load_packed


@dataclass(frozen=True, slots=True)
class RouterShape:
    """experts stand in equal groups, of which the `best_groups` with the two highest scores are looked at."""

    experts: int
    chosen: int
    groups: int
    best_groups: int
    normalised: bool
    factor: float

    @classmethod
    def from_json(cls, config: Config, chosen: int) -> RouterShape:
        """chosen: experts per token where the config does not say. Raises CheckpointError naming the key."""
        key = "n_routed_experts" if "n_routed_experts" in config else "num_local_experts"
        experts, groups = count(config, key), count(config, "n_group", 1)
        best = count(config, "topk_group", groups)
        if experts % groups or experts // groups < 2 or best > groups:
            raise CheckpointError(
                f"config.json: {experts} experts cannot stand in {groups} equal groups of 2 or more, {best} of them "
                "chosen",
                field="n_group",
            )
        chosen = count(config, "num_experts_per_tok", chosen)
        if chosen > best * (experts // groups):
            raise CheckpointError(
                f"config.json: num_experts_per_tok ({chosen}) is above what {best} groups of {experts // groups} hold",
                field="num_experts_per_tok",
            )
        return cls(
            experts=experts,
            chosen=chosen,
            groups=groups,
            best_groups=best,
            normalised=bool(config.get("norm_topk_prob", True)),
            factor=number(config, "routed_scaling_factor", 1.0),
        )


@dataclass(frozen=True, slots=True)
class GroupRouter:
    """Chooses by sigmoid plus a correction that balances load, first groups, then experts; weighs by sigmoid."""

    logits: Linear
    correction: torch.Tensor
    shape: RouterShape

    def __call__(self, x: torch.Tensor) -> Routing:
        shape = self.shape
        scores = torch.sigmoid(self.logits(x).float())
        grouped = (scores + self.correction).view(len(x), shape.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(shape.best_groups, dim=-1).indices
        left_out = torch.ones(len(x), shape.groups, dtype=torch.bool, device=x.device).scatter_(1, best, False)
        eligible = grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1)
        chosen = eligible.topk(shape.chosen, dim=-1).indices
        shares = scores.gather(1, chosen)
        if shape.normalised:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return Routing(chosen, shares * shape.factor)


def load_router(weights: Weights, name: str, shape: RouterShape, hidden: int, linear: LinearFactory) -> GroupRouter:
    """`name`.weight are the rows of the logits, `name`.e_score_correction_bias the correction."""
    logits = load_packed(weights, [PackedRow(name, shape.experts)], hidden, linear)
    return GroupRouter(logits, weights.get(f"{name}.e_score_correction_bias", (shape.experts,)).float(), shape)

"""The forward pass of one rank: its part of the model, and what it hands to and gets from its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.engine.attention import PagedAttention
from kvferry.engine.kernels import Kernels
from kvferry.engine.rank_group import RankGroup
from kvferry.engine.states import PagedStates
from kvferry.engine.step_message import StepPlan
from kvferry.kvcache import KVPool
from kvferry.models import WHOLE, CausalLM, ForwardBatch, Shard


@dataclass(frozen=True, slots=True)
class Stage:
    """group: None in a worker of one rank. hidden_size, dtype: of hidden states, where there are several
    stages."""

    model: CausalLM
    device: torch.device
    kernels: Kernels
    hidden_size: int
    dtype: torch.dtype = torch.float32
    shard: Shard = WHOLE
    group: RankGroup | None = None

    @torch.inference_mode()
    def compute(self, plan: StepPlan, pools: Sequence[KVPool]) -> torch.Tensor | None:
        """Every rank of a worker is given the same plan. Returns the logits, float32 [logit rows, vocab], on rank 0;
        elsewhere None."""
        out = self.model.forward(self._batch(plan, pools))
        if self.group is None or self.shard.pp_size == 1:
            return out if self.shard.rank == 0 else None
        if not self.shard.last_stage:
            self.group.send(out, self.shard.rank + self.shard.tp_size)
        # Logits are the last stage's, and whole on each of its ranks: its first one sends them where they are sampled.
        # Of none it sends one zero: when rank 0 goes on, all K and V of the step are written, on every rank.
        rows, sender = len(plan.logit_rows), (self.shard.pp_size - 1) * self.shard.tp_size
        if self.shard.rank == sender:
            self.group.send(out if rows else out.new_zeros(1, 1), 0)
        if self.shard.rank != 0:
            return None
        vocab = self.model.limits.vocab_size
        if rows:
            return self.group.receive(rows, vocab, sender)
        self.group.receive(1, 1, sender)
        return torch.empty(0, vocab, device=self.device)

    def _batch(self, plan: StepPlan, pools: Sequence[KVPool]) -> ForwardBatch:
        hidden = None
        if self.group is not None and not self.shard.first_stage:
            sender = self.shard.rank - self.shard.tp_size
            hidden = self.group.receive(len(plan.token_ids), self.hidden_size, sender, self.dtype)
        return ForwardBatch(
            token_ids=torch.tensor(plan.token_ids, device=self.device),
            positions=torch.tensor(plan.positions, device=self.device),
            logit_rows=torch.tensor(plan.logit_rows, dtype=torch.int64, device=self.device),
            attention=PagedAttention(pools, plan.chunks, self.kernels),
            states=PagedStates(pools, plan.chunks) if any(pool.layout.kind.is_state for pool in pools) else None,
            hidden=hidden,
        )

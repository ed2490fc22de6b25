"""A rank other than 0: loads its part of the model, and follows rank 0 until that says the end, or is gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvferry.core import ConfigError, DType, KVFerryError
from kvferry.engine.pinning import pin_this_thread
from kvferry.engine.rank_group import RankGroup
from kvferry.engine.rank_leader import STEP_TIMEOUT_S, rank_device, rank_layouts, shard_of_rank
from kvferry.engine.rank_pipe import Message, ParentPipe
from kvferry.engine.runner import load_stage
from kvferry.engine.settings import EngineSettings
from kvferry.engine.step_message import MessageKind, decode_message
from kvferry.kvcache import KVPool, repeat_changes
from kvferry.kvcache.pool import Allocate, Pages, build_pool

logger = logging.getLogger(__name__)


class Follower:
    """One rank: its part of the model, its pools, and how far it has followed."""

    def __init__(self, spec: Message) -> None:
        """Meets the other ranks, which blocks until they are there."""
        given = dict(spec["settings"])
        self.settings = EngineSettings(**{**given, "kv_dtype": DType(given["kv_dtype"])})
        self.rank = int(spec["rank"])
        self.model_dir = Path(spec["model_dir"])
        self._device = rank_device(self.settings, self.rank)
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        self.shard = shard_of_rank(self.rank, self.settings)
        self.group = RankGroup(self.shard, Path(spec["folder"]), torch.device(self._device), STEP_TIMEOUT_S)
        self._done = 0
        self._changed = threading.Condition()

    def load(self) -> None:
        self._stage = load_stage(self.model_dir, self.settings, self.rank, self.group)
        self._layouts = rank_layouts(self.model_dir, self.settings)[self.rank]

    def make_pools(self, blocks: Sequence[int], allocate: Allocate | None = None) -> tuple[KVPool, ...]:
        self.pools = tuple(
            build_pool(layout, count, self._device, allocate)
            for layout, count in zip(self._layouts, blocks, strict=True)
        )
        return self.pools

    def follow(self) -> None:
        """Until rank 0 is gone or says the end. Raises RankLostError when the ranks lose touch."""
        threads, first = torch.get_num_threads(), self.settings.first_core
        pin_this_thread(None if first is None else first + self.rank * threads, threads)
        pages = Pages(self.pools, debug=False)
        while True:
            message = decode_message(self.group.listen())
            repeat_changes(message.changes, pages)
            if message.kind is MessageKind.END:
                return
            if message.plan is not None:
                self._stage.compute(message.plan, self.pools)
            with self._changed:
                self._done = message.number
                self._changed.notify_all()

    def await_step(self, number: int, timeout_s: float) -> bool:
        """Until all that rank 0 announced up to message `number` has been done here. Any thread."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= number, timeout_s)


def run_rank(pipe: ParentPipe, spec: Message, attach: Callable[[Follower, Message], Message] | None = None) -> int:
    """Serves as rank `spec["rank"]` until the end. attach: called with the message that brings the pools' sizes; makes
    the pools and what else this rank has, and returns what rank 0 is told of it."""
    pipe.answer("started")
    stage = "loaded"
    try:
        follower = Follower(spec)
        follower.load()
        pipe.answer("loaded")
        stage = "serving"
        sizes = pipe.hear()
        facts = (attach or _only_pools)(follower, sizes)
        pipe.answer("serving", **facts)
    except KVFerryError as error:
        pipe.answer(stage, error=error.message, field=error.field, config=isinstance(error, ConfigError))
        return 2
    if attach is None:
        pipe.listen(lambda message: pipe.closing() if message.get("do") == "end" else None)
    try:
        follower.follow()
    except KVFerryError as error:
        logger.error("rank %d ends: %s", follower.rank, error.message)
        return 1
    return 0


def _only_pools(follower: Follower, sizes: Message) -> Message:
    follower.make_pools(sizes["blocks"])
    return {}

"""Rank 0's side of a worker of several ranks: starts the others, announces steps to them, and ends with them."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvferry.core import CheckpointError, ConfigError, KVLayout
from kvferry.engine.rank_group import RankGroup, RankLostError
from kvferry.engine.rank_pipe import END, ChildRank, Message
from kvferry.engine.settings import EngineSettings
from kvferry.engine.step_message import MessageKind, StepMessage, StepPlan, encode_message
from kvferry.kvcache import KVPool, PageLog
from kvferry.kvcache.pool import blocks_for_budget
from kvferry.models import Shard, inspect_model

logger = logging.getLogger(__name__)

JOIN_S = 300.0
"""How long a rank has to start, and again to load its weights and to make its pools."""
STEP_TIMEOUT_S = 60.0
SIGN_OF_LIFE_S = 5.0
RANK_MODULE = "kvferry.engine.rank_process"


@dataclass(frozen=True, slots=True)
class RankCommand:
    """How the other ranks are started: as `python -m module`. extra: what they are told beside the engine's part."""

    module: str = RANK_MODULE
    extra: Message | None = None


class RankLeader:
    """Owns the processes of all ranks but this one. `execute` and what it announces belong to the engine thread.

    layouts: of every rank, in the order of the whole model's layer groups, so that a group's index means the same
    everywhere. page_log: for the manager of this rank, which decides for all.
    """

    def __init__(self, model_dir: Path, settings: EngineSettings, command: RankCommand | None = None) -> None:
        """Starts the other ranks; returns when all have met. Raises ConfigError, RankLostError."""
        self._settings, self._command = settings, command or RankCommand()
        self.layouts = rank_layouts(model_dir, settings)
        self.page_log = PageLog()
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.on_message: Callable[[int, Message], None] = lambda rank, message: None
        self._problem: str | None = None
        self._number = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._announced_s = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="kvferry-ranks-"))
        self.children: list[ChildRank] = []
        try:
            self._start(model_dir)
            self.group = RankGroup(
                shard_of_rank(0, settings), self._folder, torch.device(rank_device(settings, 0)), STEP_TIMEOUT_S
            )
        except BaseException:
            self.close()
            raise
        self._ticker = threading.Thread(target=self._tick, name="rank-ticks", daemon=True)

    def _start(self, model_dir: Path) -> None:
        for rank in range(1, self._settings.ranks):
            child = ChildRank(
                rank,
                ("-m", self._command.module),
                lambda message, rank=rank: self.on_message(rank, message),  # type: ignore[misc]
                self._child_lost,
            )
            self.children.append(child)
        for child in self.children:
            child.tell(
                {
                    "rank": child.rank,
                    "model_dir": str(model_dir),
                    "folder": str(self._folder),
                    "settings": settings_to_json(self._settings),
                    **(self._command.extra or {}),
                }
            )
        for child in self.children:
            _checked(child.answer("started", JOIN_S))

    def await_loaded(self) -> None:
        """Until every rank has its weights. Raises what kept one from it."""
        for child in self.children:
            _checked(child.answer("loaded", JOIN_S))

    def budget(self, nbytes: int) -> int:
        """What of `nbytes` for the pools of the worker, all ranks together, is this rank's."""
        blocks = blocks_for_budget([layout for layouts in self.layouts for layout in layouts], nbytes)
        return blocks * sum(layout.slot_nbytes for layout in self.layouts[0])

    def serve(self, pools: Sequence[KVPool], told: Message | None = None) -> list[Message]:
        """Every rank makes pools of as many blocks as this rank has. told: to what is attached to the engine there.
        Returns what each says of itself, in order of ranks."""
        for child in self.children:
            child.tell({"blocks": [pool.num_blocks for pool in pools], **(told or {})})
        facts = [_checked(child.answer("serving", JOIN_S)) for child in self.children]
        self._ticker.start()
        return facts

    # -- steps --------------------------------------------------------------------------------------------

    def announce(self, kind: MessageKind, plan: StepPlan | None = None) -> int:
        """Tells every rank what changed, and what to compute now. Returns the message's number."""
        with self._lock:
            self._check()
            self._number += 1
            self._announced_s = time.monotonic()
            changes = self.page_log.drain()
            self.group.announce(encode_message(StepMessage(kind, self._number, changes, plan)))
            return self._number

    def settle(self) -> None:
        """Announces page changes, if there are any, without a step."""
        if self.page_log:
            self.announce(MessageKind.PAGES)

    @property
    def number(self) -> int:
        """Of the latest message."""
        return self._number

    def fail(self, error: Exception) -> RankLostError:
        """A step of this rank failed half-way, so the ranks are no longer in step: the worker is lost."""
        reason = self._problem or (error.message if isinstance(error, RankLostError) else f"a step failed: {error}")
        self._lose(reason)
        return RankLostError(reason)

    def _tick(self) -> None:
        """While there is no work, a message now and then: ranks that hear nothing for long end themselves. Page changes
        are not sent from here: they belong to the engine thread."""
        while not self._stop.wait(SIGN_OF_LIFE_S / 2):
            try:
                with self._lock:
                    if time.monotonic() - self._announced_s < SIGN_OF_LIFE_S:
                        continue
                    self._number += 1
                    self._announced_s = time.monotonic()
                    self.group.announce(encode_message(StepMessage(MessageKind.PAGES, self._number, ())))
            except RankLostError as error:
                self._lose(error.message)
                return

    # -- ends ---------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._problem is not None:
            raise RankLostError(self._problem)

    def _child_lost(self, reason: str) -> None:
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self._problem is None and not self._stop.is_set():
            self._problem = reason
            logger.error("this worker cannot go on: %s", reason)
            self.on_lost(reason)

    def close(self) -> None:
        """Ends every other rank. Bounded."""
        if not self._stop.is_set():
            self._stop.set()
            with contextlib.suppress(RankLostError, AttributeError):
                for child in self.children:
                    child.tell(END)
        for child in self.children:
            child.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def shard_of_rank(rank: int, settings: EngineSettings) -> Shard:
    return Shard.of_rank(rank, settings.tensor_parallel, settings.pipeline_parallel)


def rank_device(settings: EngineSettings, rank: int) -> str:
    """Ranks on GPUs take one each, from the one the setting names on."""
    kind, _, index = settings.device.partition(":")
    return settings.device if kind == "cpu" or settings.ranks == 1 else f"{kind}:{int(index or 0) + rank}"


def rank_layouts(model_dir: Path, settings: EngineSettings) -> list[tuple[KVLayout, ...]]:
    """What every rank caches. Raises ConfigError where a stage would hold no layer of some group."""
    whole = inspect_model(model_dir).layouts(settings.tokens_per_block, settings.kv_dtype)
    layers = sum(len(layout.layers) for layout in whole)
    ranks = []
    for rank in range(settings.ranks):
        shard = shard_of_rank(rank, settings)
        inspect_model(model_dir, shard)  # refuses what does not divide
        held = [layout.shard(shard.tp_rank, shard.tp_size, shard.layers(layers)) for layout in whole]
        if any(layout is None for layout in held):
            raise ConfigError(
                f"engine.pipeline_parallel is {settings.pipeline_parallel}: stage {shard.pp_rank} would hold layers of "
                "only some kinds of attention, and every stage needs all kinds",
                field="engine.pipeline_parallel",
            )
        ranks.append(tuple(layout for layout in held if layout is not None))
    return ranks


def settings_to_json(settings: EngineSettings) -> dict[str, Any]:
    return {**asdict(settings), "kv_dtype": settings.kv_dtype.value}


def _checked(message: Message) -> Message:
    if "error" in message:
        kind = ConfigError if message.get("config") else CheckpointError
        raise kind(message["error"], field=message.get("field", ""))
    return message

"""Whatever the KV cache does with a request's blocks, its tokens are those of plain transformers."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_checkpoint
from families import FAMILIES

from kvferry.core import SamplingParams
from kvferry.engine import LLM
from kvferry.engine import llm as llm_module
from kvferry.kvcache import BackgroundCopier, RowCopy
from kvferry.kvcache.pool import slot_counts

AssertGolden = Callable[[Any, Sequence[int], Sequence[int]], int]
BLOCK = 8
ROW_BLOCKS = 20
"""Blocks of each layer group, as many bytes as that: three of these requests at a time."""


def prompts(vocab: int) -> list[list[int]]:
    """Prompts with a common beginning that ends inside a block, longer than the window."""
    rng = random.Random(0)
    system = [rng.randrange(3, vocab) for _ in range(27)]
    return [system + [rng.randrange(3, vocab) for _ in range(3 + 5 * n)] for n in range(6)]


@pytest.fixture(scope="module")
def window_dir(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = random_checkpoint(FAMILIES[name](), tmp_path_factory.mktemp(name))
            for file in tiny_llama_dir.glob("tokenizer*"):
                shutil.copy(file, made[name])
        return made[name]

    return get


def make_engine(
    model_dir: Path,
    core: str,
    *,
    blocks: int = ROW_BLOCKS,
    host: float = 0,
    kv_typical_tokens: int | None = None,
    **options: Any,
) -> LLM:
    """A V2 engine of `blocks` blocks per group; host: how many times that is below them."""
    with LLM(model_dir, manager="V2", tokens_per_block=BLOCK, kv_bytes=1 << 20, threads=1) as probe:
        layouts = [pool.layout for pool in probe.manager.pools]

    def nbytes(blocks: int) -> int:
        counts = slot_counts(layouts, blocks, kv_typical_tokens)
        return sum(count * layout.slot_nbytes for count, layout in zip(counts, layouts, strict=True))

    return LLM(
        model_dir,
        manager="V2",
        kv_core=core,
        kv_bytes=nbytes(blocks),
        kv_host_bytes=nbytes(int(host * blocks)) if host else 0,
        kv_typical_tokens=kv_typical_tokens,
        tokens_per_block=BLOCK,
        threads=1,
        step_token_budget=32,
        max_step_ms=1e9,
        **options,
    )


def check(
    llm: LLM, reference: Any, model_dir: Path, asked: list[list[int]], golden: AssertGolden, max_tokens: int
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    model = reference.load(model_dir)
    completions = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], sampling)
    for prompt, completion in zip(asked, completions, strict=True):
        assert len(completion.token_ids) == max_tokens
        golden(model, prompt, completion.token_ids)
    llm.manager.check_integrity()
    assert llm.manager.counts().free == llm.manager.counts().total


@pytest.mark.parametrize("core", ["cpp", "python"])
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
@pytest.mark.parametrize("typical", [None, 96])
def test_windows_reused_suspended_and_squeezed(
    name: str,
    core: str,
    typical: int | None,
    window_dir: Callable[[str], Path],
    reference: Any,
    assert_golden: AssertGolden,
    tmp_path: Path,
) -> None:
    model_dir = window_dir(name)
    asked = prompts(211)
    options: dict[str, Any] = {"kv_disk_bytes": 4 << 20, "kv_disk_dir": tmp_path, "kv_typical_tokens": typical}
    with make_engine(model_dir, core, host=4, min_partial_tokens=1, **options) as llm:
        check(llm, reference, model_dir, asked, assert_golden, 24)
        check(llm, reference, model_dir, asked[::-1], assert_golden, 8)
        counted = llm.manager.statistics()
        assert counted.reused_tokens > 0
        assert counted.evicted_blocks > 0
        if name == "gemma3":  # its groups that keep all blocks run out
            assert counted.suspensions == counted.resumptions > 0


class SlowCopier(BackgroundCopier):
    """Every copy takes longer than a step."""

    def submit(self, copies: Sequence[RowCopy]) -> Future[None]:
        self._caller.submit(lambda: time.sleep(0.03))
        return super().submit(copies)


@pytest.mark.parametrize("name", ["gemma3", "nemotron_h"])
def test_steps_go_on_while_tiers_are_slow(
    name: str,
    window_dir: Callable[[str], Path],
    reference: Any,
    assert_golden: AssertGolden,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llm_module, "BackgroundCopier", SlowCopier)
    asked = prompts(211)
    states: dict[str, Any] = {"prefix_reuse": True, "snapshot_tokens": 16, "kv_typical_tokens": 48, "blocks": 14}
    with make_engine(window_dir(name), "cpp", host=4, **(states if name == "nemotron_h" else {})) as llm:
        check(llm, reference, window_dir(name), asked, assert_golden, 24)
        check(llm, reference, window_dir(name), asked[::-1], assert_golden, 8)
        counted = llm.manager.statistics()
        assert counted.suspensions == counted.resumptions > 0
        assert counted.copied_ahead > 0
        if name == "gemma3":  # the other one's snapshots are seldom in the host tier with all blocks before them
            assert counted.restored_tokens > 0


@pytest.mark.parametrize("core", ["cpp", "python"])
@pytest.mark.parametrize(("host", "disk_nbytes"), [(4, 0), (0.2, 8 << 20)], ids=["host", "disk"])
def test_states_reused_suspended_and_squeezed(
    host: float,
    disk_nbytes: int,
    core: str,
    window_dir: Callable[[str], Path],
    reference: Any,
    assert_golden: AssertGolden,
    tmp_path: Path,
) -> None:
    """Attention beside Mamba layers: a prefix is reused from a snapshot, and a suspended request's states go with its
    blocks, to the host and where that has too little room to the disk."""
    asked = prompts(211)
    # A request of 48 tokens has two states to six blocks: two at a time, and slots for snapshots.
    options: dict[str, Any] = {"prefix_reuse": True, "snapshot_tokens": 16, "kv_typical_tokens": 48, "blocks": 14}
    if disk_nbytes:
        options |= {"kv_disk_bytes": disk_nbytes, "kv_disk_dir": tmp_path}
    with make_engine(window_dir("nemotron_h"), core, host=host, **options) as llm:
        check(llm, reference, window_dir("nemotron_h"), asked, assert_golden, 24)
        check(llm, reference, window_dir("nemotron_h"), asked[::-1], assert_golden, 8)
        counted = llm.manager.statistics()
        assert counted.reused_tokens > 0
        assert counted.evicted_blocks > 0
        assert counted.suspensions == counted.resumptions > 0
        if disk_nbytes:  # two blocks of host memory hold no request
            assert llm.manager.tier_counts()[0].total == 2 + 2 * 2


@pytest.mark.parametrize("core", ["cpp", "python"])
def test_smollm2_through_every_tier(
    core: str, smollm2_dir: Path, reference: Any, assert_golden: AssertGolden, tmp_path: Path
) -> None:
    asked = prompts(40_000)
    options: dict[str, Any] = {"kv_disk_bytes": 64 << 20, "kv_disk_dir": tmp_path, "min_partial_tokens": 4}
    with make_engine(smollm2_dir, core, blocks=14, host=0.5, **options) as llm:
        for _ in range(2):
            check(llm, reference, smollm2_dir, asked, assert_golden, 20)
        counted = llm.manager.statistics()
        assert counted.suspensions == counted.resumptions > 0
        assert counted.evicted_blocks > 0
        assert counted.restored_tokens > 0
        host, disk = llm.manager.tier_counts()
        assert host.parked == 0
        assert disk.kept > 0

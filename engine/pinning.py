"""Which cores a rank's compute threads run on, where they are to stay."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

logger = logging.getLogger(__name__)


def cores_of(first: int, threads: int, allowed: Sequence[int]) -> tuple[int, ...]:
    """`threads` of the `allowed` cores, from place `first` on and round the end. Empty where that leaves no choice."""
    if threads >= len(allowed):
        return ()
    return tuple(allowed[(first + i) % len(allowed)] for i in range(threads))


def pin_this_thread(first: int | None, threads: int) -> tuple[int, ...]:
    """Binds the calling thread, and those it will start, to `threads` cores of what it may use; see `cores_of`. OpenMP
    makes the calling thread's team at its first parallel loop: call before that. first: None leaves all as it is.
    Returns the cores; empty where nothing was changed."""
    if first is None or not hasattr(os, "sched_setaffinity"):
        return ()
    cores = cores_of(first, threads, sorted(os.sched_getaffinity(0)))
    if cores:
        os.sched_setaffinity(0, cores)
        logger.info("compute threads are bound to cores %s", ", ".join(map(str, cores)))
    return cores

"""Who copies slots between the pools and host memory while the engine goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.kvcache.caller import Caller
from kvferry.kvcache.slot_copies import copy_slots, stretches


@dataclass(frozen=True, slots=True, eq=False)
class RowCopy:
    """Row sources[i] of `source` becomes row to[i] of `target`; uint8 [slots, slot_nbytes], of any devices."""

    target: torch.Tensor
    to: Sequence[int]
    source: torch.Tensor
    sources: Sequence[int]

    @property
    def nbytes(self) -> int:
        return len(self.to) * self.target.shape[1]

    def make(self) -> None:
        copy_slots(self.target, self.to, self.source, self.sources)


class Copier(ABC):
    """Makes copies in the order in which they were submitted. Nobody writes the rows of either side meanwhile, or
    nobody uses the result."""

    @abstractmethod
    def submit(self, copies: Sequence[RowCopy]) -> Future[None]:
        """Returns at once. What was written to the sources before is copied; done when the targets may be read."""

    @abstractmethod
    def close(self) -> None:
        """Nothing is submitted any more. Does not wait for what was."""


class BackgroundCopier(Copier):
    """Copies on one thread of its own, outside the GIL; where a side is in a GPU's memory, on a stream of its own."""

    def __init__(self, device: str) -> None:
        """device: of the pools."""
        self._caller = Caller("kv-copier")
        self._make: Callable[[Sequence[RowCopy]], Callable[[], None]] = _in_host_memory
        if torch.device(device).type == "cuda":
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._make = lambda copies: _on_stream(copies, stream)

    def submit(self, copies: Sequence[RowCopy]) -> Future[None]:
        return self._caller.submit(self._make(copies))

    def close(self) -> None:
        self._caller.close()


def _in_host_memory(copies: Sequence[RowCopy]) -> Callable[[], None]:
    """By numpy, because torch would share each copy among as many threads as the forward pass has, and delay that."""

    def make() -> None:
        for copy in copies:
            target, source = copy.target.numpy(), copy.source.numpy()
            for first, other, count in stretches(copy.to, copy.sources):
                np.copyto(target[first : first + count], source[other : other + count])

    return make


def _on_stream(copies: Sequence[RowCopy], stream: torch.cuda.Stream) -> Callable[[], None]:
    """Behind everything that the calling thread has queued on its own stream so far."""
    queued = torch.cuda.current_stream(stream.device).record_event()

    def make() -> None:
        with torch.cuda.stream(stream):
            stream.wait_event(queued)
            for copy in copies:
                for first, other, count in stretches(copy.to, copy.sources):
                    copy.target[first : first + count].copy_(copy.source[other : other + count], non_blocking=True)
        stream.synchronize()

    return make

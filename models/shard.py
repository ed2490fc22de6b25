"""Which part of a model one rank of a worker holds."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core import ConfigError

TENSOR_SETTING = "engine.tensor_parallel"
PIPELINE_SETTING = "engine.pipeline_parallel"


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of one rank among the tp_size x pp_size ranks of a worker.

    Ranks of one pipeline stage hold the same layers and divide each of them; stages follow one another. Rank 0 is the
    first of the first stage. Raises ConfigError for a place that does not exist.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for size, setting in ((self.tp_size, TENSOR_SETTING), (self.pp_size, PIPELINE_SETTING)):
            if size < 1:
                raise ConfigError(f"{setting} must be at least 1, got {size}", field=setting)
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            raise ConfigError(f"no such rank: {self}", field=TENSOR_SETTING)

    @classmethod
    def of_rank(cls, rank: int, tp_size: int, pp_size: int) -> Shard:
        return cls(rank % tp_size, tp_size, rank // tp_size, pp_size)

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        """Ranks of the worker."""
        return self.tp_size * self.pp_size

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def layers(self, total: int) -> range:
        """The layers of this stage. The first stages get what does not divide evenly: the last has the head too.

        Raises ConfigError when there are more stages than layers."""
        if self.pp_size > total:
            raise ConfigError(
                f"{PIPELINE_SETTING} is {self.pp_size}, but the model has {total} layers", field=PIPELINE_SETTING
            )
        each, more = divmod(total, self.pp_size)
        start = self.pp_rank * each + min(self.pp_rank, more)
        return range(start, start + each + (self.pp_rank < more))

    def rows(self, total: int) -> range:
        """This rank's share of `total` rows, as even as it can be."""
        return range(self.tp_rank * total // self.tp_size, (self.tp_rank + 1) * total // self.tp_size)


WHOLE = Shard()
"""A worker of one rank."""

"""One aggregated worker: batching, the step (forward, sample), attention and linear operators per device, `LLM`."""

from kvferry.engine.connectors import open_connector
from kvferry.engine.follower import Follower, run_rank
from kvferry.engine.generation import DecodeSequence, GenerationScheduler, Granted, KVLoader, LoadOutcome
from kvferry.engine.kernels import Kernels
from kvferry.engine.linear import linear_factory
from kvferry.engine.llm import LLM, BeamCompletion, BeamSequence, Completion
from kvferry.engine.rank_group import RankLostError
from kvferry.engine.rank_leader import RankCommand, RankLeader, rank_device, rank_layouts
from kvferry.engine.rank_pipe import Message, ParentPipe
from kvferry.engine.runner import Chunk, ModelRunner
from kvferry.engine.sampler import Sampled
from kvferry.engine.scheduler import BatchScheduler, Emit
from kvferry.engine.sequence import Sequence
from kvferry.engine.settings import KV_DTYPES, EngineSettings
from kvferry.engine.thread import EngineThread, EventStream
from kvferry.engine.worker import EngineHost, EngineState, abort

__all__ = [
    "KV_DTYPES",
    "LLM",
    "BatchScheduler",
    "BeamCompletion",
    "BeamSequence",
    "Chunk",
    "Completion",
    "DecodeSequence",
    "Emit",
    "EngineHost",
    "EngineSettings",
    "EngineState",
    "EngineThread",
    "EventStream",
    "Follower",
    "GenerationScheduler",
    "Granted",
    "KVLoader",
    "Kernels",
    "LoadOutcome",
    "Message",
    "ModelRunner",
    "ParentPipe",
    "RankCommand",
    "RankLeader",
    "RankLostError",
    "Sampled",
    "Sequence",
    "abort",
    "linear_factory",
    "open_connector",
    "rank_device",
    "rank_layouts",
    "run_rank",
]

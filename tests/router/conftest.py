"""A real router in this process, and fake workers: real gRPC servers whose tokens and faults are scripted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvferry.core import (
    AuxRecord,
    FinishReason,
    HandOffPart,
    KVFerryError,
    ModelLimits,
    OutputDelta,
    PeerAddress,
    Resolution,
    Source,
    Timings,
    TokenLogprob,
    Usage,
    WorkerRequest,
    codec,
)
from kvferry.proto import admin_pb2, generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvferry.router import RouterAddresses, RouterSettings, serve_router
from kvferry.text import OutputText, Tokenizer

LIMITS = ModelLimits(vocab_size=300, max_context_tokens=200)
HEARTBEAT_S = 0.05
LOST_AFTER_S = 0.6
KV_NBYTES = 4096
RESOLUTION = Resolution("LlamaForCausalLM", "NIXL", "PYTHON", Source.MODEL, "V2", Source.MODEL, "a test")
ALONE = Resolution("LlamaForCausalLM", "NONE", None, None, "V2", Source.MODEL, "a test")

Hook = Callable[[WorkerRequest, int], Awaitable[None]]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps"], trainer)
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}>")
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


class Script:
    """What the fake model says: a pure function of prompt length and position, so every replay must agree."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode("the quick 😀 brown fox – jumps. ")

    def token(self, request: WorkerRequest, position: int) -> int:
        return self.tokens(len(request.prompt_token_ids), position + 1)[-1]

    def tokens(self, prompt_tokens: int, number: int) -> list[int]:
        start = prompt_tokens - 5  # most tests' prompts have five tokens: theirs starts with a whole character
        return [self._ids[(start + position) % len(self._ids)] for position in range(number)]

    def text(self, prompt_tokens: int, number: int) -> str:
        return self._tokenizer.decode(self.tokens(prompt_tokens, number))


@pytest.fixture(scope="session")
def script(tokenizer: Tokenizer) -> Script:
    return Script(tokenizer)


async def _no_fault(request: WorkerRequest, position: int) -> None:
    """Called before each token; a test's own raises, waits or kills."""


@dataclass
class FakeWorker(worker_pb2_grpc.PrefillServicer, worker_pb2_grpc.DecodeServicer, worker_pb2_grpc.WorkerServicer):
    name: str
    role: str
    tokenizer: Tokenizer
    script: Script
    incarnation: str = ""
    resolution: Resolution = RESOLUTION
    state: str = "ready"
    max_batch: int = 8
    on_prefill: Hook = _no_fault
    on_decode: Hook = _no_fault
    on_reserve: Hook = _no_fault
    prefill_finish: FinishReason | None = None
    requests: list[WorkerRequest] = field(default_factory=list)
    handles: list[bytes] = field(default_factory=list)
    reserved: list[WorkerRequest] = field(default_factory=list)
    writers: list[PeerAddress] = field(default_factory=list)
    granting: bytes | None = None
    grants: list[bytes] = field(default_factory=list)
    parts: list[HandOffPart] = field(default_factory=list)
    released: list[bytes] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)
    refuses: str = ""
    paused: bool = False
    port: int = 0
    endpoint: str = ""

    async def start(self, router: str) -> None:
        self.incarnation = self.incarnation or f"{self.name}-1"
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_PrefillServicer_to_server(self, self._server)
        worker_pb2_grpc.add_DecodeServicer_to_server(self, self._server)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.endpoint = f"127.0.0.1:{self.port}"
        await self._server.start()
        self._membership = asyncio.create_task(self._stay_joined(router))

    async def stop(self) -> None:
        """As a killed process ends: no goodbye, every connection dropped."""
        self._membership.cancel()
        with suppress(asyncio.CancelledError):
            await self._membership
        await self._server.stop(None)

    # -- membership -------------------------------------------------------------------------------------

    def report(self) -> worker_pb2.WorkerReport:
        status = admin_pb2.WorkerStatus(
            name=self.name,
            role=self.role,
            state=self.state,
            pid=4711,
            incarnation=self.incarnation,
            endpoint=self.endpoint,
            resolution=codec.resolution_to_wire(self.resolution),
            max_batch=self.max_batch,
            blocks=admin_pb2.BlockCounts(total=100, free=90, cached=30),
            cache=admin_pb2.CacheStatistics(prompt_tokens=50, reused_tokens=20, evicted_blocks=7, suspensions=2),
            tiers=[admin_pb2.TierCounts(tier="host", total=10, free=3, kept=5, parked=2)],
            ranks=[admin_pb2.RankStatus(rank=n, tp_rank=n, pp_rank=0, pid=4711 + n) for n in range(2)],
        )
        errors = dict.fromkeys(self.peers, self.refuses) if self.refuses else {}
        ready = [] if self.refuses else sorted(self.peers)
        return worker_pb2.WorkerReport(
            status=status, model_fingerprint="m", kv_dtype="float32", peers_ready=ready, peer_errors=errors
        )

    async def _reports(self) -> AsyncIterator[worker_pb2.WorkerReport]:
        while True:
            if not self.paused:
                yield self.report()
            await asyncio.sleep(HEARTBEAT_S)

    async def _stay_joined(self, router: str) -> None:
        async with grpc.aio.insecure_channel(router) as channel:
            while True:
                with suppress(grpc.aio.AioRpcError):
                    async for view in worker_pb2_grpc.PoolStub(channel).Join(self._reports()):
                        if self.role == "decode":
                            self.peers = {peer.endpoint for peer in view.prefill}
                await asyncio.sleep(HEARTBEAT_S)

    # -- the services -----------------------------------------------------------------------------------

    async def Release(self, wire: worker_pb2.ReleaseRequest, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        self.released.append(wire.handle)
        return worker_pb2.ReleaseReply(found=True)

    async def Abandon(self, wire: worker_pb2.AbandonRequest, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        self.abandoned.append(wire.request_id)
        return worker_pb2.AbandonReply()

    async def Drain(self, wire: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: N802
        self.state = "draining"
        return self.report().status

    async def _abort(self, context: grpc.aio.ServicerContext, error: KVFerryError, request_id: str) -> None:
        metadata = ((codec.ERROR_METADATA_KEY, codec.error_to_wire(error, request_id)),)
        await context.abort(grpc.StatusCode[error.code.name], error.message, metadata)

    def _logprob(self, request: WorkerRequest, token_id: int) -> tuple[TokenLogprob, ...]:
        return () if request.sampling.logprobs is None else (TokenLogprob(token_id, -0.5, ((token_id, -0.5),)),)


class FakePrefill(FakeWorker):
    async def Run(self, wire: worker_pb2.WorkerRequest, context: grpc.aio.ServicerContext) -> worker_pb2.PrefillReply:  # noqa: N802
        request = codec.request_from_wire(wire)
        self.requests.append(request)
        try:
            await self.on_prefill(request, len(request.output_token_ids))
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        except KVFerryError as error:
            await self._abort(context, error, request.request_id)
        return self._reply(request)

    async def RunInParts(  # noqa: N802
        self, wire: worker_pb2.WorkerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.PrefillStep]:
        """Two parts, of two and four tokens, and the reply."""
        request = codec.request_from_wire(wire)
        self.requests.append(request)
        self.grants.append(wire.grant)
        try:
            for stop in () if wire.grant else (2, 4):
                part = HandOffPart(f"{self.incarnation}/{request.request_id}/{stop}".encode(), stop)
                yield worker_pb2.PrefillStep(part=codec.part_to_wire(part))
            await self.on_prefill(request, len(request.output_token_ids))
            reply = self._reply(request)
            if wire.grant:
                reply.handle, reply.pushed = b"", True
            yield worker_pb2.PrefillStep(reply=reply)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        except KVFerryError as error:
            await self._abort(context, error, request.request_id)

    def _reply(self, request: WorkerRequest) -> worker_pb2.PrefillReply:
        position = len(request.output_token_ids)
        token_id = self.script.token(request, position)
        finish = self.prefill_finish
        if finish is None and position + 1 == request.sampling.max_tokens:
            finish = FinishReason.LENGTH
        text = OutputText(self.tokenizer, (), request.output_token_ids, request.sent_text_chars)
        logprobs = self._logprob(request, token_id)
        aux = AuxRecord(token_id, logprobs[0] if logprobs else None, Usage(0, 1, 3), Timings(queue_ms=1, prefill_ms=2))
        said = text.push([token_id]) + (text.flush() if finish else "")
        handle = b"" if finish else f"{self.incarnation}/{request.request_id}".encode()
        return worker_pb2.PrefillReply(
            aux=codec.aux_to_wire(aux), finish_reason=codec.finish_to_wire(finish), handle=handle, text=said
        )


class FakeDecode(FakeWorker):
    """Also the aggregated worker: without a handle it computes the prompt itself."""

    async def Run(  # noqa: N802
        self, wire: worker_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.DecodeReply]:
        async for reply in self._replies(wire, context):
            yield reply

    async def RunReserved(  # noqa: N802
        self, steps: AsyncIterator[worker_pb2.DecodeStep], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.DecodeReply]:
        reserve = (await anext(steps)).reserve
        reserved = codec.request_from_wire(reserve.request)
        self.reserved.append(reserved)
        try:
            await self.on_reserve(reserved, len(reserved.output_token_ids))
            if reserve.HasField("writer"):
                self.writers.append(codec.address_from_wire(reserve.writer))
                if self.granting is not None:
                    yield worker_pb2.DecodeReply(grant=self.granting)
            async for step in steps:
                if step.HasField("part"):
                    self.parts.append(codec.part_from_wire(step.part))
                    continue
                async for reply in self._replies(step.start, context):
                    yield reply
                return
            self.cancelled.append(reserved.request_id)  # a cancelled call has no further step
        except asyncio.CancelledError:
            self.cancelled.append(reserved.request_id)
            raise
        except KVFerryError as error:
            await self._abort(context, error, reserved.request_id)

    async def _replies(
        self, wire: worker_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.DecodeReply]:
        request = codec.request_from_wire(wire.request)
        self.requests.append(request)
        self.handles.append(wire.handle)
        text = OutputText(self.tokenizer, request.sampling.stop, request.output_token_ids, request.sent_text_chars)
        position = len(request.output_token_ids)
        try:
            finish = None
            while finish is None:
                await self.on_decode(request, position)
                token_id = self.script.token(request, position)
                position += 1
                said = text.push([token_id])
                finish = FinishReason.STOP if text.stopped else None
                if finish is None and position == request.sampling.max_tokens:
                    finish, said = FinishReason.LENGTH, said + text.flush()
                timings = Timings(queue_ms=9, prefill_ms=9, transfer_ms=3, decode_ms=4) if finish else Timings()
                usage = Usage(len(request.prompt_token_ids), position, 5)
                nbytes = KV_NBYTES if wire.handle else 0
                logprobs = self._logprob(request, token_id)
                yield codec.delta_to_wire(
                    OutputDelta(request.request_id, (token_id,), said, logprobs, finish, usage, timings, nbytes)
                )
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        except KVFerryError as error:
            await self._abort(context, error, request.request_id)


@dataclass
class Cluster:
    """The router under test and its workers."""

    settings: RouterSettings
    addresses: RouterAddresses
    channel: grpc.aio.Channel
    tokenizer: Tokenizer
    script: Script
    workers: dict[str, FakeWorker] = field(default_factory=dict)

    @property
    def stub(self) -> Any:
        return generation_pb2_grpc.GenerationStub(self.channel)

    async def add(self, name: str, **facts: Any) -> Any:
        """`name` begins with its role; returns once the router knows the worker in its state."""
        role = name.split("-", maxsplit=1)[0]
        kind = FakePrefill if role == "prefill" else FakeDecode
        if role == "aggregated":
            facts.setdefault("resolution", ALONE)
        worker = kind(name, role, self.tokenizer, self.script, **facts)
        self.workers[name] = worker
        await worker.start(self.addresses.grpc)
        await self.until(lambda status: status.get(name) == worker.state)
        return worker

    async def pair(self) -> tuple[FakeWorker, FakeWorker]:
        prefill, decode = await self.add("prefill-0"), await self.add("decode-0")
        await self.contact(decode)
        return prefill, decode

    async def contact(self, *decodes: FakeWorker) -> None:
        """Waits until the decode workers reported contact with every prefill worker."""
        wanted = sum(worker.role == "prefill" for worker in self.workers.values())
        while any(len(decode.peers) < wanted for decode in decodes):
            await asyncio.sleep(0.01)
        await asyncio.sleep(3 * HEARTBEAT_S)

    async def status(self) -> admin_pb2.StatusResponse:
        call = self.channel.unary_unary(
            "/kvferry.v1.Admin/Status",
            request_serializer=admin_pb2.StatusRequest.SerializeToString,
            response_deserializer=admin_pb2.StatusResponse.FromString,
        )
        return await call(admin_pb2.StatusRequest(), timeout=5)

    async def until(self, good: Callable[[dict[str, str]], bool], timeout_s: float = 10.0) -> None:
        """Waits until `good` holds for {worker: state}."""
        async with asyncio.timeout(timeout_s):
            while True:
                status = await self.status()
                if good({worker.name: worker.state for worker in status.workers}):
                    return
                await asyncio.sleep(0.02)

    async def until_counts(self, **wanted: int) -> None:
        """Waits until the router counts so many requests in these states."""
        async with asyncio.timeout(10):
            while True:
                counts = (await self.status()).router.requests
                if all(counts[state] == number for state, number in wanted.items()):
                    return
                await asyncio.sleep(0.02)


class HeldThreads:
    """Holds the router's tokenizing threads before every text until `go_on`; lists the lengths they went through."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.encoded: list[int] = []

    async def begun(self, number: int) -> None:
        async with asyncio.timeout(10):
            while len(self.encoded) < number:
                await asyncio.sleep(0.01)


@pytest.fixture
def held_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldThreads]:
    held, encode = HeldThreads(), Tokenizer.encode

    def slow(self: Tokenizer, text: str) -> list[int]:
        if threading.current_thread() is not threading.main_thread():
            held.encoded.append(len(text))
            held.go_on.wait(20)
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    yield held
    held.go_on.set()


MakeCluster = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def make_cluster(model_dir: Path, tokenizer: Tokenizer, script: Script) -> AsyncIterator[MakeCluster]:
    """make_cluster(**settings): a running router without workers."""
    async with AsyncExitStack() as stack:

        async def make(**changes: Any) -> Cluster:
            values: dict[str, Any] = {
                "model_name": "fake",
                "model_dir": model_dir,
                "limits": LIMITS,
                "heartbeat_s": HEARTBEAT_S,
                "lost_after_s": LOST_AFTER_S,
                "worker_wait_s": 0.5,
            }
            settings = RouterSettings(**{**values, **changes})
            ready: asyncio.Future[RouterAddresses] = asyncio.get_running_loop().create_future()
            serving = asyncio.create_task(serve_router(settings, ready.set_result))
            await asyncio.wait((ready, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            addresses = ready.result()
            stack.push_async_callback(_cancel, serving)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(addresses.grpc))
            cluster = Cluster(settings, addresses, channel, tokenizer, script)
            stack.push_async_callback(_stop_workers, cluster)
            return cluster

        yield make


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _stop_workers(cluster: Cluster) -> None:
    for worker in cluster.workers.values():
        await worker.stop()


@pytest.fixture
async def cluster(make_cluster: MakeCluster) -> Cluster:
    return await make_cluster()

"""The operator `block_follower` and its config: runs the loop in a separate thread, and connects it to the platform.

A cancel is raised in the operator's thread, at any instruction. That thread does nothing but wait, so a cancel does no
harm there; inside an event loop it would be raised in whatever callback was running.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from interlock.outbound.exchange import Request
from interlock.wire import Event
from interlock.workers.block_follower.chain import Chain
from interlock.workers.block_follower.follower import Follower
from interlock.workers.block_follower.rpc import Endpoint
from interlock.workers.block_follower.store import Producer, Store, Target, location_of
from interlock.workers.context import Placeholders, TaskContext, kept_sender
from interlock.workers.failures import BadConfig
from interlock.workers.protocol import Outbound

_Request = tuple[list[Event], "Future[None]"]


def block_follower(payload: Any, ctx: TaskContext) -> dict[str, Any]:  # noqa: ARG001 - the signature of operators
    """Follows a chain and writes its blocks, transactions and logs, forever or up to `end_block`."""
    keys = Placeholders.of(ctx)
    config = read_config(ctx.config, len(ctx.outputs), keys)
    asked = Request(config.rpc_url, headers=config.headers, bindings=keys.bindings("rpc_url", "headers"))
    targets = [
        Target(kind, output.dataset_uuid, output.dataset_version)
        for kind, output in zip(config.outputs or (), ctx.outputs, strict=True)
    ]
    last = _Bridge(ctx, asked).run(config, targets, ctx.data_url)
    return {"last_block": last, "locations": [location_of(target.dataset_version) for target in targets]}


class _Bridge:
    """The loop's `Platform`. Events go through the operator's own thread, which the context requires."""

    def __init__(self, ctx: TaskContext, asked: Request) -> None:
        self._ctx, self._asked = ctx, asked
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._outcome: Future[int] = Future()
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[int] | None = None

    # In the loop's thread

    async def emit(self, events: list[Event]) -> None:
        done: Future[None] = Future()
        self._requests.put((events, done))
        await asyncio.wrap_future(done)

    def progress(self, share: float, text: str) -> None:
        self._ctx.progress(share, text)

    @property
    def paused(self) -> bool:
        return self._ctx.paused

    # In the operator's thread

    def run(self, config: FollowerConfig, targets: Sequence[Target], data_url: str) -> int:
        producer = Producer(self._ctx.task_id, self._ctx.attempt)
        thread = threading.Thread(
            target=self._work, args=(config, targets, data_url, producer), name="block_follower", daemon=True
        )
        thread.start()
        try:
            while (request := self._requests.get()) is not None:
                self._answer(*request)
        finally:
            self._end()
            thread.join()
        return self._outcome.result()

    def _answer(self, events: list[Event], done: Future[None]) -> None:
        try:
            self._ctx.emit(events)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _end(self) -> None:
        """Cancels the loop. Has no effect if it has already ended."""
        self._stop.set()
        loop, task = self._loop, self._task
        if loop is not None and task is not None and not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    # The thread of the loop

    def _work(self, config: FollowerConfig, targets: Sequence[Target], data_url: str, producer: Producer) -> None:
        try:
            with asyncio.Runner() as runner:
                self._outcome.set_result(runner.run(self._main(config, targets, data_url, producer)))
        except BaseException as error:
            self._outcome.set_exception(error)
        finally:
            self._requests.put(None)

    async def _main(self, config: FollowerConfig, targets: Sequence[Target], data_url: str, producer: Producer) -> int:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if self._stop.is_set():
            raise asyncio.CancelledError
        async with Store.open(data_url, targets, producer) as store:
            endpoint = _endpoint(config, self._asked, self._ctx.outbound)
            try:
                follower = Follower(config, _chain(config, endpoint), store, self)
                endpoint.on_trouble = follower.trouble
                return await follower.run()
            finally:
                await endpoint.close()


def _endpoint(config: FollowerConfig, asked: Request, outbound: Outbound) -> Endpoint:
    return Endpoint(
        asked,
        kept_sender(outbound),
        timeout=config.rpc_timeout_seconds,
        patience=config.rpc_patience_seconds,
        most_calls=config.batch_size + 1,
    )


def _chain(config: FollowerConfig, endpoint: Endpoint) -> Chain:
    kinds = config.outputs or ()
    return Chain(endpoint, in_full="transactions" in kinds, with_logs="logs" in kinds, span=config.batch_size)


Kind = Literal["blocks", "transactions", "logs"]
KINDS: Final[tuple[Kind, ...]] = ("blocks", "transactions", "logs")

_OF_THE_EXCHANGE: Final = frozenset(
    {"accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "proxy-authorization"}
    | {"proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that control the connection. The HTTP client sets them, so a job must not."""

Seconds = Annotated[float, Meta(gt=0, le=3600)]
BlockNumber = Annotated[int, Meta(ge=0, le=2**53)]


class FollowerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rpc_url: str
    """http:// or https:// URL. May contain `${secret:NAME}` for a secret of the org."""
    headers: dict[str, str] = {}
    """Sent with every request. May contain `${secret:NAME}`."""
    outputs: list[Kind] | None = None
    """Kind of rows of each output of the job, in order. Unset: blocks, transactions, logs."""
    start_block: BlockNumber = 0
    end_block: BlockNumber | None = None
    """Last block to read. The follower then returns. Unset: it follows the chain forever."""
    batch_size: Annotated[int, Meta(ge=1, le=2_000)] = 50
    """Blocks per request and per write."""
    requests: Annotated[int, Meta(ge=1, le=32)] = 3
    """Concurrent requests."""
    confirmations: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Blocks that must follow a block before it is read."""
    poll_seconds: Seconds = 1.0
    """Pause between two polls of a chain without new blocks."""
    keep_hashes: Annotated[int, Meta(ge=1, le=20_000)] = 256
    """Depth in blocks of the deepest reorg that can be handled."""
    rpc_timeout_seconds: Seconds = 30.0
    """Timeout of one request."""
    rpc_patience_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 120.0
    """Time for which requests to an endpoint that does not answer are retried before the attempt fails."""


def read_config(given: Mapping[str, Any], outputs: int, keys: Placeholders) -> FollowerConfig:
    """Returns the checked config, with its secrets filled in and a kind for each output of the job."""
    try:
        config = msgspec.convert(dict(given), FollowerConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"The config of block_follower is invalid: {error}. See docs/block-follower.md.") from None
    if config.end_block is not None and config.end_block < config.start_block:
        raise BadConfig(f"end_block must be at least start_block ({config.start_block}), got {config.end_block}.")
    kinds = _kinds(config, outputs)
    url = keys.fill(config.rpc_url, "rpc_url")
    if not re.match(r"https?://[^/?#@\s]+([/?][^\s#]*)?$", url):
        raise BadConfig(
            "rpc_url must look like http://host:port/path or https://host/path, without user and password: put "
            "credentials into headers."
        )
    headers = {name: keys.fill(value, f"headers.{name}") for name, value in config.headers.items()}
    for name, value in headers.items():
        check_header(name, value)
    return msgspec.structs.replace(config, rpc_url=url, headers=headers, outputs=kinds)


def check_header(name: str, value: str) -> None:
    """Raises BadConfig if a job must not set the header or it cannot be sent."""
    if not re.fullmatch(r"[A-Za-z0-9-]+", name) or not value.isascii() or not value.isprintable():
        raise BadConfig(
            f"Header {name!r} cannot be sent: its name must consist of letters, digits and -, and its value of "
            "printable ASCII characters."
        )
    if name.lower() in _OF_THE_EXCHANGE:
        raise BadConfig(f"Header {name!r} is set by the HTTP client: remove it from the config.")


def _kinds(config: FollowerConfig, outputs: int) -> list[Kind]:
    kinds = list(KINDS) if config.outputs is None else config.outputs
    if len(kinds) != outputs or len(set(kinds)) != len(kinds) or not kinds:
        raise BadConfig(
            f"The job has {outputs} outputs and its config lists {', '.join(kinds) or 'none'}: list one kind per "
            "output, each at most once, in the order of the outputs, such as `outputs: [blocks, logs]` in the config."
        )
    return kinds

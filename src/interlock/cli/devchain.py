"""`interlock devchain`: a chain to develop against."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.conventions import Output, OutputOption, Panel, command, usage
from interlock.cli.serve import Parent, join

if TYPE_CHECKING:
    from interlock.dev.chain import Chain
    from interlock.dev.methods import Serving
    from interlock.dev.rpc import Limits

app = typer.Typer()

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):(\d{1,5})")


@command(
    app,
    "devchain",
    panel=Panel.PROCESSES,
    example="interlock devchain\ninterlock devchain --listen 127.0.0.1:0 --seed 42 --manual --output json",
)
def devchain(
    listen: Annotated[str, typer.Option(help="host:port; port 0 selects a free port.")] = "127.0.0.1:8545",
    seed: Annotated[int, typer.Option(help="Determines the whole chain: same seed, same chain.")] = 7,
    block_seconds: Annotated[
        float,
        typer.Option(min=0.001, max=86_400, help="Seconds between blocks. Chain time advances by 12 s per block."),
    ] = 1.0,
    transactions: Annotated[int, typer.Option(min=0, max=2_000, help="Mean number per block.")] = 40,
    reorg_every: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Mean number of blocks between reorgs; 0 for none.")
    ] = 50,
    max_depth: Annotated[
        int, typer.Option(min=1, max=1_000, help="Maximum number of blocks that a reorg replaces.")
    ] = 6,
    finality: Annotated[
        int,
        typer.Option(min=1, max=1_000, help="Number of blocks after which a block is final and no reorg replaces it."),
    ] = 32,
    blocks: Annotated[int, typer.Option(min=0, max=1_000_000, help="Number of blocks at the start.")] = 1_000,
    chain_id: Annotated[int, typer.Option(min=1, max=2**53 - 1, help="Result of eth_chainId.")] = 31_337,
    manual: Annotated[bool, typer.Option("--manual", help="Mine only on dev_mine.")] = False,
    forget: Annotated[bool, typer.Option("--forget-abandoned", help="Do not serve replaced blocks by hash.")] = False,
    max_log_range: Annotated[
        int, typer.Option(min=1, max=100_000, help="Maximum number of blocks in one eth_getLogs.")
    ] = 1_000,
    max_log_results: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Maximum number of logs in one eth_getLogs.")
    ] = 10_000,
    max_batch: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of calls in one batch.")] = 1_000,
    output: OutputOption = Output.TABLE,
    parent: Parent = None,
) -> None:
    """Serve a development chain: Ethereum's JSON-RPC, with blocks, ERC-20 transfers and reorgs derived from a seed.

    It stores nothing on disk and needs no key. It prints one line when it is ready; SIGTERM or Ctrl-C stops it.
    """
    join(parent)
    from interlock.dev.chain import Chain, Shape
    from interlock.dev.methods import Serving
    from interlock.dev.rpc import Limits

    if max_depth > finality:
        raise usage(
            f"--max-depth {max_depth} would replace final blocks; it must be at most --finality, which is {finality}"
        )
    shape = Shape(seed, chain_id, transactions, reorg_every, max_depth, finality)
    listener = _listening(listen)
    chain = Chain(shape, blocks=blocks)
    serving = Serving(log_range=max_log_range, log_results=max_log_results, abandoned=not forget)
    _serve(chain, listener, 0.0 if manual else block_seconds, serving, Limits(batch=max_batch), output)


def _listening(address: str) -> socket.socket:
    from interlock.http.listener import bind

    parts = _ADDRESS.fullmatch(address)
    if parts is None or int(parts[2]) > 65_535:
        raise usage(f"--listen {address!r}: write host:port, such as 127.0.0.1:8545")
    return bind(address, setting="listen")


def _serve(
    chain: Chain, listener: socket.socket, seconds: float, serving: Serving, limits: Limits, output: Output
) -> None:
    import uvloop

    from interlock.dev.server import serve
    from interlock.telemetry import configure

    configure("warning", process="devchain")
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def announce() -> None:
        sys.stdout.write(_line(chain, url, seconds, output) + "\n")
        sys.stdout.flush()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(chain, listener, seconds=seconds, serving=serving, limits=limits, on_ready=announce))


def _line(chain: Chain, url: str, seconds: float, output: Output) -> str:
    if output is Output.JSON:
        import msgspec

        head = {"number": chain.head.number, "hash": chain.head.hash}
        ready = {"url": url, "chain_id": chain.shape.chain_id, "seed": chain.shape.seed, "head": head}
        return msgspec.json.encode(ready | {"block_seconds": seconds}).decode()
    pace = f"a block every {seconds:g} s" if seconds else "blocks on dev_mine"
    return f"{url}  chain {chain.shape.chain_id}  head {chain.head.number} ({chain.head.hash[:10]}…)  {pace}"

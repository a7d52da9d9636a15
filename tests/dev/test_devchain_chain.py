"""The development chain as a model: properties derived from the seed, and invariants under mining and reorgs."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.dev.blocks import ZERO_HASH
from interlock.dev.chain import Chain, Shape
from interlock.dev.contents import (
    APPROVAL,
    SECONDS_PER_BLOCK,
    TRANSFER,
    Contents,
    Header,
    transaction_hash,
    transaction_place,
)
from interlock.errors import ConfigurationError

Step = tuple[str, int]

steps = st.lists(st.tuples(st.sampled_from(["mine", "reorg"]), st.integers(1, 12)), max_size=12)
shapes = st.builds(
    Shape,
    seed=st.integers(-(2**70), 2**70),
    chain_id=st.integers(1, 2**53 - 1),
    transactions=st.integers(0, 12),
    reorg_every=st.integers(0, 8),
    max_depth=st.integers(1, 5),
    finality=st.integers(5, 12),
)


def take(chain: Chain, step: Step) -> int:
    """Executes the step as far as the chain allows. Returns the number of blocks that it should replace."""
    name, number = step
    if name == "mine":
        chain.mine(number)
        return 0
    depth = min(number, chain.deepest_reorg)
    chain.reorg(depth)
    return depth


def canonical(chain: Chain) -> list[Header]:
    return list(chain.between(0, chain.head.number))


def written(chain: Chain) -> bytes:
    every = [chain.contents(header) for header in canonical(chain)]
    return msgspec.json.encode([(each.in_full(), each.block, each.receipts(), each.logs) for each in every])


def document(contents: Contents) -> Any:
    return msgspec.json.decode(msgspec.json.encode([contents.in_full(), contents.block, contents.receipts()]))


# Properties derived from the seed


@given(shapes, steps)
@settings(max_examples=25, deadline=None)
def test_same_shape_and_steps_give_the_same_chain_byte_for_byte(shape: Shape, taken: list[Step]) -> None:
    one, other = Chain(shape, blocks=10), Chain(shape)
    other.mine(4)
    other.mine(6)
    for step in taken:
        take(one, step)
        one.contents(one.head)  # the time of generation must not matter
        take(other, step)
    assert written(one) == written(other)


def test_chain_of_a_seed_is_the_same_on_every_machine_and_version() -> None:
    """A new digest changes recorded answers of users: mention it in the changelog."""
    digest = hashlib.sha256(written(Chain(Shape(seed=7), blocks=120))).hexdigest()
    assert digest == "1605a7cacb5839eadbcfe74841e2348ed6fc463085bcbbe46f2b2f11af20cd17"


@given(shapes, st.sampled_from(["seed", "chain_id", "transactions", "reorg_every", "max_depth", "finality"]))
@settings(max_examples=25, deadline=None)
def test_chains_of_different_shapes_share_no_block(shape: Shape, field: str) -> None:
    fields = {name: getattr(shape, name) for name in Shape.__slots__}
    step = -1 if field in ("chain_id", "max_depth") and fields[field] > 1 else 1  # stays within the limits of each
    other = Shape(**fields | {field: fields[field] + step})
    hashes = {header.hash for header in canonical(Chain(shape, blocks=5))}
    assert hashes.isdisjoint(header.hash for header in canonical(Chain(other, blocks=5)))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"max_depth": 33}, "max_depth is 33; write a number from 1 to 32"),
        ({"max_depth": 0}, "max_depth is 0"),
        ({"transactions": 2_001}, "from 0 to 2000"),
        ({"transactions": -1}, "transactions is -1"),
        ({"reorg_every": -1}, "reorg_every is -1"),
        ({"finality": 0}, "finality is 0"),
        ({"chain_id": 0}, "chain_id is 0"),
    ],
    ids=str,
)
def test_invalid_shape_error_has_the_allowed_range(wrong: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Shape(**wrong)


# Mining and reorgs


@given(shapes, steps)
@settings(max_examples=30, deadline=None)
def test_parents_hashes_and_finality_hold_through_any_mining_and_reorgs(shape: Shape, taken: list[Step]) -> None:
    chain = Chain(shape, blocks=6)
    for step in taken:
        before, final = canonical(chain), chain.finalized
        asked = take(chain, step)
        after = canonical(chain)
        assert after[: final.number + 1] == before[: final.number + 1]
        assert len(after) == len(before) + (step[1] if step[0] == "mine" else 0)
        assert not set(after[len(before) - asked :]) & set(before)
        check_links(chain)


def check_links(chain: Chain) -> None:
    headers = canonical(chain)
    assert [header.number for header in headers] == list(range(len(headers)))
    assert [header.parent for header in headers] == [ZERO_HASH, *(header.hash for header in headers[:-1])]
    blocks = [chain.contents(header).block for header in headers]
    assert [(block.hash, block.parent_hash) for block in blocks] == [(each.hash, each.parent) for each in headers]
    times = [int(block.timestamp, 16) for block in blocks]
    assert all(earlier < later for earlier, later in pairwise(times))
    assert chain.finalized.number <= chain.safe.number <= chain.head.number
    assert all(chain.is_canonical(header) and chain.by_hash(header.hash) is header for header in headers)


@given(st.integers(0, 1_000), st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_replaced_block_has_new_hash_and_transactions_and_is_still_found_by_hash(seed: int, depth: int) -> None:
    chain = Chain(Shape(seed=seed, reorg_every=0), blocks=20)
    before = canonical(chain)
    chain.reorg(depth)
    for old, new in zip(before[-depth:], canonical(chain)[-depth:], strict=True):
        assert chain.by_hash(old.hash) is old
        assert not chain.is_canonical(old)
        gone, there = chain.contents(old), chain.contents(new)
        assert gone.block.parent_hash == old.parent
        hashes = set(there.block.transactions)
        assert hashes.isdisjoint(gone.block.transactions)
        assert all(chain.find_transaction(each.hash) is None for each in gone.transactions)


def test_reorg_of_a_final_block_is_refused_and_changes_nothing() -> None:
    chain = Chain(Shape(finality=8, reorg_every=0), blocks=20)
    before = canonical(chain)
    for depth in (9, 100, -1):
        with pytest.raises(ValueError, match="at most 8"):
            chain.reorg(depth)
    assert canonical(chain) == before
    assert Chain(Shape(), blocks=0).deepest_reorg == 0


def observed_reorgs(shape: Shape, blocks: int) -> Iterator[int]:
    """Yields how many blocks each mined block replaced, if any."""
    chain = Chain(shape)
    for _ in range(blocks):
        before = canonical(chain)
        chain.mine()
        replaced = sum(not chain.is_canonical(header) for header in before)
        if replaced:
            yield replaced


def test_seed_reorgs_match_configured_frequency_and_depth() -> None:
    depths = list(observed_reorgs(Shape(seed=11, reorg_every=10, max_depth=4), 1_000))
    assert 70 <= len(depths) <= 130
    assert set(depths) == {1, 2, 3, 4}
    assert list(observed_reorgs(Shape(seed=11, reorg_every=0), 200)) == []


def test_no_seed_reorg_replaces_a_safe_block() -> None:
    chain = Chain(Shape(seed=3, reorg_every=2, max_depth=5))
    for _ in range(300):
        safe = chain.safe
        chain.mine()
        assert chain.is_canonical(safe)


def test_evicted_blocks_are_regenerated_identically() -> None:
    chain = Chain(Shape(transactions=1), blocks=2_500)
    first = msgspec.json.encode(chain.contents(canonical(chain)[1]))
    for header in canonical(chain):
        chain.contents(header)
    assert msgspec.json.encode(chain.contents(canonical(chain)[1])) == first


# Contents of a block

QUANTITY = re.compile(r"0x(0|[1-9a-f][0-9a-f]*)")
DATA = re.compile(r"0x([0-9a-f]{2})*")
BYTES = {
    "hash": 32,
    "parentHash": 32,
    "blockHash": 32,
    "transactionHash": 32,
    "transactionsRoot": 32,
    "receiptsRoot": 32,
    "stateRoot": 32,
    "mixHash": 32,
    "sha3Uncles": 32,
    "address": 20,
    "miner": 20,
    "from": 20,
    "to": 20,
    "logsBloom": 256,
    "nonce": 8,
    "input": None,
    "data": None,
    "extraData": None,
}
"""Length of data by field; other fields are quantities."""


def fields(value: Any, name: str = "", inside: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields (object, field, text) of every string in a document."""
    if isinstance(value, dict):
        kind = "block" if "parentHash" in value else "other"
        for key, child in value.items():
            yield from fields(child, key, kind)
    elif isinstance(value, list):
        for child in value:
            yield from fields(child, name, inside)
    elif isinstance(value, str):
        yield inside, name, value


def is_encoded(inside: str, name: str, text: str) -> bool:
    if name in ("topics", "transactions"):
        return DATA.fullmatch(text) is not None and len(text) == 66
    if name in BYTES and not (name == "nonce" and inside == "other"):
        length = BYTES[name]
        return DATA.fullmatch(text) is not None and (length is None or len(text) == 2 + 2 * length)
    return QUANTITY.fullmatch(text) is not None


@given(st.integers())
@settings(max_examples=15, deadline=None)
def test_every_field_is_encoded_as_ethereum_does(seed: int) -> None:
    chain = Chain(Shape(seed=seed), blocks=8)
    for header in canonical(chain):
        texts = list(fields(document(chain.contents(header)), "transactions"))
        assert [each for each in texts if not is_encoded(*each)] == []


@given(st.integers())
@settings(max_examples=15, deadline=None)
def test_transactions_receipts_and_logs_of_a_block_agree(seed: int) -> None:
    chain = Chain(Shape(seed=seed), blocks=8)
    for header in canonical(chain):
        contents = chain.contents(header)
        receipts = contents.receipts()
        assert [each.hash for each in contents.transactions] == list(contents.block.transactions)
        assert [each.transaction_hash for each in receipts] == list(contents.block.transactions)
        assert [log for each in receipts for log in each.logs] == list(contents.logs)
        assert [int(log.log_index, 16) for log in contents.logs] == list(range(len(contents.logs)))
        assert all(log.transaction_hash == each.transaction_hash for each in receipts for log in each.logs)
        assert int(contents.block.gas_used, 16) == sum(int(each.gas_used, 16) for each in receipts)
        assert int(contents.block.gas_used, 16) <= int(contents.block.gas_limit, 16)
        assert all(each.logs == () for each in receipts if each.status == "0x0")
        for index, transaction in enumerate(contents.transactions):
            assert int(transaction.gas, 16) >= int(receipts[index].gas_used, 16)
            assert int(transaction.max_fee_per_gas, 16) >= int(transaction.gas_price, 16)
            assert chain.find_transaction(transaction.hash) == (contents, index)


@given(st.integers(0, 2**24 - 1), st.integers(0, 2**28 - 1), st.integers(0, 2**12 - 1), st.binary(min_size=24))
def test_hash_encodes_the_position_of_its_transaction(number: int, branch: int, index: int, drawn: bytes) -> None:
    assert transaction_place(transaction_hash(number, branch, index, drawn[:24].hex())) == (number, branch, index)


@given(st.binary(min_size=32, max_size=32))
def test_unknown_hash_finds_no_transaction(drawn: bytes) -> None:
    assert SMALL.find_transaction("0x" + drawn.hex()) is None


SMALL = Chain(Shape(transactions=1), blocks=3)


def test_hash_with_valid_position_and_wrong_rest_finds_no_transaction() -> None:
    chain = Chain(Shape(reorg_every=0), blocks=3)
    for index in (0, 4_000):
        assert chain.find_transaction(transaction_hash(2, 0, index, "0" * 48)) is None


def test_genesis_block_is_empty_and_time_advances_12_seconds_per_block() -> None:
    chain = Chain(Shape(), blocks=300)
    first, last = chain.contents(canonical(chain)[0]).block, chain.contents(chain.head).block
    assert (first.transactions, first.timestamp) == ((), "0x65920080")
    passed = int(last.timestamp, 16) - int(first.timestamp, 16)
    assert 300 * SECONDS_PER_BLOCK <= passed < 301 * SECONDS_PER_BLOCK


def test_traffic_is_skewed_and_mostly_erc20_transfers() -> None:
    chain = Chain(Shape(), blocks=300)
    every = [chain.contents(header) for header in canonical(chain)]
    logs = [log for contents in every for log in contents.logs]
    transfers = [log for log in logs if log.topics[0] == TRANSFER and len(log.topics) == 3]
    collectibles = [log for log in logs if log.topics[0] == TRANSFER and len(log.topics) == 4]
    approvals = [log for log in logs if log.topics[0] == APPROVAL]
    assert len(transfers) > 0.85 * len(logs)
    assert collectibles
    assert approvals
    assert len(transfers) + len(collectibles) + len(approvals) == len(logs)
    assert all(len(log.data) == 66 and int(log.data, 16) > 0 for log in transfers)
    assert all(log.data == "0x" for log in collectibles)
    assert max(int(log.data, 16) for log in transfers) > 2**64
    by_token = Counter(log.address for log in transfers)
    assert set(by_token) <= set(chain.tokens())
    assert len(by_token) > 50
    assert sum(count for _, count in by_token.most_common(5)) > 0.4 * len(transfers)
    assert by_token.most_common(1)[0][0] == chain.tokens()[0]
    assert any(contents.block.transactions == () for contents in every[1:])
    assert 36 < sum(len(contents.transactions) for contents in every) / 300 < 44


def test_block_may_have_many_transactions_or_none() -> None:
    crowded = Chain(Shape(transactions=2_000), blocks=2)
    assert len(crowded.contents(crowded.head).transactions) >= 1_000
    quiet = Chain(Shape(transactions=0), blocks=50)
    assert all(quiet.contents(header).transactions == () for header in canonical(quiet))

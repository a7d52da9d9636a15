"""erc20_transfers against a model in plain Python."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.dev.chain import Chain, Shape
from interlock.spark.built_in.erc20_transfers import TRANSFER, erc20_transfers
from interlock.spark.testing import run
from interlock.workers.failures import BadConfig
from tests.support.dev_chain import expected_rows

pytestmark = pytest.mark.usefixtures("spark")

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LARGEST = 2**256 - 1


def word(number: int) -> str:
    return f"0x{number:064x}"


def log(index: int, **more: Any) -> dict[str, Any]:
    common = {
        "block_number": index,
        "log_index": index % 7,
        "block_hash": word(index),
        "block_timestamp": NOON,
        "transaction_hash": word(index + 1),
        "transaction_index": 3,
        "address": "0x" + "Ab" * 20,
        "topic0": TRANSFER,
        "topic1": word(1),
        "topic2": word(2),
        "topic3": None,
        "data": word(index),
    }
    return common | more


def modelled(one: dict[str, Any]) -> dict[str, Any] | None:
    words = [one["topic1"], one["topic2"], one["data"]]
    if one["topic0"].lower() != TRANSFER or one["topic3"] is not None or any(not is_word(text) for text in words):
        return None
    amount = int(one["data"], 16)
    kept = ("block_number", "log_index", "block_hash", "block_timestamp", "transaction_hash", "transaction_index")
    return {name: one[name] for name in kept} | {
        "token": one["address"].lower(),
        "from_address": "0x" + one["topic1"][-40:].lower(),
        "to_address": "0x" + one["topic2"][-40:].lower(),
        "value": Decimal(amount) if amount < 10**38 else None,
        "value_text": str(amount),
    }


def is_word(text: str | None) -> bool:
    return text is not None and len(text) == 66 and all(digit in "0123456789abcdefABCDEF" for digit in text[2:])


numbers = st.one_of(
    st.integers(0, LARGEST),
    st.sampled_from([0, 1, 10**38 - 1, 10**38, 2**64 - 1, 2**64, 2**128 - 1, LARGEST]),
)
words = numbers.map(word)
odd = st.sampled_from(["0x", "0x01", word(1) + word(2), "0x" + "g" * 64, word(7).upper().replace("X", "x")])
topics = st.one_of(words, words, st.none(), odd)
logs = st.fixed_dictionaries(
    {
        "topic0": st.sampled_from([TRANSFER, TRANSFER, TRANSFER, "0x" + TRANSFER[2:].upper(), word(5)]),
        "topic1": topics,
        "topic2": topics,
        "topic3": st.one_of(st.none(), st.none(), words),
        "data": st.one_of(words, words, words, odd),
    }
)


@settings(max_examples=3, deadline=None)
@given(st.lists(logs, min_size=50, max_size=200))
def test_transfers_equal_the_model(drawn: list[dict[str, Any]]) -> None:
    given_logs = [log(index, **one) for index, one in enumerate(drawn)]
    result = run(erc20_transfers, logs=given_logs, scope=(0, len(drawn)))
    wanted = [row for one in given_logs if (row := modelled(one)) is not None]
    assert sorted(result.rows, key=lambda row: row["block_number"]) == wanted


def test_transfers_of_a_chain_are_found_and_filtered_by_token() -> None:
    rows = expected_rows(Chain(Shape(seed=3, transactions=20, reorg_every=0), blocks=20), 0, 20)["logs"]
    wanted = [row for one in rows if (row := modelled(one)) is not None]
    assert len(wanted) > 10
    result = run(erc20_transfers, logs=rows)
    assert sorted(result.rows, key=place) == sorted(wanted, key=place)
    token = wanted[0]["token"]
    chosen = run(erc20_transfers, logs=rows, config={"tokens": [token.upper().replace("X", "x")]}).rows
    assert sorted(chosen, key=place) == sorted((row for row in wanted if row["token"] == token), key=place)


def place(row: dict[str, Any]) -> tuple[int, int]:
    return row["block_number"], row["log_index"]


def test_unknown_config_field_is_refused() -> None:
    with pytest.raises(BadConfig, match="unknown field `token`"):
        run(erc20_transfers, logs=[], config={"token": "0x"})

"""Messages of a batch, read and decided together, compared with single messages."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from interlock.bus.metrics import CACHE_EXPIRED, CACHE_FRESH, CACHE_STALE
from interlock.bus.model import Decision, Key, Kind
from interlock.bus.path.bulk_verification import read_together
from interlock.bus.path.fast_stage import Fast
from interlock.bus.path.verification import Notice, Shield
from interlock.wire.bus_registry import DispatchMode
from interlock.wire.commands import MESSAGE_LIMIT, BadMessage, Envelope, read
from tests.bus.decision_model import World
from tests.bus.test_canonical import values
from tests.bus.test_decisions import NOW, admitted, memory_of, message_of, resolved, worlds
from tests.support.signed_commands import SECRET, SOURCE, signed

_plain = st.builds(
    lambda payload, target, spaced: _written(signed(NOW, payload=payload, target=target), spaced=spaced),
    st.dictionaries(
        st.sampled_from(["a", "b:c", "ü"]), st.integers(-99, 99) | st.sampled_from(["x", "a:b", 1.5, None])
    ),
    st.sampled_from(["mailer", "bot"]),
    st.booleans(),
)
_any = st.builds(lambda payload, spaced: _written(signed(NOW, payload=payload), spaced=spaced), values, st.booleans())
_noise = st.sampled_from(
    [b'"', b":", b",", b"}", b"{", b" ", b"\\u0061", b"0", b"e9", b"Z", b"\n", b'"a":1,', b"1" * 17]
)


def _written(raw: bytes, *, spaced: bool) -> bytes:
    return json.dumps(json.loads(raw), ensure_ascii=False).encode() if spaced else raw


def _cut(messages: list[bytes]) -> list[Raw]:
    """Splits a request as the gateway does, which refuses a body that is not JSON."""
    try:
        return msgspec.json.decode(b"[%b]" % b",".join(messages), type=list[Raw])
    except msgspec.DecodeError:
        assume(False)
        raise


def _each(raws: list[Raw]) -> list[Envelope] | None:
    try:
        return [read(raw) for raw in raws]
    except BadMessage:
        return None


@given(st.lists(_plain, min_size=1, max_size=5))
def test_plain_messages_read_together_equal_single_reads(messages: list[bytes]) -> None:
    raws = _cut(messages)
    together = read_together(raws, limit=MESSAGE_LIMIT)
    assert together is not None
    assert together == _each(raws)


@given(st.lists(_any | _plain, min_size=1, max_size=4))
def test_any_payload_is_read_alike_or_left_to_the_single_reader(messages: list[bytes]) -> None:
    raws = _cut(messages)
    together = read_together(raws, limit=MESSAGE_LIMIT)
    assert together is None or together == _each(raws)


@settings(max_examples=200)
@given(st.lists(_plain, min_size=1, max_size=3), st.data())
def test_tampered_messages_are_read_alike_or_left_to_the_single_reader(
    messages: list[bytes], data: st.DataObject
) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(messages) - 1))
        start = data.draw(st.integers(0, len(messages[place])))
        taken = data.draw(st.integers(0, 4))
        text = messages[place]
        messages[place] = text[:start] + data.draw(_noise) + text[start + taken :]
    raws = _cut(messages)
    together = read_together(raws, limit=MESSAGE_LIMIT)
    assert together is None or together == _each(raws)


def _changed(**fields: Any) -> bytes:
    message = json.loads(signed(NOW))
    for dotted, value in fields.items():
        block, _, field = dotted.partition("__")
        message[block][field] = value
    return json.dumps(message).encode()


ID, STAMP, PROOF = (json.loads(signed(NOW))["metadata"][field] for field in ("id", "timestamp", "hmac"))


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([_changed(metadata__id=ID + STAMP[:4], metadata__timestamp=STAMP[4:])], id="id runs on"),
        pytest.param([_changed(metadata__timestamp=STAMP + PROOF[:9], metadata__hmac=PROOF[9:])], id="time runs on"),
        pytest.param([_changed(metadata__id=f"{ID}\n{STAMP}", metadata__timestamp="")], id="id with a line break"),
        pytest.param([_changed(metadata__id=ID + PROOF[:9], metadata__hmac=PROOF[9:])], id="id runs into the proof"),
        pytest.param([_changed(metadata__id=ID[:-9], metadata__hmac=ID[-9:] + PROOF)], id="proof begins in the id"),
        pytest.param([_changed(metadata__id="x" + ID[1:])], id="id of an x"),
        pytest.param([_changed(metadata__hmac=PROOF.upper())], id="proof in capitals"),
        pytest.param([_changed(metadata__hmac="é" * 32)], id="proof of as many bytes"),
        pytest.param([_changed(command__target="a\nb", command__name="")], id="names over two lines"),
        pytest.param([_changed(command__target="Mailer")], id="target in capitals"),
        pytest.param([_changed(metadata__type="snavio.command-sen")], id="another type"),
        pytest.param([_changed(metadata__timestamp="2026-02-30T00:00:00Z")], id="no such day"),
        pytest.param([_changed(metadata__timestamp=STAMP.replace("T", " "))], id="another spelling of the time"),
        pytest.param([_changed(metadata__replayed=True)], id="claims to be a replay"),
        pytest.param([_changed(command__source=SOURCE)], id="names its source"),
        pytest.param([signed(NOW).replace(b'"n":1', b'"n":1,"n":1')], id="twin keys in the payload"),
        pytest.param([signed(NOW).replace(b'"type"', b'"id":"x","type"')], id="twin keys in the metadata"),
        pytest.param(
            [signed(NOW).replace(b'"n":1', b'"n":1,"n":1,"n":1'), _changed(metadata__timestamp="noon")],
            id="twin keys, with a neighbour that lacks as many colons",
        ),
        pytest.param([b" " * MESSAGE_LIMIT + signed(NOW)], id="too long"),
    ],
)
def test_invalid_message_is_not_read_together_with_others(messages: list[bytes]) -> None:
    good = signed(NOW)
    for batch in (messages, [*messages, good], [good, *messages]):
        raws = [Raw(message) for message in batch]
        assert _each(raws) is None
        assert read_together(raws, limit=MESSAGE_LIMIT) is None


def test_fragments_that_form_messages_only_when_joined_are_refused() -> None:
    whole = b",".join([signed(NOW), signed(NOW)])
    assert read_together([whole[:500], whole[501:]], limit=MESSAGE_LIMIT) is None


_USAGE = (CACHE_FRESH, CACHE_STALE, CACHE_EXPIRED)
_keyed = st.builds(World, key=st.sampled_from(["current", "previous", "expired", "missing"]))
_OLD = Key(SOURCE, "hmac-v2", b"o" * 32, current=False, expires_at=NOW + 60)
_older = signed(NOW, secret=_OLD.secret, version_id=_OLD.version_id)


@settings(max_examples=500)
@given(
    worlds | resolved | admitted | _keyed,
    st.lists(worlds | _keyed, max_size=3),
    st.sampled_from([[], [], [_older]]),
    st.sampled_from([0.0, 0.0, 59.9, 60.0, 179.0]),
    st.sampled_from([1.0, 0.0]),
)
def test_batch_is_decided_like_its_messages_one_by_one(
    world: World, others: list[World], more: list[bytes], keys_age: float, drawn: float
) -> None:
    raws = [Raw(message) for message in (*map(message_of, (world, *others, world)), *more)]
    alone, together = _Stages(world, keys_age, drawn), _Stages(world, keys_age, drawn)
    expected = [decision for raw in raws for decision in alone.decide([raw])]
    assert together.decide(raws) == expected
    assert together.left_behind() == alone.left_behind()


class _Stages:
    def __init__(self, world: World, keys_age: float, drawn: float) -> None:
        self.memory = memory_of(world)
        self.memory.tenant.keys[SOURCE, _OLD.version_id] = _OLD
        self.memory.tenant.checked_at[Kind.KEYS] = NOW - keys_age
        self.shield = Shield(rng=lambda: drawn)
        self.fast = Fast(mode=DispatchMode(world.platform))
        self.notices: list[Notice] = []
        self.used = [0.0] * len(_USAGE)

    def decide(self, raws: list[Raw]) -> list[Decision]:
        before = [counter._value.get() for counter in _USAGE]
        verified = self.shield.verify(raws, SOURCE, self.memory.tenant, NOW)
        self.notices += verified.notices
        decisions = self.fast.decide(self.memory, SOURCE, verified.results, NOW)
        after = [counter._value.get() for counter in _USAGE]
        self.used = [total + new - old for total, new, old in zip(self.used, after, before, strict=True)]
        return decisions

    def left_behind(self) -> tuple[Any, ...]:
        tenant, tokens = self.memory.tenant, self.memory.tokens
        stocks = [(stock.left, stock.requested) for stock in tokens._stocks.values()]
        spent = [(each.limit.key, each.amount) for each in tokens.spent()]
        return self.notices, tenant.due, tenant.stale_acls, stocks, spent, self.used


def test_expired_key_refuses_a_batch_even_without_a_newer_version() -> None:
    stages = _Stages(World(), keys_age=0.0, drawn=1.0)
    stages.memory.tenant.keys[SOURCE, "hmac-v1"] = Key(SOURCE, "hmac-v1", SECRET, current=True, expires_at=NOW)
    raws = [Raw(signed(NOW)), Raw(signed(NOW))]
    assert [each.reason for each in stages.decide(raws)] == ["expired_key"] * 2

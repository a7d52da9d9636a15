"""Fair order among waiting shares of a queue."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from interlock.tasks.postgres_queue import Shares, Waiting

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def waiting(org: int, share: int, *, running: int = 0, size: int = 100) -> Waiting:
    return Waiting(UUID(int=org), UUID(int=share), NOW, size, running)


def served(shares: Shares, batches: int, limit: int) -> Counter[int]:
    """Returns the number of messages of each share."""
    count: Counter[int] = Counter()
    for _ in range(batches):
        for share, given_to_it in shares.next(limit):
            count[share.share_id.int] += given_to_it
    return count


def test_two_runs_get_equal_shares() -> None:
    shares = Shares()
    shares.found([waiting(1, 1), waiting(1, 2)])
    assert served(shares, 50, 10) == {1: 250, 2: 250}


def test_org_with_fifty_runs_gets_no_more_than_org_with_one() -> None:
    shares = Shares()
    shares.found([waiting(2, 99), *(waiting(1, n) for n in range(50))])
    count = served(shares, 100, 10)
    assert count[99] == 500
    assert {count[n] for n in range(50)} == {10}


def test_share_with_many_running_tasks_waits_for_the_others() -> None:
    shares = Shares()
    shares.found([waiting(1, 1, running=1000), waiting(1, 2)])
    assert served(shares, 10, 1) == {2: 10}
    assert served(shares, 10, 1) == {1: 5, 2: 5}


def test_messages_of_single_tasks_count_for_less_than_ranges() -> None:
    shares = Shares()
    shares.found([waiting(1, 1, size=100), waiting(1, 2, size=1)])
    count = served(shares, 101, 1)
    assert count == {1: 1, 2: 100}


def test_order_continues_after_the_shares_are_reloaded() -> None:
    shares, count = Shares(), Counter[int]()
    for _ in range(30):
        shares.found([waiting(1, 1), waiting(1, 2), waiting(1, 3)])
        count += served(shares, 1, 1)
    assert count == {1: 10, 2: 10, 3: 10}


def test_batch_consists_of_few_shares() -> None:
    shares = Shares()
    shares.found([waiting(n, n) for n in range(1000)])
    batch = shares.next(100)
    assert len(batch) <= 8
    assert sum(count for _, count in batch) == 100


def test_empty_share_is_skipped_until_it_is_found_again() -> None:
    shares = Shares()
    shares.found([waiting(1, 1), waiting(2, 2)])
    shares.exhausted([(UUID(int=1), UUID(int=1)), (UUID(int=9), UUID(int=9))])
    assert (len(shares), served(shares, 5, 1)) == (1, {2: 5})
    shares.exhausted([(UUID(int=2), UUID(int=2))])
    assert (len(shares), shares.next(5)) == (0, [])


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 500)), min_size=1, max_size=30),
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_every_batch_is_filled_and_no_org_starves(orgs: list[tuple[int, int]], batches: list[int]) -> None:
    shares = Shares()
    shares.found([waiting(org, n, running=running, size=1) for n, (org, running) in enumerate(orgs)])
    assert [sum(count for _, count in shares.next(limit)) for limit in batches] == batches
    # After this many batches, every org has been served, however many tasks the others have running.
    assert len(served(shares, 4 * len(orgs) * (1 + max(running for _, running in orgs)), 1)) == len(orgs)

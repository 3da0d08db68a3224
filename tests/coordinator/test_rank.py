from evrun.coordinator.rank import Deadlines, InFlight, Piece, Rank, silence, verdict
from evrun.expert_worker.wire.heartbeat import Beat

DEADLINES = Deadlines(start_s=600, first_call_s=60, stall_s=2, kill_s=30)


def beat(at_s: float, incarnation: int = 1) -> Beat:
    return Beat(incarnation, 100, "serving", 5, 3, 7, 1, at_s)


def serving(since_s: float, calls: int = 1) -> Rank:
    rank = Rank(0)
    rank.start(1, 100, -1, 0.0)
    rank.state, rank.calls = "serving", calls
    rank.in_flight = InFlight(Piece([1, 2]), 7, 3, since_s)
    return rank


def test_a_slow_rank_that_moves_is_well() -> None:
    rank = serving(since_s=10)
    for now in range(11, 400):
        assert verdict(rank, beat(now - 1.5), DEADLINES, now) == "ok"


def test_stall_then_kill_by_lack_of_progress() -> None:
    rank = serving(since_s=10)
    assert verdict(rank, beat(9), DEADLINES, 11.9) == "ok"
    assert verdict(rank, beat(9), DEADLINES, 12.1) == "stalled"
    rank.state = "stalled"
    assert verdict(rank, beat(9), DEADLINES, 30) == "ok"
    assert verdict(rank, beat(9), DEADLINES, 40.1) == "kill"
    assert verdict(rank, beat(35), DEADLINES, 36) == "moves"


def test_the_first_call_has_its_own_deadline() -> None:
    rank = serving(since_s=10, calls=0)
    assert verdict(rank, None, DEADLINES, 60) == "ok"
    assert verdict(rank, None, DEADLINES, 70.1) == "stalled"
    rank.state = "stalled"
    assert verdict(rank, None, DEADLINES, 99) == "ok"
    assert verdict(rank, None, DEADLINES, 101) == "kill"


def test_starting_has_its_own_deadline_and_progress_counts() -> None:
    rank = Rank(0)
    rank.start(2, 100, -1, 0.0)
    assert verdict(rank, None, DEADLINES, 599) == "ok"
    assert verdict(rank, beat(500, incarnation=2), DEADLINES, 1000) == "ok"
    assert verdict(rank, beat(900, incarnation=1), DEADLINES, 1000) == "kill"


def test_a_beat_of_an_older_incarnation_is_no_progress() -> None:
    rank = serving(since_s=10)
    assert silence(rank, beat(50, incarnation=0), 60) == 50
    assert silence(rank, beat(50), 60) == 10


def test_an_idle_rank_owes_nothing() -> None:
    rank = Rank(0)
    rank.start(1, 100, -1, 0.0)
    rank.state = "ready"
    assert verdict(rank, None, DEADLINES, 1e6) == "ok"


def test_death_gives_back_what_was_owed_in_order() -> None:
    rank = serving(since_s=10)
    later = Piece([9])
    rank.queue.append(later)
    first = rank.in_flight.piece  # type: ignore[union-attr]
    assert rank.stop("died") == [first, later]
    assert not rank.live
    assert rank.queue == rank.queue.__class__()


def test_an_abandoned_call_gives_its_piece_once_and_blocks_the_rank() -> None:
    rank = serving(since_s=10)
    piece = rank.in_flight.piece  # type: ignore[union-attr]
    assert rank.abandon() == [piece]
    assert rank.abandon() == []
    assert not rank.free
    assert rank.stop("died") == []

import pytest

from nestrec.base.clock import RealClock
from nestrec.base.errors import (
    CorruptFileError,
    DataError,
    ErrorCollector,
    UserError,
    UserErrorGroup,
    did_you_mean,
    require,
)
from nestrec_bench.harness.clocks import EventClock, ManualClock


def test_manual_clock_moves_only_when_advanced() -> None:
    clock = ManualClock(3.0)
    assert clock.now_s() == clock.now_s() == 3.0
    clock.sleep(0.5)
    assert clock.now_s() == 3.5


def test_event_clock_runs_due_events_in_order_during_sleep() -> None:
    clock = EventClock()
    seen = list[tuple[str, float]]()
    clock.at(2.0, lambda: seen.append(("second", clock.now_s())))
    clock.at(1.0, lambda: (seen.append(("first", clock.now_s())), clock.at(1.5, lambda: seen.append(("then", 1.5)))))
    clock.at(2.0, lambda: seen.append(("third", clock.now_s())))
    clock.sleep(0.5)
    assert (seen, clock.next_s) == ([], 1.0)
    clock.sleep(1.5)
    assert seen == [("first", 1.0), ("then", 1.5), ("second", 2.0), ("third", 2.0)]
    assert (clock.now_s(), clock.next_s) == (2.0, float("inf"))


def test_real_clock_is_monotonic() -> None:
    clock = RealClock()
    times = [clock.now_s() for _ in range(100)]
    assert times == sorted(times)


def test_user_error_names_option_value_and_remedy() -> None:
    error = UserError("is too big", option="batch", value=7, remedy="choose 3")
    assert str(error) == "batch=7: is too big. Choose 3."
    assert str(UserError("is wrong")) == "Is wrong."
    with pytest.raises(UserError):
        raise CorruptFileError("is damaged")


def test_did_you_mean_suggests_close_name_or_lists_all() -> None:
    assert did_you_mean("schedul", ["schedule", "model"]) == "did you mean 'schedule'?"
    assert did_you_mean("zzz", ["b", "a"]) == "known names: a, b"


def test_require_raises_the_chosen_error_if_false() -> None:
    for holds in (True, 1, "text", [0]):
        require(holds, "is wrong", option="batch", value=7, remedy="choose 3")
    for fails in (False, 0, "", [], None):
        with pytest.raises(UserError) as raised:
            require(fails, "is too big", option="batch", value=7, remedy="choose 3")
        assert type(raised.value) is UserError
        assert str(raised.value) == "batch=7: is too big. Choose 3."
    with pytest.raises(CorruptFileError, match=r"^Is damaged\.$"):
        require(False, "is damaged", error=CorruptFileError)


def test_error_collector_keeps_added_errors_in_order() -> None:
    mistakes = ErrorCollector()
    mistakes.raise_if_any()
    mistakes.add("is empty", option="log", value="", remedy="name a file", error=DataError)
    with pytest.raises(DataError) as alone:
        mistakes.raise_if_any()
    assert str(alone.value) == "log='': is empty. Name a file."
    with mistakes.collecting():
        raise UserError("is too big", option="batch", value=7)
    mistakes.add("is wrong")
    with pytest.raises(UserErrorGroup) as several:
        mistakes.raise_if_any()
    assert [(type(error), error.problem) for error in several.value.errors] == [
        (DataError, "is empty"),
        (UserError, "is too big"),
        (UserError, "is wrong"),
    ]

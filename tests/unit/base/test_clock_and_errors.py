import pytest

from nestrec.base.clock import RealClock, SimulatedClock
from nestrec.base.errors import DamagedError, UserError, did_you_mean


def test_the_simulated_clock_moves_only_when_told() -> None:
    clock = SimulatedClock(3.0)
    assert clock.now_s() == clock.now_s() == 3.0
    clock.sleep(0.5)
    assert clock.now_s() == 3.5


def test_the_real_clock_never_goes_back() -> None:
    clock = RealClock()
    times = [clock.now_s() for _ in range(100)]
    assert times == sorted(times)


def test_a_user_error_names_field_value_and_remedy() -> None:
    error = UserError("is too big", field="batch", value=7, remedy="choose 3")
    assert str(error) == "batch = 7: is too big\n  remedy: choose 3"
    assert str(UserError("is wrong")) == "is wrong"
    with pytest.raises(UserError):
        raise DamagedError("is damaged")


def test_a_close_name_is_suggested_and_otherwise_all_are_listed() -> None:
    assert did_you_mean("schedul", ["schedule", "model"]) == "did you mean 'schedule'?"
    assert did_you_mean("zzz", ["b", "a"]) == "known names: a, b"

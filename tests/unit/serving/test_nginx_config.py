"""What of nginx's configuration is computed, and what is looked for before anything starts."""

import re

import pytest

from nestrec.base.errors import UserError
from nestrec.serving.fleet import fleet_start
from nestrec.serving.fleet.nginx import _waits_ms
from nestrec.serving.http.serve_config import ServeConfig


def test_a_deadline_is_rounded_up_to_one_that_nginx_can_keep():
    waits = _waits_ms(10_000)
    for asked in (1, 99, 100, 101, 200, 201, 499, 500, 999, 1000, 1001, 2000, 4999, 9999, 10_000):
        found = [ms for ms, pattern in waits.items() if re.fullmatch(pattern, str(asked))]
        assert found[0] == min(ms for ms in waits if ms >= asked), "nginx takes the first that fits"
    assert not any(re.fullmatch(pattern, wrong) for pattern in waits.values() for wrong in ("", "-5", "20000", "x"))


def test_without_nginx_no_instance_is_started(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="is not installed"):
        fleet_start._check_offered(ServeConfig(front="nginx", instances=2))

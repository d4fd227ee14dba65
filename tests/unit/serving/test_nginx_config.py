"""What of nginx's configuration is computed."""

import re

from nestrec.serving.many.nginx import _waits_ms


def test_a_deadline_is_rounded_up_to_one_that_nginx_can_keep():
    waits = _waits_ms(10_000)
    for asked in (1, 99, 100, 101, 200, 201, 499, 500, 999, 1000, 1001, 2000, 4999, 9999, 10_000):
        found = [ms for ms, pattern in waits.items() if re.fullmatch(pattern, str(asked))]
        assert found[0] == min(ms for ms in waits if ms >= asked), "nginx takes the first that fits"
    assert not any(re.fullmatch(pattern, wrong) for pattern in waits.values() for wrong in ("", "-5", "20000", "x"))

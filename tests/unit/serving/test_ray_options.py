"""What replicas ask Ray for."""

import pytest

from nestrec.base.config_overrides import with_overrides
from nestrec.base.errors import UserError
from nestrec.serving.fleet.ray_serve import num_gpus
from nestrec.serving.http.serve_config import ServeConfig


def test_replicas_ask_for_their_gpus():
    given = [("cpu", None), ("cuda", None), ("cuda", "0.5"), ("cpu", "0")]
    options = [{"device": device, **({} if gpus is None else {"ray_gpus": gpus})} for device, gpus in given]
    asked = [with_overrides(ServeConfig(), one) for one in options]
    assert [num_gpus(cfg) for cfg in asked] == [0.0, 1.0, 0.5, 0.0]
    with pytest.raises(UserError, match="ray_gpus"):
        with_overrides(ServeConfig(), {"ray_gpus": "-1"})

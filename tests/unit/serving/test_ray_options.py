"""Resources that replicas request from Ray."""

import pytest

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.errors import UserError
from nestrec.serving.fleet.ray_serve import num_gpus
from nestrec.serving.http.serve_config import ServeConfig


def test_ray_replicas_request_gpus():
    devices = [("cpu", None), ("cuda", None), ("cuda", "0.5"), ("cpu", "0")]
    options = [{"device": device, **({} if gpus is None else {"gpus_per_instance": gpus})} for device, gpus in devices]
    configs = [apply_overrides(ServeConfig(), override) for override in options]
    assert [num_gpus(cfg) for cfg in configs] == [0.0, 1.0, 0.5, 0.0]
    with pytest.raises(UserError, match="gpus_per_instance"):
        apply_overrides(ServeConfig(), {"gpus_per_instance": "-1"})

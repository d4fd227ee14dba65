import pytest

from nestrec.report.doctor import examine


@pytest.mark.gpu
def test_doctor_finds_gpu_and_its_features() -> None:
    found = {finding.name: finding for finding in examine()}
    for name in ("CUDA", "Triton", "NCCL", "Symmetric memory"):
        assert found[name].status == "ok", found[name]

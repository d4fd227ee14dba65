import pytest

from nestrec.report.doctor import examine


@pytest.mark.gpu
def test_the_doctor_finds_the_gpu_and_what_runs_on_it() -> None:
    found = {finding.name: finding for finding in examine()}
    for name in ("CUDA", "Triton", "NCCL", "Symmetric memory"):
        assert found[name].status == "ok", found[name]

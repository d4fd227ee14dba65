"""CTR prediction on labeled rows: FLOPs and activations compared with values computed by hand."""

from pathlib import Path

from nestrec.data.dataset import Dataset
from nestrec.data.formats.format_registry import prepare
from nestrec.models.backbone_spec import ForwardFlops
from nestrec.models.dlrm import DLRMConfig
from nestrec.tasks.ctr_task import CTRTask, CTRTaskConfig
from support.tiny_runs import criteo_text


def test_ctr_cost_counts_networks_and_dot_products(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text(criteo_text(20, seed=0))
    prepare("criteo", str(tmp_path / "rows.txt"), tmp_path / "data")
    cfg = CTRTaskConfig(encoder=DLRMConfig(dim=4, bottom_mlp=(8,), top_mlp=(6,)))
    cost = CTRTask(cfg, Dataset.open(tmp_path / "data"), seed=0, dtype="float32").cost()
    # 13 numbers and their missing indicators become one vector; with 26 categories there are 27 vectors and 351 pairs.
    products = 26 * 8 + 8 * 4 + (4 + 351) * 6 + 6 * 1 + 27 * 27 * 4
    activations = (26 + 8) + (8 + 4) + (4 + 351 + 6) + (6 + 1) + 27 * 4 + 27 * 27
    assert cost.flops == ForwardFlops(token=2.0 * products)
    assert cost.activations == activations

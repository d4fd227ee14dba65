from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nestrec.report.tensorboard_log import TensorBoardWriter
from nestrec.tasks.metrics import ConfidenceInterval
from nestrec.tasks.task import Evaluation

EVALUATION = Evaluation("valid", "ndcg@10", {"model": {"ndcg@10": ConfidenceInterval(0.25, 0.1, 0.3)}})


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def test_tensorboard_contains_losses_throughput_and_metrics(tmp_path: Path) -> None:
    with TensorBoardWriter(tmp_path) as writer:
        writer.on_train_start(100, 0)
        writer.on_step_report(20, 0, {"loss": 2.0, "tokens_per_s": 8.0, "parts": {"compute": 4.0}, "memory_mib": None})
        writer.on_evaluation(EVALUATION, 20, 1)
    assert scalars(tmp_path, "train/loss") == [(20, 2.0)]
    assert scalars(tmp_path, "speed/tokens_per_s") == [(20, 8.0)]
    assert scalars(tmp_path, "step_parts_ms/compute") == [(20, 4.0)]
    assert scalars(tmp_path, "valid/ndcg@10/model") == [(20, 0.25)]
    assert scalars(tmp_path, "speed/memory_mib") == []


def test_tensorboard_resumed_run_has_no_duplicate_steps(tmp_path: Path) -> None:
    for first, loss in ((0, 1.0), (40, 2.0)):
        with TensorBoardWriter(tmp_path) as writer:
            writer.on_train_start(100, first)
            for step in range(first + 20, 81, 20):
                writer.on_step_report(step, 0, {"loss": loss})
    assert scalars(tmp_path, "train/loss") == [(20, 1.0), (40, 1.0), (60, 2.0), (80, 2.0)]


def test_tensorboard_evaluation_alone_keeps_events(tmp_path: Path) -> None:
    with TensorBoardWriter(tmp_path) as writer:
        writer.on_train_start(100, 0)
        writer.on_step_report(20, 0, {"loss": 1.0})
    writer.on_evaluation(EVALUATION, 20, 1)
    assert scalars(tmp_path, "train/loss") == [(20, 1.0)]
    assert scalars(tmp_path, "valid/ndcg@10/model") == [(20, 0.25)]

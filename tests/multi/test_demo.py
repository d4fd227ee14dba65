"""Tests of `nestrec demo`, which trains on two ranks, compares, exports and serves with the commands of the CLI."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.cli.app import app
from nestrec.cli.demo_command import _post
from nestrec.report.formatting import ratio_to_best
from nestrec.report.run_records import headline_evaluation, load_run

SMALL = {
    "training.max_steps": "12",
    "batch.batch_size": "8",
    "task.history.max_events": "16",
    "task.negatives.num_negatives": "8",
    "task.encoder.max_length": "16",
    "task.encoder.dim": "16",
    "task.encoder.head_dim": "8",
}


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Path]:
    """Return a function that runs the demo, checks its output and its report, and returns its run folder."""

    def run(options: dict[str, str]) -> Path:
        app(["demo", *(f"--{name}={value}" for name, value in options.items())], standalone_mode=False)
        output = capsys.readouterr().out
        assert "tables of `nested` and `serial` are bitwise identical" in output
        assert "POST /v1/recommend" in output
        page = Path("runs/demo/report.html").read_text()
        assert page.index("<h3>serial</h3>") < page.index("<h3>nested</h3>")
        return Path("runs/demo")

    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.timeout(300)
def test_demo_trains_compares_serves_and_reports(demo: Callable[..., Path]) -> None:
    demo(SMALL)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_model_beats_best_baseline_by_half(demo: Callable[..., Path]) -> None:
    """The log has users with several interests, which the last-item and popularity baselines cannot predict."""
    record = headline_evaluation(load_run(demo({})))
    assert record is not None
    assert record["part"] == "test"
    assert ratio_to_best(record["metrics"], "model", "ndcg@10") >= 1.5


def test_demo_unresponsive_server_is_error_with_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def reject() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(
                    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                )

        thread = threading.Thread(target=reject)
        thread.start()
        with pytest.raises(UserError, match=r"503[\s\S]*Run the same command again"):
            _post(f"http://127.0.0.1:{port}/v1/recommend", {})
        thread.join()

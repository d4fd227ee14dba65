"""The demo: trained on two ranks, compared, exported and served, by the commands that anyone would use."""

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
    "batch.batch_samples": "8",
    "task.history.max_length": "16",
    "task.num_negatives": "8",
    "task.encoder.max_length": "16",
    "task.encoder.dim": "16",
    "task.encoder.head_dim": "8",
}


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Path]:
    """Its run, with what every demo shows: equal bits, an answer, the two timelines above each other."""

    def run(options: dict[str, str]) -> Path:
        app(["demo", *(f"--{name}={value}" for name, value in options.items())], standalone_mode=False)
        said = capsys.readouterr().out
        assert "tables of `nested` equal those of `serial`, bit by bit" in said
        assert "POST /v1/recommend" in said
        page = Path("runs/demo/report.html").read_text()
        assert page.index("<h3>serial</h3>") < page.index("<h3>nested</h3>")
        return Path("runs/demo")

    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.timeout(300)
def test_the_demo_trains_compares_serves_and_writes_its_report(demo: Callable[..., Path]) -> None:
    demo(SMALL)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_at_full_size_the_model_is_half_again_as_good_as_the_best_baseline(demo: Callable[..., Path]) -> None:
    """Logs with several interests, which the last item and popularity cannot follow."""
    record = headline_evaluation(load_run(demo({})))
    assert record is not None
    assert record["part"] == "test"
    assert ratio_to_best(record["metrics"], "model", "ndcg@10") >= 1.5


def test_a_server_that_gives_no_answer_is_an_error_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(
                    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                )

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(UserError, match=r"503[\s\S]*once more"):
            _post(f"http://127.0.0.1:{port}/v1/recommend", {})
        thread.join()

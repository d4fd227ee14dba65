"""Background threads continue after exceptions, which are counted and logged once."""

import asyncio
import logging
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.serving.core.background_tasks import BackgroundThread, Failures, reported
from nestrec.serving.core.slot_router import KeyedHash, Ring, Router
from nestrec.serving.fleet.gateway_metrics import GatewayMetrics
from nestrec.serving.fleet.instance_supervisor import Instance
from nestrec.serving.fleet.rolling_update import FleetVersionFollower
from nestrec.serving.http.signals import ParentDeathPipe, SignalHandler
from nestrec.serving.kv_cache.tiered_prefix_cache import Copier
from nestrec.serving.security.auth import ApiKeyEntry, WatchedFiles, Watcher, add_entry
from nestrec.serving.security.security_config import SecurityConfig
from nestrec.serving.security.server_security import ServerSecurity
from nestrec.serving.service.model_reloader import CoalescingWorker
from nestrec_bench.harness.clocks import ManualClock

PACKAGE = Path(__file__).parents[3] / "nestrec" / "serving"
SUPERVISED_FILES = {
    "core/background_tasks.py",
    "engine/serving_engine.py",
    "kv_cache/tiered_prefix_cache.py",
    "server.py",  # terminates the process
    "service/model_reloader.py",  # passes its exception to the awaiting task
    "service/version_follower.py",
}
PATIENCE_S = 30.0


@pytest.fixture
def failures(monkeypatch):
    """Provide failure counts that only this test uses."""
    found = Failures()
    for module in (
        "core.background_tasks",
        "security.auth",
        "kv_cache.tiered_prefix_cache",
        "fleet.instance_supervisor",
        "fleet.rolling_update",
        "http.server_metrics",
    ):
        monkeypatch.setattr(f"nestrec.serving.{module}.FAILURES", found)
    return found


def catch(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_background_threads_are_all_supervised():
    """An unsupervised thread would end silently at its first exception."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"threading\.(Thread|Timer)\(|ThreadPoolExecutor\(|start_new_thread", path.read_text())
    }
    assert found <= SUPERVISED_FILES


def test_background_thread_continues_after_exceptions(failures, caplog):
    errors = [None, OverflowError("1"), RecursionError(), OverflowError("2"), MemoryError(), None]
    done = []

    def turn():
        done.append(errors[len(done)])
        if done[-1] is not None:
            raise done[-1]
        return len(done) < len(errors)

    thread = BackgroundThread("nestrec-test", turn).start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive
    assert done == errors
    assert failures.counts == {"nestrec-test": 4}
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info[0] for record in logged] == [OverflowError, RecursionError, MemoryError], (
        "each cause must be logged once"
    )


def test_background_failure_is_logged_once_per_cause(caplog):
    failures = Failures()
    failures.register("keys")
    assert failures.counts == {"keys": 0}, "alerts on an increase need an initial value"
    for _ in range(3):
        failures.add("keys", catch(UserError("is wrong", option="a", value=1, remedy="b")), about="first file")
        failures.add("keys", catch(UserError("is wrong", option="a", value=1, remedy="b")), about="second file")
        failures.add("certificate", catch(OSError("gone")))
    assert failures.counts == {"keys": 6, "certificate": 3}
    assert len(caplog.records) == 3
    assert not any(record.exc_info for record in caplog.records), "user errors must be logged without a traceback"
    failures.merge({"keys": 2, "nestrec-log": 1})
    assert failures.counts == {"keys": 8, "certificate": 3, "nestrec-log": 1}


def test_copier_continues_after_failures(monkeypatch, caplog):
    failures = Failures()
    monkeypatch.setattr("nestrec.serving.core.background_tasks.FAILURES", failures)
    monkeypatch.setattr("nestrec.serving.kv_cache.tiered_prefix_cache.FAILURES", failures)
    copier = Copier(torch.device("cpu"))
    made = []

    def fail(*_):
        made.append("failed")
        raise RuntimeError

    copier.submit(fail, 1, made.append)
    copier.submit(lambda: None, 1, fail)
    copier.submit(lambda: None, 1, made.append)
    copier.close()
    assert made == ["failed", False, "failed", True]
    assert failures.counts == {"nestrec-copier": 2}
    assert len(caplog.records) == 1, "failures raised at the same line must be logged once"


def test_background_task_exception_is_reported(failures, caplog):
    async def fail():
        raise RuntimeError

    async def run():
        tasks = [asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(60.0)), asyncio.create_task(fail())]
        tasks[1].cancel()
        for task in tasks:
            task.add_done_callback(reported("nestrec-reload"))
        await asyncio.wait(tasks)

    asyncio.run(run())
    assert failures.counts == {"nestrec-reload": 2}
    assert len(caplog.records) == 1


def test_coalescing_worker_continues_after_exception(failures):
    turns = [threading.Event(), threading.Event()]

    def act():
        is_first = not turns[0].is_set()
        turns[0 if is_first else 1].set()
        if is_first:
            raise ValueError

    worker = CoalescingWorker("nestrec-reload", act)
    for turn in turns:
        worker.request_run()
        assert turn.wait(PATIENCE_S)
    worker.close()
    assert failures.counts == {"nestrec-reload": 1}


def test_signal_handler_stops_after_listener_failure(failures):
    signals = SignalHandler()
    stopped = threading.Event()

    def fail(*_):
        raise RuntimeError

    signals.on_reload(fail)
    signals.on_stop(fail)
    signals.on_stop(lambda _: stopped.set())
    thread = BackgroundThread("nestrec-signals", signals._turn).start()
    signals._received.put(signal.SIGHUP)
    signals.stop()
    assert stopped.wait(PATIENCE_S)
    assert signals.is_stopping
    assert thread.is_alive
    assert failures.counts == {"nestrec-signals": 2}


def test_supervisor_restarts_instance_after_watch_failure(failures, monkeypatch):
    pipe = ParentDeathPipe()
    processes = []
    instance = Instance(0, [], [], pipe, start_timeout_s=1.0, stop_timeout_s=10.0)

    def spawn():
        if not processes:
            processes.append(None)
            raise BlockingIOError("no more processes")
        processes.append(subprocess.Popen(["sleep", "600"]))
        return processes[-1]

    def watch(process, started_s):
        if len(processes) == 3:
            instance.begin_stop()
        raise ValueError("an answer that is not JSON")

    monkeypatch.setattr(instance, "_spawn", spawn)
    monkeypatch.setattr(instance, "_watch", watch)
    monkeypatch.setattr("nestrec.serving.fleet.instance_supervisor._LONGEST_PAUSE_S", 0.0)
    instance.start()
    instance.wait()
    pipe.close()
    assert len(processes) == 3
    assert all(process.returncode is not None for process in processes[1:]), "unwatched processes must be stopped"
    assert instance.num_failures == 2
    assert failures.counts == {"nestrec-instance-0": 3}


def test_fleet_version_follower_logs_lasting_failure_once(failures, caplog):
    calls = []
    is_called = threading.Event()

    def follow(_):
        calls.append(1)
        if len(calls) == 3:
            is_called.set()
        raise KeyError("models")

    follower = FleetVersionFollower([], 0.001, lambda _: True, follow)
    follower.start()
    assert is_called.wait(PATIENCE_S)
    follower.close()
    assert failures.counts["nestrec-fleet-follow"] >= 2
    assert len(caplog.records) == 1


def test_watched_files_are_retried_until_readable(failures, tmp_path, caplog):
    path = tmp_path / "keys.toml"
    clock = ManualClock()
    errors = []
    path.write_text("1")

    def read():
        if errors:
            raise errors[0]

    files = WatchedFiles("keys", [path], read, clock)
    clock.sleep(5.0)
    assert not files.reload_if_changed()
    assert files.age_s == 0.0, "the file has not changed since it was read"
    path.write_text("22")
    for error in (OverflowError(), RecursionError(), OSError("away"), UserError("a", option="b", value=1, remedy="c")):
        errors[:] = [error]
        for _ in range(2):
            clock.sleep(1.0)
            assert not files.reload_if_changed()
    assert files.age_s == 8.0
    assert failures.counts == {"keys": 8}
    assert len(caplog.records) == 4
    errors.clear()
    assert files.reload_if_changed(), "the unchanged file must be read again after a failure"
    assert files.age_s == 0.0
    assert not files.reload_if_changed()


def test_file_watcher_continues_after_failure(failures, monkeypatch, tmp_path):
    is_called = threading.Event()

    def fail():
        raise RuntimeError

    bad, good = (WatchedFiles(name, [tmp_path / name], lambda: None) for name in ("keys", "certificate"))
    monkeypatch.setattr(bad, "reload_if_changed", fail)
    monkeypatch.setattr(good, "reload_if_changed", is_called.set)
    watcher = Watcher([bad, good], every_s=0.001)
    assert is_called.wait(PATIENCE_S)
    watcher.close()
    assert failures.counts["keys"] >= 1
    assert failures.counts["certificate"] == 0


def test_metrics_contain_background_failures_and_file_ages(monkeypatch, tmp_path):
    add_entry(tmp_path / "keys.toml", ApiKeyEntry(name="a", sha256="ab" * 32))
    security = ServerSecurity(SecurityConfig(api_keys=str(tmp_path / "keys.toml")), "127.0.0.1")
    failures = Failures()
    monkeypatch.setattr("nestrec.serving.http.server_metrics.FAILURES", failures)
    metrics = GatewayMetrics(Router(Ring.make(1, keyed := KeyedHash()), keyed, ManualClock()))
    metrics.security = security
    failures.add("keys", OSError())
    slot_metrics = b'# TYPE nestrec_background_failures counter\nnestrec_background_failures_total{task="keys"} 3.0\n'
    text = metrics.exposition({0: slot_metrics}).decode()
    security.close()
    assert 'nestrec_background_failures_total{task="keys"} 1.0' in text
    assert 'nestrec_background_failures_total{slot="0",task="keys"} 3.0' in text
    assert text.count("# TYPE nestrec_background_failures_total counter") == 1, "each metric name may occur only once"
    assert re.search(r'nestrec_file_age_seconds\{file="keys"\} [0-9.e-]+\n', text)

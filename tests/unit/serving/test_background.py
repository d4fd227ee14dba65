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
SUPERVISED_ELSEWHERE = {
    "core/background_tasks.py",
    "engine/serving_engine.py",
    "kv_cache/tiered_prefix_cache.py",
    "server.py",  # ends the process
    "service/model_reloader.py",  # hands its exception to the task that waits for it
    "service/version_follower.py",
}
PATIENCE_S = 30.0


@pytest.fixture
def failures(monkeypatch):
    """Counts of this test alone."""
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


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_background_threads_are_all_supervised():
    """A thread that is made in another way ends silently at its first exception."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"threading\.(Thread|Timer)\(|ThreadPoolExecutor\(|start_new_thread", path.read_text())
    }
    assert found <= SUPERVISED_ELSEWHERE


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
    assert [record.exc_info[0] for record in logged] == [OverflowError, RecursionError, MemoryError], "once each"


def test_failure_is_logged_once_per_cause(caplog):
    failures = Failures()
    failures.register("keys")
    assert failures.counts == {"keys": 0}, "an alert on an increase needs a first value"
    for _ in range(3):
        failures.add("keys", raised(UserError("is wrong", option="a", value=1, remedy="b")), about="first file")
        failures.add("keys", raised(UserError("is wrong", option="a", value=1, remedy="b")), about="second file")
        failures.add("certificate", raised(OSError("gone")))
    assert failures.counts == {"keys": 6, "certificate": 3}
    assert len(caplog.records) == 3
    assert not any(record.exc_info for record in caplog.records), "what an operator can read needs no traceback"
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
    assert len(caplog.records) == 1, "both were raised at one line"


def test_task_that_nothing_awaits_is_reported(failures, caplog):
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


def test_serially_acts_again_after_an_exception(failures):
    turns = [threading.Event(), threading.Event()]

    def act():
        is_first = not turns[0].is_set()
        turns[0 if is_first else 1].set()
        if is_first:
            raise ValueError

    serially = CoalescingWorker("nestrec-reload", act)
    for turn in turns:
        serially.ask()
        assert turn.wait(PATIENCE_S)
    serially.close()
    assert failures.counts == {"nestrec-reload": 1}


def test_signals_stop_after_a_listener_failed(failures):
    signals = SignalHandler()
    stopped = threading.Event()

    def fail(*_):
        raise RuntimeError

    signals.when_reloaded(fail)
    signals.when_stopped(fail)
    signals.when_stopped(lambda _: stopped.set())
    thread = BackgroundThread("nestrec-signals", signals._turn).start()
    signals._came.put(signal.SIGHUP)
    signals.stop()
    assert stopped.wait(PATIENCE_S)
    assert signals.is_stopping
    assert thread.is_alive
    assert failures.counts == {"nestrec-signals": 2}


def test_instance_that_cannot_be_watched_is_restarted(failures, monkeypatch):
    tie = ParentDeathPipe()
    processes = []
    instance = Instance(0, [], [], tie, start_timeout_s=1.0, stop_timeout_s=10.0)

    def started():
        if not processes:
            processes.append(None)
            raise BlockingIOError("no more processes")
        processes.append(subprocess.Popen(["sleep", "600"]))
        return processes[-1]

    def watched(process, started_s):
        if len(processes) == 3:
            instance.begin_stop()
        raise ValueError("an answer that is not JSON")

    monkeypatch.setattr(instance, "_started", started)
    monkeypatch.setattr(instance, "_watched", watched)
    monkeypatch.setattr("nestrec.serving.fleet.instance_supervisor._LONGEST_PAUSE_S", 0.0)
    instance.start()
    instance.wait()
    tie.close()
    assert len(processes) == 3
    assert all(process.returncode is not None for process in processes[1:]), "a process that is not watched is ended"
    assert instance.num_failures == 2
    assert failures.counts == {"nestrec-instance-0": 3}


def test_front_follower_logs_a_lasting_failure_once(failures, caplog):
    looks = []
    has_looked = threading.Event()

    def followed(_):
        looks.append(1)
        if len(looks) == 3:
            has_looked.set()
        raise KeyError("models")

    follower = FleetVersionFollower([], 0.001, lambda _: True, followed)
    follower.start()
    assert has_looked.wait(PATIENCE_S)
    follower.close()
    assert failures.counts["nestrec-front-follow"] >= 2
    assert len(caplog.records) == 1


def test_watched_files_are_tried_until_they_can_be_read(failures, tmp_path, caplog):
    path = tmp_path / "keys.toml"
    clock = ManualClock()
    errors = []
    path.write_text("1")

    def read():
        if errors:
            raise errors[0]

    files = WatchedFiles("keys", [path], read, clock)
    clock.sleep(5.0)
    assert not files.look()
    assert files.age_s == 0.0, "it is as it was read"
    path.write_text("22")
    for error in (OverflowError(), RecursionError(), OSError("away"), UserError("a", option="b", value=1, remedy="c")):
        errors[:] = [error]
        for _ in range(2):
            clock.sleep(1.0)
            assert not files.look()
    assert files.age_s == 8.0
    assert failures.counts == {"keys": 8}
    assert len(caplog.records) == 4
    errors.clear()
    assert files.look(), "it is tried again though the file is the same"
    assert files.age_s == 0.0
    assert not files.look()


def test_watcher_reads_other_files_after_one_failed(failures, monkeypatch, tmp_path):
    has_looked = threading.Event()

    def fail():
        raise RuntimeError

    bad, good = (WatchedFiles(name, [tmp_path / name], lambda: None) for name in ("keys", "certificate"))
    monkeypatch.setattr(bad, "look", fail)
    monkeypatch.setattr(good, "look", has_looked.set)
    watcher = Watcher([bad, good], every_s=0.001)
    assert has_looked.wait(PATIENCE_S)
    watcher.close()
    assert failures.counts["keys"] >= 1
    assert failures.counts["certificate"] == 0


def test_failures_and_file_ages_are_metrics(monkeypatch, tmp_path):
    add_entry(tmp_path / "keys.toml", ApiKeyEntry(name="a", sha256="ab" * 32))
    safety = ServerSecurity(SecurityConfig(keys=str(tmp_path / "keys.toml")), "127.0.0.1")
    failures = Failures()
    monkeypatch.setattr("nestrec.serving.http.server_metrics.FAILURES", failures)
    metrics = GatewayMetrics(Router(Ring.make(1, keyed := KeyedHash()), keyed, ManualClock()))
    metrics.safety = safety
    failures.add("keys", OSError())
    of_slot = b'# TYPE nestrec_background_failures counter\nnestrec_background_failures_total{task="keys"} 3.0\n'
    text = metrics.exposition({0: of_slot}).decode()
    safety.close()
    assert 'nestrec_background_failures_total{task="keys"} 1.0' in text
    assert 'nestrec_background_failures_total{slot="0",task="keys"} 3.0' in text
    assert text.count("# TYPE nestrec_background_failures_total counter") == 1, "a name may occur once"
    assert re.search(r'nestrec_file_age_seconds\{file="keys"\} [0-9.e-]+\n', text)

import importlib.util
import secrets
import threading
import time

from nestrec.serving.security import security_config


def test_threads_that_ask_at_once_get_one_secret(monkeypatch):
    """Each instance is started by a thread of its own: with another secret it would refuse its front for ever."""
    made = secrets.token_hex

    def slowly(num_bytes):
        time.sleep(0.02)  # as where the system has others to serve in the middle of it
        return made(num_bytes)

    monkeypatch.setattr(secrets, "token_hex", slowly)
    spec = importlib.util.find_spec(security_config.__name__)
    fresh = importlib.util.module_from_spec(spec)  # that of this process has been made
    spec.loader.exec_module(fresh)
    got = []
    threads = [threading.Thread(target=lambda: got.append(fresh.front_secret())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 3
    assert set(got) == {fresh.front_secret()}

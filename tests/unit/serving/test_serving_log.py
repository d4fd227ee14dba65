"""The non-blocking log handler of a server."""

import json
import logging
import os
import threading

from nestrec.serving.http.server_logging import LogConfig, NonBlockingLogHandler


def test_log_blocked_reader_does_not_block_server():
    reads, writes = os.pipe()
    handler = NonBlockingLogHandler(writes)
    logger = logging.Logger("a")
    logger.addHandler(handler)

    def log_much():
        for number in range(5000):
            logger.error("message %d " + "x" * 100, number)

    logging_thread = threading.Thread(target=log_much, daemon=True)
    logging_thread.start()
    logging_thread.join(30.0)
    assert not logging_thread.is_alive()
    received = b""
    while b"were dropped" not in received:
        received += os.read(reads, 1 << 16)
    assert b" ERROR a: message 0 " in received
    assert b"message 4999" not in received
    while b"the last one" not in received:
        logger.error("the %s one", "last")  # repeated until the pipe has room
        received += os.read(reads, 1 << 16)
    os.close(reads)


def test_log_full_disk_drops_messages_only():
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    full = os.open("/dev/full", os.O_WRONLY)
    handler = NonBlockingLogHandler(full, LogConfig(format="json"))
    logger = logging.Logger("a")
    logger.addHandler(handler)
    for _ in range(3):
        logger.error("no room")
    handler.wait(30.0)
    os.dup2(writes, full)
    logger.error("room again")
    handler.wait(30.0)
    lines = [json.loads(line)["message"] for line in os.read(reads, 1 << 16).splitlines()]
    assert lines == ["room again", "3 messages were dropped: the log is not read fast enough"]


def test_log_unformattable_message_is_ignored():
    reads, writes = os.pipe()
    logger = logging.Logger("a")
    logger.addHandler(NonBlockingLogHandler(writes))
    logger.error("%d", "text")
    assert b"could not be formatted: TypeError" in os.read(reads, 1 << 16)
    os.close(reads)

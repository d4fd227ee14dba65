"""Stream source that consumes a Kafka topic; messages are JSON objects. Requires the extra `kafka`.

Partitions that are added to the topic later are read from their first message, as soon as the brokers report them.
Offsets are committed with the data and never to the brokers, so a restart resumes exactly after the data (exactly
once).
"""

import functools
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from nestrec.base.errors import UserError, require
from nestrec.base.lazy import import_extra
from nestrec.data.prepare.json_lines import JsonLinesReader
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.streaming.stream_source import (
    StreamChunk,
    StreamPosition,
    StreamRows,
    StreamSource,
    StreamSourceSpec,
    empty_batch,
)

MESSAGES_PER_TURN = 512
"""Number of messages read from a partition before the next one, round-robin; fewer if no more are available."""
_TIMEOUT_S = 10.0
"""Timeout of requests to the brokers, in seconds."""
_RESTART_REMEDY = "use the topic that was read before, or start a new run"


class KafkaSource(StreamSource):
    """Stream source of a Kafka topic.

    Its position consists of the next offset of each partition and the state of the round-robin.

    Args:
        address: kafka://HOST:PORT[,HOST:PORT]/TOPIC[?name=value]; the query contains librdkafka settings.
        columns: Fields of the messages to read.
    """

    def __init__(self, address: str, columns: tuple[str, ...]):
        parts = urlsplit(address)
        self._topic = parts.path.strip("/")
        self._address = address
        if not self._topic or not parts.netloc:
            remedy = "write kafka://HOST:PORT[,HOST:PORT]/TOPIC"
            raise UserError("the address lacks brokers or a topic", option="SOURCE", value=address, remedy=remedy)
        self._settings = {
            "bootstrap.servers": parts.netloc,
            "group.id": "nestrec",  # required by the client; offsets are never committed to the brokers
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,  # the last offsets may belong to control records
            **dict(parse_qsl(parts.query)),
        }
        self._kafka = import_extra("confluent_kafka", "kafka", "needs confluent-kafka", field="SOURCE", value="kafka")
        self._lines = JsonLinesReader(columns)
        self._consumers: dict[int, tuple[Any, int]] = {}
        self._known_partitions: list[int] = []
        # Metadata requests use a separate connection: brokers answer in order per connection, and a fetch without new
        # messages blocks for half a second.
        self._metadata_consumer = self._make_consumer()
        self._cluster = self._metadata().cluster_id or ""
        self._list_partitions()  # raises an error if the topic does not exist

    def identity(self) -> str:
        """Return the cluster id and topic: broker addresses change, but the id of a cluster does not."""
        return f"kafka:{self._cluster}/{self._topic}"

    def read(self, position: StreamPosition, max_rows: int) -> StreamRows | None:
        results = (self.fetch(chunk) for chunk in self.list_chunks(position, max_rows, 1))
        return next((rows for rows in results if not rows.is_empty), None)

    def list_chunks(self, position: StreamPosition, max_rows: int, num_ranks: int) -> list[StreamChunk]:
        offsets = dict(position.get("offsets", {}))
        turn = int(position.get("turn", 0))
        taken = int(position.get("taken", 0))
        chunks = list[StreamChunk]()
        num_empty = 0
        bounds = functools.cache(self._watermarks)
        partitions = self._check_partitions(offsets)
        while max_rows > 0 and num_empty <= len(partitions):
            partition = partitions[turn % len(partitions)]
            low, high = bounds(partition)
            offset = self._check_offset(partition, offsets.get(str(partition)), low, high)
            count = min(max_rows, MESSAGES_PER_TURN - taken, high - offset)
            if count <= 0:
                turn, taken, num_empty = (turn + 1) % len(partitions), 0, num_empty + 1
                continue
            max_rows, taken, num_empty = max_rows - count, taken + count, 0
            offsets[str(partition)] = offset + count
            next_position = {"offsets": dict(offsets), "turn": turn, "taken": taken}
            request = {"partition": partition, "from": offset, "to": offset + count, "next_position": next_position}
            chunks.append(StreamChunk(partitions.index(partition), request))
        return chunks

    def fetch(self, chunk: StreamChunk) -> StreamRows:
        partition, first, end = (int(chunk.request[name]) for name in ("partition", "from", "to"))
        messages = self._read_messages(partition, first, end)
        if not messages:
            return StreamRows(empty_batch(f"{self._topic}/{partition}"), chunk.request["next_position"], 0.0)
        # A message without a value (tombstone) deletes its key; events are never deleted, so it becomes a bad row.
        lines = [(message.value() or b"null").decode("utf-8", "replace") for message in messages]
        numbers = np.array([message.offset() + 1 for message in messages], dtype=np.int64)
        batch = self._lines.parse_lines(f"{self._topic}/{partition}", lines, numbers)
        timestamps_ms = np.array([message.timestamp()[1] for message in messages], dtype=np.int64)
        arrived_ms = timestamps_ms[np.searchsorted(numbers, batch.lines)]
        return StreamRows(batch, chunk.request["next_position"], int(timestamps_ms.max()) / 1000, arrived_ms=arrived_ms)

    def lag(self, position: StreamPosition) -> dict[str, float]:
        offsets = position.get("offsets", {})
        num_unread = 0
        for partition in self._check_partitions(offsets):
            low, high = self._watermarks(partition)
            num_unread += high - max(low, int(offsets.get(str(partition), 0)))
        return {"messages": float(num_unread)}

    def close(self) -> None:
        for consumer in (self._metadata_consumer, *(consumer for consumer, _ in self._consumers.values())):
            consumer.close()
        self._consumers.clear()

    def _check_offset(self, partition: int, offset: int | None, low: int, high: int) -> int:
        """Return the offset to continue from; the first messages of a partition may have been deleted."""
        if offset is not None and offset > high:
            raise UserError(
                f"partition {partition} ends at offset {high}, before the position {offset}; the topic was recreated",
                option="SOURCE",
                value=self._address,
                remedy=_RESTART_REMEDY,
            )
        require(
            offset is None or offset >= low,
            f"the messages from offset {offset} to {low} of partition {partition} were deleted before they were read",
            option="SOURCE",
            value=self._address,
            remedy="increase the retention of the topic (retention.ms), or start a new run",
        )
        return max(offset or 0, low)

    def _read_messages(self, partition: int, first: int, end: int) -> list[Any]:
        """Read the messages of an offset range; compaction leaves gaps."""
        consumer = self._consumer_at(partition, first)
        messages: list[Any] = []
        next_offset = first
        deadline_s = time.monotonic() + _TIMEOUT_S
        while next_offset < end:
            received = self._call(lambda count=end - next_offset: consumer.consume(count, timeout=0.5))
            if not received and time.monotonic() > deadline_s:
                raise self._unavailable_error(f"no message after offset {next_offset} of partition {partition}")
            for message in received:
                error = message.error()
                if error is not None and error.code() == self._kafka.KafkaError._PARTITION_EOF:
                    next_offset = max(next_offset, message.offset())  # the rest of the range is a gap
                elif error is not None:
                    raise self._unavailable_error(error)
                else:
                    next_offset = message.offset() + 1
                    messages += [message] if next_offset <= end else []
        self._consumers[partition] = (consumer, next_offset)
        return messages

    def _consumer_at(self, partition: int, offset: int) -> Any:
        consumer, current_offset = self._consumers.get(partition, (None, -1))
        if consumer is None:
            consumer = self._make_consumer()
        if current_offset != offset:
            consumer.assign([self._kafka.TopicPartition(self._topic, partition, offset)])
        self._consumers[partition] = (consumer, offset)
        return consumer

    def _metadata(self) -> Any:
        return self._call(lambda: self._metadata_consumer.list_topics(self._topic, timeout=_TIMEOUT_S))

    def _list_partitions(self) -> list[int]:
        """Return the partitions of the topic; if brokers cannot report them during an election, the last known ones."""
        topic = self._metadata().topics[self._topic]
        error = None if topic.error is None else topic.error.code()
        if error == self._kafka.KafkaError.UNKNOWN_TOPIC_OR_PART or (error is None and not topic.partitions):
            remedy = "create the topic, or write to it first"
            raise UserError("the topic does not exist", option="SOURCE", value=self._address, remedy=remedy)
        if error is None:
            self._known_partitions = sorted(topic.partitions)
        elif not self._known_partitions:
            raise self._unavailable_error(topic.error)
        return self._known_partitions

    def _check_partitions(self, offsets: Mapping[str, int]) -> list[int]:
        """Return the current partitions of the topic, which must include all partitions that were read before."""
        partitions = self._list_partitions()
        missing = sorted({int(partition) for partition in offsets} - set(partitions))
        if missing:
            raise UserError(
                f"partition {missing[0]}, which was read before, does not exist; the topic was recreated",
                option="SOURCE",
                value=self._address,
                remedy=_RESTART_REMEDY,
            )
        return partitions

    def _watermarks(self, partition: int) -> tuple[int, int]:
        topic_partition = self._kafka.TopicPartition(self._topic, partition)
        low, high = self._call(
            lambda: self._metadata_consumer.get_watermark_offsets(topic_partition, timeout=_TIMEOUT_S)
        )
        return int(low), int(high)

    def _make_consumer(self) -> Any:
        return self._call(lambda: self._kafka.Consumer(self._settings))

    def _call(self, action: Any) -> Any:
        try:
            return action()
        except self._kafka.KafkaException as error:
            raise self._unavailable_error(error) from error

    def _unavailable_error(self, error: object) -> UserError:
        remedy = "check the address and that the brokers are running; a restart resumes from the last position"
        return UserError(f"the topic cannot be read: {error}", option="SOURCE", value=self._address, remedy=remedy)


def _open_topic(address: str, log: LogColumns, columns: tuple[str, ...]) -> StreamSource:
    return KafkaSource(address, columns)


SOURCE = StreamSourceSpec("Kafka topic", lambda address: address.startswith("kafka://"), _open_topic)

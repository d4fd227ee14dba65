"""A topic of Kafka: messages are JSON objects. Its client is an extra (`pip install nestrec[kafka]`).

Partitions that a topic is given later are read from their first message, as soon as the brokers tell of them.
Offsets are kept with the data and never by the brokers: who reads again, reads from where the data ends.
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
    no_rows,
)

ROWS_A_TURN = 512
"""Partitions are read by turns of so many messages, or of those that are there."""
_ANSWER_S = 10.0
"""Brokers that say nothing for so long are taken for gone."""
_ANEW = "name the topic that was read so far, or begin a run anew"


class KafkaSource(StreamSource):
    """Position: the next offset of each partition, and whose turn it is."""

    def __init__(self, address: str, wanted: tuple[str, ...]):
        """address: kafka://HOST:PORT[,HOST:PORT]/TOPIC[?name=value], with settings of librdkafka behind the mark."""
        parts = urlsplit(address)
        self._topic = parts.path.strip("/")
        self._address = address
        if not self._topic or not parts.netloc:
            remedy = "write kafka://HOST:PORT[,HOST:PORT]/TOPIC"
            raise UserError("names no brokers or no topic", option="SOURCE", value=address, remedy=remedy)
        self._settings = {
            "bootstrap.servers": parts.netloc,
            "group.id": "nestrec",  # asked for by the client; nothing is committed
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,  # offsets at the end may be of no message
            **dict(parse_qsl(parts.query)),
        }
        self._kafka = import_extra("confluent_kafka", "kafka", "needs confluent-kafka", field="SOURCE", value="kafka")
        self._lines = JsonLinesReader(wanted)
        self._consumers: dict[int, tuple[Any, int]] = {}
        self._known: list[int] = []
        # Questions go past those who fetch: brokers answer a connection in order, and a fetch that finds nothing new
        # waits there for half a second.
        self._asks = self._make_consumer()
        self._cluster = self._metadata().cluster_id or ""
        self._partitions()  # raises where there is no such topic

    def identity(self) -> str:
        """Brokers come and go; a cluster keeps its id."""
        return f"kafka:{self._cluster}/{self._topic}"

    def read(self, position: StreamPosition, max_rows: int) -> StreamRows | None:
        found = (self.fetch(piece) for piece in self.pieces(position, max_rows, 1))
        return next((rows for rows in found if not rows.is_empty), None)

    def pieces(self, position: StreamPosition, max_rows: int, number: int) -> list[StreamChunk]:
        offsets = dict(position.get("offsets", {}))
        turn = int(position.get("turn", 0))
        taken = int(position.get("taken", 0))
        found = list[StreamChunk]()
        num_empty = 0
        bounds = functools.cache(self._bounds)
        partitions = self._partitions_behind(offsets)
        while max_rows > 0 and num_empty <= len(partitions):
            partition = partitions[turn % len(partitions)]
            low, high = bounds(partition)
            offset = self._checked(partition, offsets.get(str(partition)), low, high)
            wanted = min(max_rows, ROWS_A_TURN - taken, high - offset)
            if wanted <= 0:
                turn, taken, num_empty = (turn + 1) % len(partitions), 0, num_empty + 1
                continue
            max_rows, taken, num_empty = max_rows - wanted, taken + wanted, 0
            offsets[str(partition)] = offset + wanted
            behind = {"offsets": dict(offsets), "turn": turn, "taken": taken}
            what = {"partition": partition, "from": offset, "to": offset + wanted, "behind": behind}
            found.append(StreamChunk(partitions.index(partition), what))
        return found

    def fetch(self, piece: StreamChunk) -> StreamRows:
        partition, first, end = (int(piece.what[name]) for name in ("partition", "from", "to"))
        messages = self._messages(partition, first, end)
        if not messages:
            return StreamRows(no_rows(f"{self._topic}/{partition}"), piece.what["behind"], 0.0)
        # A message without a value takes one back that has its key: events stay, and it is set aside as a bad row.
        lines = [(message.value() or b"null").decode("utf-8", "replace") for message in messages]
        numbers = np.array([message.offset() + 1 for message in messages], dtype=np.int64)
        batch = self._lines.rows(f"{self._topic}/{partition}", lines, numbers)
        at_ms = np.array([message.timestamp()[1] for message in messages], dtype=np.int64)
        came_ms = at_ms[np.searchsorted(numbers, batch.lines)]
        return StreamRows(batch, piece.what["behind"], int(at_ms.max()) / 1000, came_ms=came_ms)

    def lag(self, position: StreamPosition) -> dict[str, float]:
        offsets = position.get("offsets", {})
        left = 0
        for partition in self._partitions_behind(offsets):
            low, high = self._bounds(partition)
            left += high - max(low, int(offsets.get(str(partition), 0)))
        return {"messages": float(left)}

    def close(self) -> None:
        for consumer in (self._asks, *(consumer for consumer, _ in self._consumers.values())):
            consumer.close()
        self._consumers.clear()

    def _checked(self, partition: int, offset: int | None, low: int, high: int) -> int:
        """Where to go on in a partition, of which the first messages may be gone by now."""
        if offset is not None and offset > high:
            raise UserError(
                f"ends at {high} in partition {partition}, where {offset} was read: it was made anew, or is another",
                option="SOURCE",
                value=self._address,
                remedy=_ANEW,
            )
        require(
            offset is None or offset >= low,
            f"has lost the messages from {offset} to {low} of partition {partition}",
            option="SOURCE",
            value=self._address,
            remedy="keep messages for longer (retention.ms), or begin a run anew",
        )
        return max(offset or 0, low)

    def _messages(self, partition: int, first: int, end: int) -> list[Any]:
        """Those of a run of offsets; what was compacted away leaves gaps."""
        consumer = self._at(partition, first)
        found: list[Any] = []
        at = first
        end_s = time.monotonic() + _ANSWER_S
        while at < end:
            got = self._guarded(lambda left=end - at: consumer.consume(left, timeout=0.5))
            if not got and time.monotonic() > end_s:
                raise self._gone(f"no message behind offset {at} of partition {partition}")
            for message in got:
                error = message.error()
                if error is not None and error.code() == self._kafka.KafkaError._PARTITION_EOF:
                    at = max(at, message.offset())  # what is left of the run is a gap
                elif error is not None:
                    raise self._gone(error)
                else:
                    at = message.offset() + 1
                    found += [message] if at <= end else []
        self._consumers[partition] = (consumer, at)
        return found

    def _at(self, partition: int, offset: int) -> Any:
        consumer, at = self._consumers.get(partition, (None, -1))
        if consumer is None:
            consumer = self._make_consumer()
        if at != offset:
            consumer.assign([self._kafka.TopicPartition(self._topic, partition, offset)])
        self._consumers[partition] = (consumer, offset)
        return consumer

    def _metadata(self) -> Any:
        return self._guarded(lambda: self._asks.list_topics(self._topic, timeout=_ANSWER_S))

    def _partitions(self) -> list[int]:
        """Those that the topic has now; while brokers change places and cannot tell, those that it had."""
        topic = self._metadata().topics[self._topic]
        error = None if topic.error is None else topic.error.code()
        if error == self._kafka.KafkaError.UNKNOWN_TOPIC_OR_PART or (error is None and not topic.partitions):
            remedy = "create the topic, or write to it first"
            raise UserError("has no such topic", option="SOURCE", value=self._address, remedy=remedy)
        if error is None:
            self._known = sorted(topic.partitions)
        elif not self._known:
            raise self._gone(topic.error)
        return self._known

    def _partitions_behind(self, offsets: Mapping[str, int]) -> list[int]:
        """Those that the topic has now, which are those that were read before and any that it was given since."""
        partitions = self._partitions()
        gone = sorted({int(partition) for partition in offsets} - set(partitions))
        if gone:
            raise UserError(
                f"has no partition {gone[0]}, which was read: it was made anew, or is another",
                option="SOURCE",
                value=self._address,
                remedy=_ANEW,
            )
        return partitions

    def _bounds(self, partition: int) -> tuple[int, int]:
        place = self._kafka.TopicPartition(self._topic, partition)
        low, high = self._guarded(lambda: self._asks.get_watermark_offsets(place, timeout=_ANSWER_S))
        return int(low), int(high)

    def _make_consumer(self) -> Any:
        return self._guarded(lambda: self._kafka.Consumer(self._settings))

    def _guarded(self, action: Any) -> Any:
        try:
            return action()
        except self._kafka.KafkaException as error:
            raise self._gone(error) from error

    def _gone(self, error: object) -> UserError:
        remedy = "check the address and that the brokers run; started again, it goes on where it stood"
        return UserError(f"cannot be read: {error}", option="SOURCE", value=self._address, remedy=remedy)


def _open_topic(address: str, log: LogColumns, wanted: tuple[str, ...]) -> StreamSource:
    return KafkaSource(address, wanted)


SOURCE = StreamSourceSpec("a topic of Kafka", lambda address: address.startswith("kafka://"), _open_topic)

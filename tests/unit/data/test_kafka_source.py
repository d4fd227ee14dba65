"""A Kafka topic as a stream source, on the mock brokers of the client library."""

from urllib.parse import urlsplit

import confluent_kafka
import pytest

from nestrec.base.errors import UserError
from nestrec.data.streaming.kafka_source import KafkaSource
from support.stream_fixtures import stream_events, topic


def test_kafka_lag_does_not_wait_for_an_empty_fetch() -> None:
    columns = tuple(stream_events(1)[0])
    with topic(stream_events(60)) as address:
        source = KafkaSource(f"{address}?fetch.wait.max.ms=30000", columns)
        position = {}
        number = 0
        while (rows := source.read(position, 5)) is not None:  # three fetches are waiting at this point
            position, number = rows.position, number + rows.batch.num_rows
            assert source.lag(position) == {"messages": 60.0 - number}
        source.close()
    assert number == 60


def test_kafka_offset_beyond_topic_end_is_an_error() -> None:
    """The topic was deleted and created again; waiting would skip the events up to the old offset."""
    columns = tuple(stream_events(1)[0])
    with topic(stream_events(3), partitions=1) as address:
        source = KafkaSource(address, columns)
        assert source.read({"offsets": {"0": 3}}, 5) is None
        with pytest.raises(UserError, match="partition 0 ends at offset 3, before the position 4"):
            source.read({"offsets": {"0": 4}}, 5)
        source.close()


def test_kafka_message_without_value_is_a_bad_row() -> None:
    columns = tuple(stream_events(1)[0])
    with topic(stream_events(3), partitions=1) as address:
        producer = confluent_kafka.Producer({"bootstrap.servers": urlsplit(address).netloc})
        producer.produce("events", None, key=b"of an event", partition=0)
        assert producer.flush(20) == 0
        source = KafkaSource(address, columns)
        rows = source.read({}, 10)
        source.close()
    assert rows is not None
    assert rows.batch.num_rows == 3
    assert len(rows.batch.bad) == 1
    assert rows.position["offsets"] == {"0": 4}

"""A topic as the source of a stream, on brokers of the client library itself."""

from urllib.parse import urlsplit

import confluent_kafka
import pytest

from nestrec.base.errors import UserError
from nestrec.data.streaming.kafka_source import KafkaSource
from support.stream_fixtures import stream_events, topic


def test_questions_to_brokers_do_not_wait_for_a_fetch_that_finds_nothing() -> None:
    wanted = tuple(stream_events(1)[0])
    with topic(stream_events(60)) as address:
        source = KafkaSource(f"{address}?fetch.wait.max.ms=30000", wanted)
        position = {}
        number = 0
        while (rows := source.read(position, 5)) is not None:  # of those who fetch, three wait by then
            position, number = rows.position, number + rows.batch.num_rows
            assert source.lag(position) == {"messages": 60.0 - number}
        source.close()
    assert number == 60


def test_a_topic_that_ends_before_what_was_read_is_not_waited_for() -> None:
    """It was made anew under its name: nothing would come until it is as long as the one before."""
    wanted = tuple(stream_events(1)[0])
    with topic(stream_events(3), partitions=1) as address:
        source = KafkaSource(address, wanted)
        assert source.read({"offsets": {"0": 3}}, 5) is None
        with pytest.raises(UserError, match="ends at 3 in partition 0, where 4 was read"):
            source.read({"offsets": {"0": 4}}, 5)
        source.close()


def test_a_message_without_a_value_is_a_bad_row() -> None:
    wanted = tuple(stream_events(1)[0])
    with topic(stream_events(3), partitions=1) as address:
        producer = confluent_kafka.Producer({"bootstrap.servers": urlsplit(address).netloc})
        producer.produce("events", None, key=b"of an event", partition=0)
        assert producer.flush(20) == 0
        source = KafkaSource(address, wanted)
        rows = source.read({}, 10)
        source.close()
    assert rows is not None
    assert rows.batch.num_rows == 3
    assert len(rows.batch.bad) == 1
    assert rows.position["offsets"] == {"0": 4}

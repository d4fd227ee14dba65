"""What Prometheus reads of a front: its own counts, and those of every instance with the slot as a label."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from nestrec.serving.core.slot_router import Router
from nestrec.serving.http.server_metrics import BackgroundCollector, FilesCollector, RefusalCollector
from nestrec.serving.security.server_security import ServerSecurity


class GatewayMetrics:
    """Put together when it is asked for."""

    def __init__(self, router: Router):
        self.num_failed_over = 0
        """requests that were begun again on another instance"""
        self.num_short_signals = 0
        """signals that no instance had a use for, and that went to none"""
        self.refusals: Mapping[str, int] = {}
        """requests that the gate let not in, by reason"""
        self._own = CollectorRegistry()
        self._own.register(_FrontCollector(self, router))
        self._own.register(RefusalCollector(lambda: self.refusals))
        self.safety: ServerSecurity | None = None
        """Keys and certificates of the front; None until `report_files_of` sets them."""
        self._own.register(FilesCollector(lambda: self.safety))
        self._own.register(BackgroundCollector())
        ProcessCollector(namespace="nestrec_front", registry=self._own)

    def exposition(self, told: Mapping[int, bytes]) -> bytes:
        """told: what instances have answered, by slot."""
        return generate_latest(_Merged(_with_slots(told, self._own.collect())))


class _FrontCollector(Collector):
    def __init__(self, metrics: GatewayMetrics, router: Router):
        self._metrics = metrics
        self._router = router

    def collect(self) -> Iterable[Metric]:
        alive = GaugeMetricFamily("nestrec_slot_alive", "Whether users are sent to an instance", labels=["slot"])
        loads = GaugeMetricFamily("nestrec_slot_requests", "Requests under way at an instance", labels=["slot"])
        for slot in range(self._router.num_slots):
            alive.add_metric([str(slot)], float(self._router.is_alive[slot]))
            loads.add_metric([str(slot)], self._router.loads[slot])
        yield from (alive, loads)
        events = CounterMetricFamily("nestrec_front_events", "Requests off a user's own slot", labels=["event"])
        events.add_metric(["diverted"], self._router.num_diverted)
        events.add_metric(["leaked"], self._router.num_leaked)
        events.add_metric(["failed_over"], self._metrics.num_failed_over)
        events.add_metric(["short_signal"], self._metrics.num_short_signals)
        yield events


class _Merged(CollectorRegistry):
    """Families as they are, in place of collectors."""

    def __init__(self, families: Iterable[Metric]):
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _with_slots(told: Mapping[int, bytes], own: Iterable[Metric]) -> Iterable[Metric]:
    """Merge the families of the front, which have no slot, with those of its instances: a name may occur once."""
    merged = {family.name: family for family in own}
    for slot, text in told.items():
        for family in text_string_to_metric_families(text.decode()):
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.samples.append(sample._replace(labels={**sample.labels, "slot": str(slot)}))
    return merged.values()

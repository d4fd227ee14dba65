"""Prometheus metrics of the gateway: its own, and those of all instances with a `slot` label."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from nestrec.serving.core.slot_router import Router
from nestrec.serving.http.server_metrics import AuthFailureCollector, BackgroundCollector, FilesCollector
from nestrec.serving.security.server_security import ServerSecurity


class GatewayMetrics:
    """Metrics of the gateway, collected at each scrape."""

    def __init__(self, router: Router):
        self.num_failed_over = 0
        """Number of requests that were retried on another instance."""
        self.num_preinfer_skipped = 0
        """Number of pre-infer requests answered by the gateway because their history is too short to be useful."""
        self.auth_failures: Mapping[str, int] = {}
        """Requests that authentication or rate limits rejected, by reason."""
        self._own = CollectorRegistry()
        self._own.register(_GatewayCollector(self, router))
        self._own.register(AuthFailureCollector(lambda: self.auth_failures))
        self.security: ServerSecurity | None = None
        """Keys and certificates of the gateway; None until `set_security` sets them."""
        self._own.register(FilesCollector(lambda: self.security))
        self._own.register(BackgroundCollector())
        ProcessCollector(namespace="nestrec_gateway", registry=self._own)

    def exposition(self, expositions: Mapping[int, bytes]) -> bytes:
        """Return the metrics of the fleet in the Prometheus text format.

        Args:
            expositions: Responses of the instances to GET /metrics, by slot.
        """
        return generate_latest(_MergedRegistry(_with_slots(expositions, self._own.collect())))


class _GatewayCollector(Collector):
    def __init__(self, metrics: GatewayMetrics, router: Router):
        self._metrics = metrics
        self._router = router

    def collect(self) -> Iterable[Metric]:
        alive = GaugeMetricFamily("nestrec_instance_up", "1 if the instance receives requests", labels=["slot"])
        loads = GaugeMetricFamily(
            "nestrec_instance_inflight_requests", "Requests in flight to the instance", labels=["slot"]
        )
        for slot in range(self._router.num_slots):
            alive.add_metric([str(slot)], float(self._router.is_alive[slot]))
            loads.add_metric([str(slot)], self._router.loads[slot])
        yield from (alive, loads)
        events = CounterMetricFamily(
            "nestrec_gateway_events", "Requests not sent to their user's own slot", labels=["event"]
        )
        events.add_metric(["diverted"], self._router.num_diverted)
        events.add_metric(["spilled"], self._router.num_spilled)
        events.add_metric(["failed_over"], self._metrics.num_failed_over)
        events.add_metric(["preinfer_skipped"], self._metrics.num_preinfer_skipped)
        yield events


class _MergedRegistry(CollectorRegistry):
    """Registry of metric families that are already collected."""

    def __init__(self, families: Iterable[Metric]):
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _with_slots(expositions: Mapping[int, bytes], own: Iterable[Metric]) -> Iterable[Metric]:
    """Merge the metric families of the gateway, which have no slot label, with those of its instances.

    A family name may occur only once in an exposition.
    """
    merged = {family.name: family for family in own}
    for slot, text in expositions.items():
        for family in text_string_to_metric_families(text.decode()):
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.samples.append(sample._replace(labels={**sample.labels, "slot": str(slot)}))
    return merged.values()

"""The benchmarks by name. Those of other packages come by entry points of `nestrec.benches`."""

from nestrec.base.seam import Seam
from nestrec.bench.bench import Bench

BENCHES: Seam[Bench] = Seam(
    "nestrec.benches",
    "bench",
    {
        "attention": "nestrec.bench.kernels.attention:BENCH",
        "balance": "nestrec.bench.balance.balance:BENCH",
        "calibrate": "nestrec.bench.planning.calibrate:BENCH",
        "choices": "nestrec.bench.quality.choices:BENCH",
        "features": "nestrec.bench.quality.features:BENCH",
        "clustering": "nestrec.bench.balance.clustering:BENCH",
        "engine": "nestrec.bench.serving.engine_step:BENCH",
        "evaluations": "nestrec.bench.quality.evaluations:BENCH",
        "exchange": "nestrec.bench.kernels.exchange:BENCH",
        "fresh": "nestrec.bench.quality.fresh:BENCH",
        "front": "nestrec.bench.serving.front:BENCH",
        "host": "nestrec.bench.step.host:BENCH",
        "layer": "nestrec.bench.kernels.layer:BENCH",
        "lookup": "nestrec.bench.kernels.lookup:BENCH",
        "negatives": "nestrec.bench.step.negatives:BENCH",
        "overload": "nestrec.bench.serving.overload:BENCH",
        "papers": "nestrec.bench.planning.papers:BENCH",
        "peers": "nestrec.bench.peers.peers:BENCH",
        "prediction": "nestrec.bench.planning.prediction:BENCH",
        "prepare": "nestrec.bench.quality.prepare:BENCH",
        "quality": "nestrec.bench.quality.quality:BENCH",
        "relay": "nestrec.bench.serving.relay:BENCH",
        "retrieval": "nestrec.bench.serving.retrieval:BENCH",
        "schedules": "nestrec.bench.schedules.schedules:BENCH",
        "simulator": "nestrec.bench.planning.simulator:BENCH",
        "sparse": "nestrec.bench.schedules.sparse:BENCH",
        "step": "nestrec.bench.step.step:BENCH",
        "stores": "nestrec.bench.kernels.stores:BENCH",
    },
    of=Bench,
)

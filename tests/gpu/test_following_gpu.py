"""A server that follows published versions on a GPU scores like a restarted server; CUDA graphs read the tables."""

import numpy as np
import pytest
import torch
from changing_run import ChangingRun, assert_same_rows

from nestrec.artifacts.storage import storage_of
from nestrec.distributed import Topology
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec.serving.versions.version_store import VersionStore
from support.tiny_runs import make_datasets

pytestmark = pytest.mark.gpu
CONFIG = ServiceConfig(engine=EngineConfig(max_queue_delay_s=1e9))


def scores_of(service, role):
    items = np.arange(1, 6)
    zeros = np.zeros(5, np.int64)
    history = History(items=items, times_ms=np.arange(5), actions=zeros)
    (engine,) = service.deployment(role).engines
    candidates = Candidates(items=np.arange(6, 25), now_ms=9)
    return [engine.submit_rank("ann", history, candidates, timeout_s=30.0).future.result().scores for _ in range(2)]


@pytest.mark.parametrize(("family", "store"), [("ranking", "graphs"), ("ranking", "lru"), ("hstu", "lru")])
@pytest.mark.parametrize("tables", [TablesConfig(), TablesConfig(store="dram", cache_rows=8)])
def test_version_follower_scores_equal_restarted_server(tmp_path, family, store, tables):
    make_datasets(tmp_path, num_topics=5)
    address = str(tmp_path / "published")
    run = ChangingRun.begin(Topology.single(), tmp_path, address, family=family, store=store, seed=7)

    def publish():
        run.change()
        run.publisher.publish(run.session, run.step)
        run.publisher.close()

    publish()
    service = Service.load([address], CONFIG, "cuda", tables)
    reloader = Reloader(service, "cuda", tables)
    ((role, follower),) = reloader.followers.items()
    before = scores_of(service, role)
    for _ in range(4):
        publish()
        assert follower.poll(), follower.counts.problem
        other = Service.load([address], CONFIG, "cuda", tables)
        for name, table in other.deployment(role).servable.tables.items():
            assert_same_rows(service.deployment(role).servable.tables[name], table, name)
        followed, restarted = scores_of(service, role), scores_of(other, role)
        other.close()
        for scores, expected in zip(followed, restarted, strict=True):
            assert np.array_equal(scores, expected)
    assert follower.counts.applied == 4
    assert not np.allclose(before[0], followed[0])
    reloader.close()
    service.close()
    torch.cuda.synchronize()


def test_version_delta_is_applied_while_batches_run(tmp_path):
    make_datasets(tmp_path, num_topics=5)
    address = str(tmp_path / "published")
    run = ChangingRun.begin(Topology.single(), tmp_path, address, family="ranking", store="graphs", seed=7)
    for _ in range(2):
        run.change()
        run.publisher.publish(run.session, run.step)
        run.publisher.close()
    versions = VersionStore(storage_of(address))
    newest, before = list(versions.history())[:2]
    service = Service.load([f"{address}@{before[1]}"], CONFIG, "cuda")
    reloader = Reloader(service, "cuda", TablesConfig())
    ((_, follower),) = reloader.followers.items()
    (step,) = versions.delta_chain(newest, follower.digest)
    follower.stage(step)  # loads kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # a long batch on the stream of the engine
    batch_end = torch.cuda.Event()
    batch_end.record()
    follower.stage(step)
    assert not batch_end.query(), "staging a version waited for the running batch"
    torch.cuda.synchronize()
    reloader.close()
    service.close()

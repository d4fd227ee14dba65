"""Load during rolling updates of a fleet, and checks of its responses."""

import asyncio
import itertools
import json
import subprocess
import sys
import time

import httpx
from operator_results import record

from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.model.servable import Servable
from nestrec_bench.harness.random_model import random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
HISTORY = {"items": ["1", "2"], "times_ms": [1, 2]}
RANK_BODY = {"history": HISTORY, "candidates": ["3", "4"], "now_ms": 9, "timeout_ms": 10_000}
NUM_SWAPS = 10
NUM_INSTANCES = 3
NUM_USERS = 9


def write_versions(root):
    """Write one servable folder per swap, and one for the start; return `root`."""
    for seed in range(NUM_SWAPS + 1):
        write_servable(random_retrieval(ENCODER, num_items=20, seed=seed), root / str(seed))
    return root


class Load:
    """Load generator: each user sends a pre-infer and a ranking request in turn, and no request is retried.

    Args:
        port: Port of the gateway or server.
        rank_body: Body of the ranking requests, without the user.
    """

    def __init__(self, port, *, rank_body=RANK_BODY):
        self._rank_body = rank_body
        self._preinfer_body = {"history": rank_body["history"], "timeout_ms": rank_body["timeout_ms"]}
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0)
        self.responses = {}
        self.num_requests = 0
        self.num_failed = 0
        self.num_split = 0
        """Number of pairs whose pre-infer and ranking response have different model versions."""
        self.is_over = False

    async def send_requests(self, user):
        """Send requests of a user until `is_over`, and record version and scores of each ranking response."""
        responses = self.responses[user] = []
        while not self.is_over:
            preinferred = await self._post("/v1/preinfer", {"user": user, **self._preinfer_body})
            ranked = await self._post("/v1/rank", {"user": user, **self._rank_body})
            if preinferred is not None and ranked is not None:
                self.num_split += preinferred["model"] != ranked["model"]
                responses.append((ranked["model"], json.dumps(ranked["scores"])))

    async def _post(self, path, body):
        self.num_requests += 1
        headers = {"x-nestrec-user": body["user"]}
        try:
            response = await self._http.post(path, json=body, headers=headers)
        except httpx.HTTPError:
            self.num_failed += 1
            return None
        self.num_failed += response.status_code not in (200, 202)
        return response.json() if response.status_code in (200, 202) else None

    async def close(self):
        await self._http.aclose()


def run_command(*words):
    """Run a nestrec command and return its output."""
    process = subprocess.run([sys.executable, "-m", "nestrec", *words], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


async def roll_under_load(port, folders):
    """Roll through all versions and back by one, under load; return the load and the seconds of each swap."""
    load = Load(port)
    tasks = [asyncio.create_task(load.send_requests(f"u{number}")) for number in range(NUM_USERS)]
    address = f"http://127.0.0.1:{port}"
    took_s = []
    for number in range(1, NUM_SWAPS + 1):
        start_s = time.monotonic()
        output = await asyncio.to_thread(run_command, "swap", address, str(folders / str(number)))
        took_s.append(time.monotonic() - start_s)
        assert output.count(Servable.load(folders / str(number)).version[:12]) == NUM_INSTANCES
        await _wait_for_requests(load)
    output = await asyncio.to_thread(run_command, "rollback", address)
    assert output.count(Servable.load(folders / str(NUM_SWAPS - 1)).version[:12]) == NUM_INSTANCES
    load.is_over = True
    await asyncio.gather(*tasks)
    await load.close()
    return load, took_s


async def _wait_for_requests(load):
    """Wait until about two pairs of requests per user were sent."""
    target = load.num_requests + 4 * NUM_USERS
    while load.num_requests < target:
        await asyncio.sleep(0.02)


async def scale_under_load(port, counts):
    """Scale a fleet to each number of instances in turn, under load; return the load."""
    load = Load(port)
    tasks = [asyncio.create_task(load.send_requests(f"u{number}")) for number in range(NUM_USERS)]
    for count in counts:
        output = await asyncio.to_thread(run_command, "scale", f"http://127.0.0.1:{port}", str(count))
        assert output == f"{count} instance{'' if count == 1 else 's'}\n"
        await _wait_for_requests(load)
    load.is_over = True
    await asyncio.gather(*tasks)
    await load.close()
    return load


def check_rolling_updates(front, folders, load, took_s):
    """Check and record that no request failed, no response and no pair mixes versions, and no user went back a version.

    Args:
        front: Load balancer in front of the instances, as named in the recorded row.
        folders: Folder of the versions.
        load: Load during the swaps.
        took_s: Seconds of each swap.
    """
    versions = [Servable.load(folders / str(number)).version[:12] for number in range(NUM_SWAPS + 1)]
    versions.append(versions[NUM_SWAPS - 1])
    scores = {}
    num_back = 0
    for responses in load.responses.values():
        for version, found in responses:
            scores.setdefault(version, set()).add(found)
        changes = [version for version, _ in itertools.groupby(version for version, _ in responses)]
        expected = iter(versions)
        num_back += not all(version in expected for version in changes)
    num_mixed = sum(len(found) > 1 for found in scores.values())
    record(
        f"rolling swaps behind {front}",
        instances=NUM_INSTANCES,
        swaps=NUM_SWAPS,
        rollbacks=1,
        requests=load.num_requests,
        failed=load.num_failed,
        mixed=num_mixed,
        split_pairs=load.num_split,
        users_sent_back=num_back,
        median_swap_s=round(sorted(took_s)[len(took_s) // 2], 2),
    )
    assert load.num_failed == num_mixed == load.num_split == num_back == 0
    assert len(scores) == NUM_SWAPS + 1

"""Users who ask while the models of a fleet roll, and what must be true of their answers."""

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
ASKED = {"history": HISTORY, "candidates": ["3", "4"], "now_ms": 9, "timeout_ms": 10_000}
NUM_SWAPS, NUM_INSTANCES, NUM_USERS = 10, 3, 9


def write_versions(root):
    """A folder for each swap, and one to begin with."""
    for seed in range(NUM_SWAPS + 1):
        write_servable(random_retrieval(ENCODER, num_items=20, seed=seed), root / str(seed))
    return root


class Load:
    """Each user announces and asks, one request after the other, and nothing is sent twice."""

    def __init__(self, port, *, asked=ASKED):
        """asked: of each user."""
        self._asked = asked
        self._signal = {"history": asked["history"], "timeout_ms": asked["timeout_ms"]}
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0)
        self.answers = {}
        self.num_requests = 0
        self.num_failed = 0
        self.num_split = 0
        self.is_over = False

    async def ask(self, user):
        met = self.answers[user] = []
        while not self.is_over:
            told = await self._post("/v1/preinfer", {"user": user, **self._signal})
            ranked = await self._post("/v1/rank", {"user": user, **self._asked})
            if told is not None and ranked is not None:
                self.num_split += told["model"] != ranked["model"]
                met.append((ranked["model"], json.dumps(ranked["scores"])))

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


def command(*words):
    done = subprocess.run([sys.executable, "-m", "nestrec", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def rolled(port, folders):
    load = Load(port)
    tasks = [asyncio.create_task(load.ask(f"u{number}")) for number in range(NUM_USERS)]
    address = f"http://127.0.0.1:{port}"
    took_s = []
    for number in range(1, NUM_SWAPS + 1):
        start_s = time.monotonic()
        said = await asyncio.to_thread(command, "swap", address, str(folders / str(number)))
        took_s.append(time.monotonic() - start_s)
        assert said.count(Servable.load(folders / str(number)).version[:12]) == NUM_INSTANCES
        asked = load.num_requests
        while load.num_requests < asked + 4 * NUM_USERS:
            await asyncio.sleep(0.02)
    said = await asyncio.to_thread(command, "rollback", address)
    assert said.count(Servable.load(folders / str(NUM_SWAPS - 1)).version[:12]) == NUM_INSTANCES
    load.is_over = True
    await asyncio.gather(*tasks)
    await load.close()
    return load, took_s


async def scaled(port, counts):
    """So many instances, one number after the other, with requests between them."""
    load = Load(port)
    tasks = [asyncio.create_task(load.ask(f"u{number}")) for number in range(NUM_USERS)]
    for count in counts:
        said = await asyncio.to_thread(command, "scale", f"http://127.0.0.1:{port}", str(count))
        assert said == f"{count} instance{'' if count == 1 else 's'}\n"
        asked = load.num_requests
        while load.num_requests < asked + 4 * NUM_USERS:
            await asyncio.sleep(0.02)
    load.is_over = True
    await asyncio.gather(*tasks)
    await load.close()
    return load


def check_rolled(front, folders, load, took_s):
    """Keeps the figures: nothing failed, no answer of two versions, no pair of two, nobody who was sent back."""
    versions = [Servable.load(folders / str(number)).version[:12] for number in range(NUM_SWAPS + 1)]
    versions.append(versions[NUM_SWAPS - 1])
    scores = {}
    num_back = 0
    for met in load.answers.values():
        for version, found in met:
            scores.setdefault(version, set()).add(found)
        changes = [version for version, _ in itertools.groupby(version for version, _ in met)]
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

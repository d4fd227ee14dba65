import subprocess
import sys

import pytest

BUSY = """
import atexit, sys, threading, time
import torch
import torch.distributed as dist
from nestrec.base.process import leave

if JOINED:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(print, "registered for the end")
if JOINED:
    def compute():
        x = torch.rand(600, 600)
        while True:
            x @ x
    for _ in range(3):
        threading.Thread(target=compute, daemon=True).start()
    time.sleep(0.1)
print("done", end=" ", flush=True)
threading.Timer(0.5, print, ["not forgotten"]).start()
leave(7)
"""


@pytest.mark.parametrize("is_joined", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_rank_ends_with_its_code_though_threads_compute_and_after_all_that_waits_for_its_end(is_joined):
    """As interpreters end otherwise, threads inside torch end it with SIGABRT."""
    source = BUSY.replace("JOINED", str(is_joined))
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.split("\n") == ["done not forgotten", "registered for the end", ""]


LEAVING = """
import os, threading
import torch.distributed as dist
from nestrec.base import process as leaving

def child(code, hangs):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    destroy = dist.destroy_process_group

    def told():
        if hangs:
            threading.Event().wait()
        destroy()
        print("left", code, not dist.is_initialized())

    dist.destroy_process_group = told
    leaving._LIMIT_S = 0.2 if hangs else 60.0
    leaving.leave(code)

for case in ((0, False), (75, False), (75, True), (76, False)):
    if not (process := os.fork()):
        child(*case)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def test_a_rank_that_has_done_its_work_takes_leave_of_the_others_and_waits_for_none_that_is_gone():
    """Where a rank was lost, nobody takes leave."""
    ended = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=100, check=False)
    said = ["left 0 True", "ended 0", "left 75 True", "ended 75", "ended 75", "ended 76"]
    assert ended.stdout.splitlines() == said, ended.stderr


SCRIPT = """
import atexit, sys
import torch.distributed as dist
from nestrec.base.process import leave_ranks_at_end

atexit.register(lambda: print("still joined:", dist.is_initialized()))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
leave_ranks_at_end()
if FAILS:
    raise ValueError
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_leaves_its_ranks_at_its_end_unless_it_has_failed_and_they_may_not_know(fails):
    source = SCRIPT.replace("FAILS", str(fails))
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (int(fails), f"still joined: {fails}\n")

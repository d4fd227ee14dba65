import subprocess
import sys

import pytest

BUSY = """
import atexit, sys, threading, time
import torch
import torch.distributed as dist
from nestrec.base.process import exit_process

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
exit_process(7)
"""


@pytest.mark.parametrize("is_joined", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_exit_process_keeps_code_and_runs_exit_handlers(is_joined):
    """If the interpreter ends in the usual way, threads inside torch abort the process with SIGABRT."""
    source = BUSY.replace("JOINED", str(is_joined))
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.split("\n") == ["done not forgotten", "registered for the end", ""]


FORKED = """
import os, threading
import torch.distributed as dist
from nestrec.base import process as module

def child(code, hangs):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    destroy = dist.destroy_process_group

    def recorded_destroy():
        if hangs:
            threading.Event().wait()
        destroy()
        print("left", code, not dist.is_initialized())

    dist.destroy_process_group = recorded_destroy
    module._TIMEOUT_S = 0.2 if hangs else 60.0
    module.exit_process(code)

for case in ((0, False), (75, False), (75, True), (76, False)):
    if not (process := os.fork()):
        child(*case)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


def test_destroy_process_groups_does_not_wait_for_lost_ranks():
    """If a rank was lost, the process groups are not destroyed."""
    ended = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=100, check=False)
    expected = ["left 0 True", "ended 0", "left 75 True", "ended 75", "ended 75", "ended 76"]
    assert ended.stdout.splitlines() == expected, ended.stderr


SCRIPT = """
import atexit, sys
import torch.distributed as dist
from nestrec.base.process import destroy_process_groups_at_exit

atexit.register(lambda: print("still joined:", dist.is_initialized()))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
destroy_process_groups_at_exit()
if FAILS:
    raise ValueError
"""


@pytest.mark.parametrize("fails", [False, True])
def test_process_groups_are_destroyed_at_exit_of_script(fails):
    source = SCRIPT.replace("FAILS", str(fails))
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (int(fails), f"still joined: {fails}\n")

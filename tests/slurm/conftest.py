"""A real Slurm of two nodes on loopback, in a temporary folder, for the tests that are slow."""

import contextlib
import ctypes
import dataclasses
import functools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DAEMONS = ("munged", "slurmctld", "slurmd")
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
KILL_WAIT = 15  # seconds between asking a job to end and killing it
# KillWait and cred_expire (how long a requeued job waits) are minutes by default.
SLURM_CONF = """\
ClusterName=instdisc
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
MaxArraySize={max_array}
SchedulerParameters=sched_interval=2,sched_min_interval=200000,bf_interval=2
MinJobAge=300
KillWait={kill_wait}
SlurmdTimeout=20
InactiveLimit=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=2 RealMemory=1000
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run(*command: str | Path, check: bool = True, **kwargs: Any) -> str:
    """The output of a command; its errors in the failure message."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120, **kwargs
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of a condition."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {seconds:.0f} seconds")


@dataclasses.dataclass
class Cluster:
    """The daemons and what asks them."""

    folder: Path
    daemons: list["subprocess.Popen[bytes]"]
    nodes: dict[str, "subprocess.Popen[bytes]"] = dataclasses.field(default_factory=dict)

    def start_node(self, name: str) -> None:
        """Starts a node, for the first time or again."""
        conf = self.folder / "slurm.conf"
        self.nodes[name] = self.start("slurmd", "-D", "-f", conf, "-N", name)

    def lose_node(self, name: str, pids: list[int]) -> None:
        """A node vanishes: its daemon and the processes of its jobs, at once and without a word."""
        self.nodes[name].kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.nodes[name].wait(timeout=10)

    def start(self, *command: str | Path) -> "subprocess.Popen[bytes]":
        """Starts a daemon in the foreground, so that its process is ours to end."""
        with (self.folder / "daemons.log").open("ab") as log:
            words = [str(word) for word in command]
            # With the tests killed, nobody would end it: the kernel does.
            end_with_parent = functools.partial(LIBC.prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
            process = subprocess.Popen(words, stdout=log, stderr=log, preexec_fn=end_with_parent)
            self.daemons.append(process)
            return process

    def stop(self) -> None:
        """Ends the jobs, the daemons, the last started first, and what they left."""
        run("scancel", "--user=root", check=False)
        end = time.monotonic() + KILL_WAIT + 5
        while run("squeue", "-h", check=False).strip() and time.monotonic() < end:
            time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=10)
        for pid in self.left_over():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left_over(self) -> list[int]:
        """Processes that this cluster started: its configuration is in their environment."""
        mark = f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def idle_nodes(self) -> int:
        """How many nodes would take a job."""
        shown = run("sinfo", "-h", "-N", "-o", "%T", check=False)
        return shown.split().count("idle")

    def state(self, job_id: str) -> str:
        """State of a job; it is known for some minutes after its end."""
        shown = run("scontrol", "show", "job", "-o", job_id, check=False)
        return shown.partition("JobState=")[2].partition(" ")[0]

    def wait_state(self, job_id: str, *states: str, seconds: float = 90) -> str:
        """Waits until a job is in one of the states."""
        return wait_for(
            lambda: next((s for s in [self.state(job_id)] if s in states), None),
            seconds,
            f"job {job_id} to be {' or '.join(states)} (is {self.state(job_id)})",
        )


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with two slots each; skipped where Slurm is missing or may not be started."""
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no real Slurm here: {', '.join(missing)} not installed (slurm-wlm, munge)")
    if os.geteuid() != 0:
        pytest.skip("no real Slurm here: its daemons must be started by root")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    port, port1, port2 = free_ports(3)
    host = socket.gethostname()
    text = SLURM_CONF.format(
        host=host,
        folder=folder,
        port=port,
        port1=port1,
        port2=port2,
        max_array=4,
        kill_wait=KILL_WAIT,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    patch = pytest.MonkeyPatch()
    patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    patch.setenv("OMP_NUM_THREADS", "1")
    cluster = Cluster(folder, [])
    try:
        cluster.start(
            "munged", "--foreground", "--force", "--num-threads", "2",
            "--key-file", folder / "munge.key", "--socket", folder / "munge.socket",
            "--pid-file", folder / "munged.pid", "--log-file", folder / "munged.log",
            "--seed-file", folder / "munged.seed",
        )  # fmt: skip
        wait_for((folder / "munge.socket").exists, 10, "munged")
        cluster.start("slurmctld", "-D", "-f", folder / "slurm.conf")
        for node in ("n1", "n2"):
            cluster.start_node(node)
        wait_for(lambda: cluster.idle_nodes() == 2, 30, "two idle nodes")
        yield cluster
    finally:
        cluster.stop()
        patch.undo()

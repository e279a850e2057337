"""Nodes of a Ray cluster on this machine that share no memory and no network: each in namespaces of its own.

A node has an address on a bridge, its own `/dev/shm`, host name, process ids and folder of Ray. It can be killed, all
its processes at once, as by a power cut; stopped, and continued; and cut off from the others. The head node, to which
the driver belongs, has the machine's own memory and an address on the bridge. It needs root.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HEALTH = {
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}  # fmt: skip
_NETWORK = "10.77.{net}.{host}"
_STORE = 80 << 20  # bytes of each node's object store
_MEMORY = "512m"  # of each node's /dev/shm
_TOLD = 3_000  # characters of each log of a node that does not join
_START = 120.0  # seconds
_STARTS = 2  # of a node: Ray does not always bring one up, which is no matter of these tests


def why_not() -> str:
    """Why there can be no such nodes here; empty: there can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    missing = [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--ipc", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c",
         "ip link add p type veth peer name q && mount -t tmpfs tmpfs /dev/shm"], capture_output=True, text=True,
    )  # fmt: skip
    return f"no namespaces, links or mounts here: {probe.stderr.strip()}" if probe.returncode else ""


class Node:
    """A node in its own namespaces.

    Attributes:
        address: its IP address.
        node_id: Ray's.
    """

    def __init__(self, cluster: NamespaceCluster, number: int, resources: dict[str, int]) -> None:
        self.address = cluster.address_of(number)
        self._folder = cluster.folder
        self._space, self._link = f"{cluster.name}n{number}", f"{cluster.name}v{number}"
        _run("ip", "netns", "add", self._space)
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        _run("ip", "link", "set", self._link, "master", cluster.name, "up")
        _run("ip", "-n", self._space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _run("ip", "-n", self._space, "link", "set", device, "up")
        start = [
            *cluster.ray, "start", f"--address={cluster.address}", f"--node-ip-address={self.address}", "--num-cpus=2",
            f"--object-store-memory={_STORE}", f"--resources={json.dumps({'shard': 8, **resources})}",
            "--disable-usage-stats", "--block",
        ]  # fmt: skip
        inside = (
            f"mount --make-rprivate / && mount -t tmpfs -o size={_MEMORY} tmpfs /dev/shm"
            f" && mount -t tmpfs tmpfs {cluster.folder} && hostname {self._space} && exec \"$@\""
        )  # fmt: skip
        self._output = open(cluster.log(number), "wb")  # noqa: SIM115 (closed with the node)
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", self._space, "unshare", "--mount", "--ipc", "--uts", "--pid", "--fork",
             "--kill-child", "--mount-proc", "sh", "-c", inside, "sh", *start],
            stdout=self._output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=cluster.environment,
            start_new_session=True,
        )  # fmt: skip
        self.node_id = ""

    @property
    def has_ended(self) -> bool:
        """Whether its first process has."""
        return self._process.poll() is not None

    def processes(self) -> dict[int, int]:
        """The ids of its processes here, by those that they have in the node."""
        found: dict[int, int] = {}
        spaces = Path(f"/proc/{self._process.pid}/ns/net").stat().st_ino if not self.has_ended else None
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if (folder / "ns/net").stat().st_ino != spaces:
                    continue
                line = next(x for x in (folder / "status").read_text().splitlines() if x.startswith("NSpid:"))
                ids = line.split()[1:]
                if len(ids) > 1:
                    found[int(ids[-1])] = int(ids[0])
        return found

    def told(self) -> str:
        """The ends of its output, and of Ray's own logs in it."""
        files = [Path(self._output.name)]
        for process in self.processes().values():
            root = Path(f"/proc/{process}/root{self._folder}")
            files += [*root.glob("ray/session_2*/logs/raylet.*"), *root.glob("session_2*/logs/raylet.*")]
            break
        lines = {f.name: f.read_text(errors="replace").splitlines() for f in files if f.is_file()}
        ends = {name: "\n".join(x for x in told if "[state-dump]" not in x)[-_TOLD:] for name, told in lines.items()}
        return "\n".join(f"--- {name}:\n{end}" for name, end in ends.items())

    def memory(self) -> list[str]:
        """The names in its /dev/shm."""
        return os.listdir(f"/proc/{next(iter(self.processes().values()))}/root/dev/shm")

    def kill_process(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a process, whose id in the node is given."""
        os.kill(self.processes()[pid], number)

    def stop(self) -> None:
        """Stops every process of the node, as a machine that hangs."""
        for pid in self.processes().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Continues its processes."""
        for pid in self.processes().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def cut(self) -> None:
        """Cuts it off from all others."""
        _run("ip", "link", "set", self._link, "down")

    def connect(self) -> None:
        """Connects it again."""
        _run("ip", "link", "set", self._link, "up")

    def kill(self) -> None:
        """Kills all its processes at once, and drops its memory and its link."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # and with it, by the kernel, the first process of its ids, and all others
        self._process.wait()
        self._output.close()
        _run("ip", "netns", "del", self._space)
        subprocess.run(["ip", "link", "del", self._link], capture_output=True)  # it goes with the other end, later


class NamespaceCluster:
    """A head node, and nodes in namespaces of their own."""

    def __init__(self, nodes: int = 2) -> None:
        self.name = f"e{os.getpid() % 100_000}"
        self._net = os.getpid() % 250 + 1
        self._numbers = iter(range(2, 250))
        self.folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets have short names
        self._logs = tempfile.mkdtemp(prefix="engram-nodes-")
        self.ray = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
        tests = str(Path(__file__).resolve().parent.parent)
        self.environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": self.folder,
            "PYTHONPATH": os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        self.nodes: list[Node] = []
        self._head: subprocess.Popen[bytes] | None = None
        _run("ip", "link", "add", self.name, "type", "bridge")
        try:
            _run("ip", "addr", "add", f"{self.address_of(1)}/24", "dev", self.name)
            _run("ip", "link", "set", self.name, "up")
            self._start_head()
            for _ in range(nodes):
                self.add()
        except BaseException:
            self.close()
            raise

    def address_of(self, number: int) -> str:
        """The IP address of a node; 1: of the head."""
        return _NETWORK.format(net=self._net, host=number)

    @property
    def address(self) -> str:
        """Where the cluster is joined."""
        return f"{self.address_of(1)}:{self._port}"

    def log(self, number: int) -> str:
        """The file of a node's output."""
        return os.path.join(self._logs, f"{number}.log")

    def _start_head(self) -> None:
        import ray

        self._port = 20_000 + os.getpid() % 10_000
        with open(self.log(1), "wb") as output:
            self._head = subprocess.Popen(
                [*self.ray, "start", "--head", f"--node-ip-address={self.address_of(1)}", f"--port={self._port}",
                 "--num-cpus=1", "--include-dashboard=false", f"--object-store-memory={_STORE}",
                 f"--temp-dir={self.folder}", "--disable-usage-stats", "--block",
                 f"--system-config={json.dumps(HEALTH)}"],
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment,
                start_new_session=True,
            )  # fmt: skip

        def joined() -> bool:
            if self._head is None or self._head.poll() is not None:
                raise RuntimeError(f"the head node has ended: {Path(self.log(1)).read_text()}")
            try:
                ray.init(address=self.address, _node_ip_address=self.address_of(1), log_to_driver=False,
                         logging_level="ERROR")  # fmt: skip
            except (ConnectionError, RuntimeError, ValueError):
                return False
            return True

        os.environ.update(self.environment)
        _until(joined, "the head node does not start")

    def add(self, **resources: int) -> Node:
        """Starts another node, and waits until it has joined; in place of one that does not, one more."""
        for left in reversed(range(_STARTS)):
            node = Node(self, next(self._numbers), resources)
            self.nodes.append(node)
            try:
                _until(functools.partial(self._joined, node), f"the node {node.address} does not join")
                return node
            except (TimeoutError, RuntimeError) as error:
                if not left:
                    raise type(error)(f"{error}\n{node.told()}") from None
                warnings.warn(f"another node is started, as: {error}\n{node.told()}", stacklevel=2)
                self.remove(node)
        raise AssertionError("unreachable")

    def _joined(self, node: Node) -> bool:
        import ray

        if node.has_ended:
            raise RuntimeError(f"the node {node.address} has ended")
        for one in ray.nodes():
            if one["Alive"] and one["NodeManagerAddress"] == node.address:
                node.node_id = one["NodeID"]
        return bool(node.node_id)

    def node_of(self, node_id: str) -> Node:
        """A node by Ray's id."""
        return next(node for node in self.nodes if node.node_id == node_id)

    def kill(self, node_id: str) -> None:
        """Kills all processes of a node, whose memory is gone with them, and adds another one."""
        self.remove(self.node_of(node_id))
        self.add()

    def remove(self, node: Node) -> None:
        """Kills a node."""
        node.kill()
        self.nodes.remove(node)

    def close(self) -> None:
        """Ends everything."""
        import ray

        ray.shutdown()
        for node in list(self.nodes):
            with contextlib.suppress(subprocess.CalledProcessError):
                self.remove(node)
        if self._head is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._head.pid, signal.SIGTERM)
            try:
                self._head.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._head.pid, signal.SIGKILL)
                self._head.wait()
        subprocess.run(["ip", "link", "del", self.name], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self._logs, ignore_errors=True)


@contextlib.contextmanager
def namespace_cluster(nodes: int = 2) -> Iterator[NamespaceCluster]:
    """A cluster, which is ended with the block."""
    made = NamespaceCluster(nodes)
    try:
        yield made
    finally:
        made.close()


def _run(*command: str) -> Any:
    return subprocess.run(command, check=True, capture_output=True, text=True)


def _until(what: Callable[[], bool], failure: str) -> None:
    until = time.monotonic() + _START
    while not what():
        if time.monotonic() > until:
            raise TimeoutError(failure)
        time.sleep(0.1)

"""Several hosts by Ray: on each, an actor runs the launcher for the host's ranks, and this program decides.

The actors go on step by step, all together. This program asks for each step, so it learns of a rank that failed, and of
a host that is lost, and then ends all. If this program dies, Ray ends the actors, and the guards end the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from gaccum_ms.launch.cluster import VISIBLE_DEVICES, Cluster, LaunchError, reserved_port
from gaccum_ms.launch.job import SIGNALS, Job, Over, signals_ignored
from gaccum_ms.launch.output import write
from gaccum_ms.launch.restarts import Restarts

PLACE_SECONDS = 10.0  # in which Ray places actors on hosts that are free
WAIT_SECONDS = 1.0
END_SECONDS = 60.0  # in which a host ends its ranks
REMEDY = "The project and the same Python must be at the same paths on each host; --ray-working-dir sends a folder."


class OnRay(NamedTuple):
    """Where and with what the ranks run."""

    address: str  # the cluster's; empty: RAY_ADDRESS, or the cluster that this host belongs to
    resources: dict[str, float]  # what a rank needs, by Ray's names
    working_dir: str  # a folder that Ray sends to the hosts, where the ranks run; empty: they run in this folder
    checkpoints: str  # the folder that all hosts must see for a restart, seen from where the ranks run

    def run(self, cluster: Cluster, command: list[str], log_dir: Path, timeout: float) -> Cluster:
        """Run `command` on all ranks, and return the cluster of the attempt that succeeded."""
        try:
            import ray
        except ImportError:
            raise LaunchError("'ray' is not installed (pip install 'gaccum_ms[ray]').", 2) from None
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            sends = {"working_dir": self.working_dir} if self.working_dir else None
            ray.init(self.address or "auto", runtime_env=sends, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise LaunchError(f"Ray's cluster cannot be used: {error} ('ray start --head' starts one.)", 2) from None
        for number, handler in handlers.items():  # Ray has set its own
            signal.signal(number, handler)
        deadline, restarts = time.monotonic() + timeout if timeout else math.inf, Restarts()
        try:
            while True:
                begin, hosts = time.monotonic(), _Hosts(ray, self, cluster)
                try:
                    with hosts.reserved(restarts.broken_hosts):
                        hosts.run(command, log_dir, deadline)
                        return hosts.cluster
                except LaunchError as error:
                    following = restarts.after(cluster, error, time.monotonic() - begin, hosts.ids)
                    if following is None:
                        raise
                    cluster = following
        finally:
            with signals_ignored():
                ray.shutdown()


# -- this program ------------------------------------------------------------------------------------------------------


class _Hosts:
    """The hosts of one attempt."""

    def __init__(self, ray: ModuleType, on: OnRay, cluster: Cluster) -> None:
        self._ray, self._on, self.cluster = ray, on, cluster
        self._needs = {name: amount * cluster.processes for name, amount in on.resources.items()}  # of a host's ranks
        self.ids: list[str] = []  # Ray's, of each host

    @contextlib.contextmanager
    def reserved(self, broken: set[str]) -> Iterator[None]:
        """Reserve hosts, with an actor on each; at the end of the ``with`` statement, end their ranks."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, needs = self._place(broken), dict(self._needs)
        own = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
        places = [PlacementGroupSchedulingStrategy(group, number) for number in range(self.cluster.nodes)]
        actor = self._ray.remote(_actor())
        self._actors = [actor.options(scheduling_strategy=place, **own).remote() for place in places]
        try:
            yield
        finally:
            with signals_ignored():
                ends = [actor.call.remote("end") for actor in self._actors]
                self._ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)
                with contextlib.suppress(self._ray.exceptions.RayError):
                    write(self._ray.get(ends[0], timeout=0))
                for actor in self._actors:
                    self._ray.kill(actor)
                self._ray.util.remove_placement_group(group)

    def _place(self, broken: set[str]) -> Any:
        """Reserve hosts: for a restart, as few as `min_processes` allows; `broken` ones, if no others are left."""
        cluster, give_up = self.cluster, time.monotonic() + self.cluster.start_timeout
        least = cluster.min_processes if cluster.attempt > 1 and cluster.min_processes else cluster.size
        fewest, needs = math.ceil(least / cluster.processes), self._needs
        while True:
            hosts = {host["NodeID"]: host for host in self._ray.nodes() if host["Alive"]}
            able = {each for each, host in hosts.items() if all(host["Resources"].get(n, 0) >= needs[n] for n in needs)}
            avoided = sorted(broken) if len(able - broken) >= fewest else []
            count = min(cluster.nodes, len(able.difference(avoided)))
            if count >= fewest:
                labels = [{"ray.io/node-id": f"!in({','.join(avoided)})"}] * count if avoided else None
                group = self._ray.util.placement_group([needs] * count, "STRICT_SPREAD", bundle_label_selector=labels)
                if group.wait(PLACE_SECONDS):
                    self.cluster = dataclasses.replace(cluster, nodes=count)
                    places = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
                    self.ids = [places[node] for node in range(count)]
                    addresses = [hosts.get(name, {}).get("NodeManagerAddress") for name in self.ids]
                    self._names = [f"host {node}, {address}," for node, address in enumerate(addresses)]
                    return group
                self._ray.util.remove_placement_group(group)
            if time.monotonic() > give_up:
                what = ", ".join(f"{name} {need:g}" for name, need in needs.items())
                why = f"{cluster.nodes} hosts with {what} were not free within {cluster.start_timeout:g} s"
                raise LaunchError(f"{why}; {len(able)} of Ray's {len(hosts)} hosts have that much.", 124)
            time.sleep(WAIT_SECONDS)

    def run(self, command: list[str], log_dir: Path, deadline: float) -> None:
        """Run the ranks until all have ended."""
        self._start(command, log_dir)
        over: Over = frozenset()
        running = set(range(self.cluster.nodes))
        while running:
            steps = {self._actors[node].call.remote("step", over): node for node in sorted(running)}
            errors = []
            while steps:
                if time.monotonic() > deadline:
                    raise LaunchError("time ran out: not all ranks had ended; all were ended.", 124)
                for step in self._ray.wait(list(steps), timeout=WAIT_SECONDS)[0]:
                    node = steps.pop(step)
                    try:
                        output, ended, more = self._get(step, node)
                    except LaunchError as error:
                        errors.append(error)
                        continue
                    over |= frozenset(self.cluster.ranks_of(node)) if ended else more
                    running -= {node} if ended else set()
                    if node == 0 and isinstance(write(output), BrokenPipeError):
                        raise SystemExit(128 + signal.SIGPIPE)
            if errors:  # the first usually causes the others
                raise min(errors, key=lambda error: error.since)

    def _start(self, command: list[str], log_dir: Path) -> None:
        folder, project = "" if self._on.working_dir else os.getcwd(), str(Path(__file__).parents[2])
        ready = [actor.prepare.remote(project, folder, command[0]) for actor in self._actors]
        for node, result in enumerate(ready):
            self._get(result, node)
        if self.cluster.max_restarts and self.cluster.nodes > 1:
            file = Path(self._on.checkpoints) / f".{uuid.uuid4().hex}"
            makers = [node for node in range(self.cluster.nodes) if self._call(node, "makes", file)]
            for node in makers:
                self._call(node, "remove", file)
            if len(makers) > 1:
                why = f"--max-restarts needs a folder that all hosts see, but each has its own '{self._on.checkpoints}'"
                raise LaunchError(f"{why}. Name one on a shared disk by --checkpoints, and save checkpoints there.", 2)
        address, port = self._call(0, "free_address")
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        devices = VISIBLE_DEVICES if self._needs.keys() & {"GPU", "NPU"} else ()
        for node in range(self.cluster.nodes):
            here = dataclasses.replace(self.cluster, master_addr=address, master_port=port, node_rank=node)
            self._call(node, "begin", here, command, log_dir / f"host.{node}", env, devices)

    def _call(self, node: int, method: str, *arguments: Any) -> Any:
        return self._get(self._actors[node].call.remote(method, *arguments), node)

    def _get(self, result: Any, node: int) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(result)
        except errors.RayActorError:
            raise LaunchError(f"{self._names[node]} is lost; all ranks were ended.") from None
        except errors.RayTaskError as error:
            if isinstance(error.cause, OSError | ImportError):
                raise LaunchError(f"{self._names[node]} cannot start the ranks: {error.cause}. {REMEDY}", 2) from None
            if isinstance(error.cause, LaunchError):
                error.cause.since = time.monotonic() - error.cause.since  # an age: hosts have clocks of their own
                raise error.cause from None
            raise
        except errors.RayError as error:
            raise LaunchError(f"Ray cannot start {self._names[node]} {error}", 2) from None


# -- each host ---------------------------------------------------------------------------------------------------------


def _actor() -> type:
    """The class of the actors. It is local, so Ray sends its code: importing it could fail there without a word."""

    class Actor:
        def prepare(self, project: str, folder: str, script: str) -> None:
            """Make this process ready to start the ranks."""
            sys.path.append(project)
            self._host = importlib.import_module("gaccum_ms.launch.ray_engine").OnHost()
            os.chdir(folder or os.getcwd())
            os.stat(script)

        def call(self, method: str, *arguments: Any) -> Any:
            return getattr(self._host, method)(*arguments)

    return Actor


class OnHost:
    """A host's ranks, in the actor's process."""

    def free_address(self) -> tuple[str, int]:
        """This host's address, and a free port there."""
        import ray

        with reserved_port(address := ray.util.get_node_ip_address()) as port:
            return address, port

    def makes(self, file: Path) -> bool:
        """Make a file, and return whether it was not there: of hosts with one disk, only one makes it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            file.touch(exist_ok=False)
            return True
        return False

    def remove(self, file: Path) -> None:
        """Remove that file."""
        file.unlink()

    def begin(self, cluster: Cluster, command: list[str], log_dir: Path, env: dict[str, str], devices: Any) -> None:
        """Begin the launch. The ranks see the devices that Ray has given to this actor."""
        env |= {name: os.environ[name] for name in devices if name in os.environ}
        self._output: list[bytes] = []
        self._steps = Job(command, log_dir, parent=env, out=self._output.append).run(cluster)
        next(self._steps)

    def step(self, over: Over) -> tuple[bytes, bool, Over]:
        """Go on for a moment, and return new output, whether the ranks have ended, and whose script has."""
        try:
            _, done = self._steps.send(over)
        except StopIteration:
            return self._shown(), True, over
        except LaunchError as error:
            error.since = time.monotonic() - error.since
            raise
        return self._shown(), False, done

    def end(self) -> bytes:
        """End the ranks, and return their last output."""
        self._steps.close()
        return self._shown()

    def _shown(self) -> bytes:
        output = b"".join(self._output)
        self._output.clear()
        return output

"""Several hosts by Ray: on each, an actor runs the launcher for the host's ranks, and this program decides.

The actors go on step by step. This program asks for each step, so it learns of a rank that failed, and of a host that
is lost, and then ends all. If this program dies, Ray ends the actors, and the guards end the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import os
import signal
import sys
import time
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from gaccum_ms.launch.cluster import VISIBLE_DEVICES, Cluster, LaunchError, reserved_port
from gaccum_ms.launch.job import SIGNALS, Over, launch, signals_ignored
from gaccum_ms.launch.output import write

PLACE_SECONDS = 10.0  # in which Ray places actors on hosts that are free
WAIT_SECONDS = 1.0
END_SECONDS = 60.0  # in which a host ends its ranks
SEE_SECONDS = 10.0  # in which a network's file system shows a new file
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
        sends = {"working_dir": self.working_dir} if self.working_dir else None
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            ray.init(self.address or "auto", runtime_env=sends, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise LaunchError(f"Ray's cluster cannot be used: {error} ('ray start --head' starts one.)", 2) from None
        for number, handler in handlers.items():  # Ray has set its own
            signal.signal(number, handler)
        deadline = time.monotonic() + timeout if timeout else math.inf
        try:
            while True:
                try:
                    with _Hosts(ray, self, cluster) as hosts:
                        hosts.run(command, log_dir, deadline)
                        return hosts.cluster
                except LaunchError as error:
                    if error.code != 1 or cluster.attempt > cluster.max_restarts:
                        raise
                    anew = f"note: all begin anew: restart {cluster.attempt} of {cluster.max_restarts}."
                    print(f"{error}\n{anew}", file=sys.stderr, flush=True)
                cluster = dataclasses.replace(cluster, attempt=cluster.attempt + 1)
        finally:
            with signals_ignored():
                ray.shutdown()


# -- this program ------------------------------------------------------------------------------------------------------


class _Hosts:
    """The hosts of one attempt; their ranks end with the ``with`` statement."""

    def __init__(self, ray: ModuleType, on: OnRay, cluster: Cluster) -> None:
        self._ray, self._on, self.cluster = ray, on, cluster
        self._needs = {name: amount * cluster.processes for name, amount in on.resources.items()}  # of a host's ranks
        self._actors: list[Any] = []

    def __enter__(self) -> _Hosts:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group, needs = self._place(), dict(self._needs)
        own = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
        for node in range(self.cluster.nodes):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
            self._actors.append(self._ray.remote(_actor()).options(scheduling_strategy=where, **own).remote())
        return self

    def __exit__(self, *error: object) -> None:
        with signals_ignored():
            ends = [actor.call.remote("end") for actor in self._actors]
            self._ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)
            with contextlib.suppress(self._ray.exceptions.RayError):
                write(self._ray.get(ends[0], timeout=0))
            for actor in self._actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(self._group)

    def _place(self) -> Any:
        """Reserve hosts; for a restart, as few as `min_processes` allows."""
        cluster, give_up = self.cluster, time.monotonic() + self.cluster.start_timeout
        least = cluster.min_processes if cluster.attempt > 1 and cluster.min_processes else cluster.size
        while True:
            hosts = [node for node in self._ray.nodes() if node["Alive"]]
            able = [all(host["Resources"].get(name, 0) >= need for name, need in self._needs.items()) for host in hosts]
            count = min(cluster.nodes, sum(able))
            if count and count * cluster.processes >= least:
                group = self._ray.util.placement_group([self._needs] * count, strategy="STRICT_SPREAD")
                if group.wait(PLACE_SECONDS):
                    self.cluster = dataclasses.replace(cluster, nodes=count)
                    places = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
                    addresses = {host["NodeID"]: host["NodeManagerAddress"] for host in hosts}
                    self._names = [f"host {node}, {addresses.get(places[node])}," for node in range(count)]
                    return group
                self._ray.util.remove_placement_group(group)
            if time.monotonic() > give_up:
                needs = ", ".join(f"{name} {need:g}" for name, need in self._needs.items())
                why = f"{cluster.nodes} hosts with {needs} were not free within {cluster.start_timeout:g} s"
                raise LaunchError(f"{why}; {sum(able)} of Ray's {len(hosts)} hosts have that much.", 124)
            time.sleep(WAIT_SECONDS)

    def run(self, command: list[str], log_dir: Path, deadline: float) -> None:
        """Run the ranks until all have ended."""
        self._start(command, log_dir)
        over: Over = frozenset()
        steps = {actor.call.remote("step", over): node for node, actor in enumerate(self._actors)}
        while steps:
            if time.monotonic() > deadline:
                raise LaunchError("time ran out: not all ranks had ended; all were ended.", 124)
            for step in self._ray.wait(list(steps), timeout=WAIT_SECONDS)[0]:
                node = steps.pop(step)
                try:
                    output, ended, more = self._get(step, node)
                except LaunchError as error:
                    raise self._first(error, steps) from None
                over |= frozenset(self.cluster.ranks_of(node)) if ended else more
                if node == 0 and isinstance(write(output), BrokenPipeError):
                    raise SystemExit(128 + signal.SIGPIPE)
                if not ended:
                    steps[self._actors[node].call.remote("step", over)] = node

    def _first(self, error: LaunchError, steps: dict[Any, int]) -> LaunchError:
        """The first of all errors: another host's may come later, because its ranks had to be ended before."""
        errors = [error]
        if steps:
            self._ray.wait(list(steps), num_returns=len(steps), timeout=END_SECONDS)
        for step, node in steps.items():
            try:
                self._get(step, node)
            except LaunchError as another:
                errors.append(another)
        return min(errors, key=lambda each: each.since)

    def _start(self, command: list[str], log_dir: Path) -> None:
        folder, project = "" if self._on.working_dir else os.getcwd(), str(Path(__file__).parents[2])
        ready = [actor.prepare.remote(project, folder, command[0]) for actor in self._actors]
        for node, why in enumerate(map(self._get, ready, range(len(ready)))):
            if why:
                raise LaunchError(f"{self._names[node]} cannot start the ranks: {why}. {REMEDY}", 2)
        if self.cluster.max_restarts and self.cluster.nodes > 1:
            file = Path(self._on.checkpoints) / f".{uuid.uuid4().hex}"
            seen = [self._call(node, "sees", file, node == 0) for node in range(self.cluster.nodes)]
            self._call(0, "remove", file)
            if not all(seen):
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
            if not isinstance(error.cause, LaunchError):
                raise
            error.cause.since = time.monotonic() - error.cause.since  # an age, because hosts have clocks of their own
            raise error.cause from None
        except errors.RayError as error:
            raise LaunchError(f"Ray cannot start {self._names[node]} {error}", 2) from None


# -- each host ---------------------------------------------------------------------------------------------------------


def _actor() -> type:
    """The class of the actors. It is local, so Ray sends its code: importing it could fail there without a word."""

    class Actor:
        def prepare(self, project: str, folder: str, script: str) -> str:
            """Make this process ready; return why it cannot start the ranks, or an empty string."""
            sys.argv = ["gaccum-ms"]  # by this name, the package does not import MindSpore
            sys.path.append(project)
            try:
                os.chdir(folder or os.getcwd())
                self._host = importlib.import_module("gaccum_ms.launch.ray_engine").OnHost()
                missing = [name for name in ("mindspore", "psutil") if not importlib.util.find_spec(name)]
            except (OSError, ImportError) as error:
                return str(error)
            return f"there is no {missing[0]}" if missing else "" if os.path.isfile(script) else f"no file '{script}'"

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

    def sees(self, file: Path, makes: bool) -> bool:
        """Whether this host sees a file, or can make it."""
        until = time.monotonic() + SEE_SECONDS
        with contextlib.suppress(OSError):
            if makes:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
            while file.name not in os.listdir(file.parent):
                if time.monotonic() > until:
                    return False
                time.sleep(0.2)
            return True
        return False

    def remove(self, file: Path) -> None:
        """Remove that file."""
        with contextlib.suppress(OSError):
            file.unlink()

    def begin(self, cluster: Cluster, command: list[str], log_dir: Path, env: dict[str, str], devices: Any) -> None:
        """Prepare the launch. The ranks see the devices that Ray has given to this actor."""
        env |= {name: os.environ[name] for name in devices if name in os.environ}
        self._output: list[bytes] = []
        self._over: Over | None = None
        self._steps = launch(cluster, command, log_dir, parent=env, out=self._output.append)

    def step(self, over: Over) -> tuple[bytes, bool, Over]:
        """Go on for a moment, and return new output, whether the ranks have ended, and which are done."""
        try:
            self._over, ended = self._steps.send(None if self._over is None else over), False
        except StopIteration:
            ended = True
        except LaunchError as error:
            error.since = time.monotonic() - error.since
            raise
        return self._shown(), ended, self._over or frozenset()

    def end(self) -> bytes:
        """End the ranks, and return their last output."""
        self._steps.close()
        return self._shown()

    def _shown(self) -> bytes:
        output = b"".join(self._output)
        self._output.clear()
        return output

"""Several hosts, simulated by connected network namespaces, which programs cannot distinguish from real hosts."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator

import pytest


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """For each of the two hosts, the prefix of a command that runs on it."""
    if shutil.which("ip") is None:
        pytest.skip("there is no 'ip' to make network namespaces with")
    mark = uuid.uuid4().hex[:8]
    names = [f"gaccum-{mark}-{number}" for number in range(2)]
    ends = [f"g{mark}{number}" for number in range(2)]
    try:
        for line in (
            *(f"netns add {name}" for name in names),
            f"link add {ends[0]} netns {names[0]} type veth peer name {ends[1]} netns {names[1]}",
            *(f"-n {names[i]} addr add 10.231.77.{i + 1}/24 dev {ends[i]}" for i in range(2)),
            *(f"-n {names[i]} link set {device} up" for i in range(2) for device in ("lo", ends[i])),
        ):
            done = subprocess.run(["ip", *line.split()], capture_output=True, text=True, timeout=60)
            if done.returncode != 0:
                pytest.skip(f"this machine allows no network namespaces: ip {line}: {done.stderr.strip()}")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=60)

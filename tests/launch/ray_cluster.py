"""A cluster of Ray with two nodes on this machine, of one CPU each: ``ray_cluster.py [FOLDER]``.

It prints the address, and then obeys the words that it reads: ``remove`` ends the second node, ``end`` the cluster. If
FOLDER is given, the second node has a small file system of its own there, as another host would have.
"""

import os
import subprocess
import sys
import time

import ray
from ray.cluster_utils import Cluster


def main(folder: str = "") -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray writes notes to standard output
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    if folder:
        mount = f"mount -t tmpfs -o size=2m none '{folder}' && exec \"$@\""
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}", "--num-cpus=1"]
        other = subprocess.Popen(["unshare", "--mount", "sh", "-c", mount, "sh", *start, "--block"], stdout=sys.stderr)
    else:
        node = cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    while sum(host["Alive"] for host in ray.nodes()) < 2:
        time.sleep(0.1)
    print(cluster.address, file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() != "remove":
            break
        cluster.remove_node(node, allow_graceful=False)
        print("removed", file=answers, flush=True)
    ray.shutdown()
    if folder:
        other.terminate()
        other.wait()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

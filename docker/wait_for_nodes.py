"""Waits until a Ray cluster has so many nodes: python wait_for_nodes.py HOST:PORT NODES"""

import sys
import time

import ray

address, number = sys.argv[1], int(sys.argv[2])
for _ in range(60):
    try:
        ray.init(address=address, log_to_driver=False)
        break
    except ConnectionError:
        time.sleep(2)
else:
    sys.exit(f"No Ray cluster answers at {address}.")
for _ in range(120):
    if sum(node["Alive"] for node in ray.nodes()) >= number:
        sys.exit()
    time.sleep(1)
sys.exit(f"Not all of {number} nodes joined the Ray cluster.")

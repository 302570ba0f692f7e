"""How well the time of pieces of work is predicted: of models and of devices that were not seen.

    python benchmarks/operator_cost.py [--keep FILE] [--sizes 128 256 512]

Devices are this machine with one thread or two, and with fewer vector instructions (as PyTorch and
oneDNN can be told): other rates, and other proportions between them. Each measures the same work.

* `model that was not seen`: each family is left out once, of all devices.
* `new device`: each device is left out once; of it are known its rates and 50 samples, which are
  chosen by KMeans. Baselines: 50 samples at random (the median of five draws), and a roofline whose
  rates are fitted to the chosen samples by least squares.

Errors are relative, in the mean (MAPE). `--keep` notes what was measured, and takes it from there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from figures import report

from hybridrl.planner.step.operator_work import OPERATORS, OperatorWork
from hybridrl.systems.operator_costs.cost_model import (
    CostTable,
    DeviceProfile,
    OperatorCostModel,
    choose_representative,
    roofline_seconds,
)

FEW = 50
DEVICES = {
    "two threads": {"OMP_NUM_THREADS": "2"},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "AVX2": {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE 4.1": {
        **{"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"},
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}
MEASURE = """
import json, sys
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.planner.machine.cluster_probe import probe_cluster
from hybridrl.systems.operator_costs.calibration import MODEL_FAMILIES, measure_operators
one = probe_cluster(ClusterSpec.of_one_node("cpu", 1), ".")
rows = json.loads(sys.argv[1])
found = {f: measure_operators(one, "float32", [f], rows).to_data() for f in MODEL_FAMILIES}
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512])
    options = parser.parse_args()
    known = {}
    if options.keep and options.keep.exists():
        known = json.loads(options.keep.read_text())
    for name, environment in DEVICES.items():
        if name not in known:
            known[name] = measured(environment, options.sizes)
            if options.keep:
                options.keep.write_text(json.dumps(known))
    families = {
        name: {family: CostTable.of_data(data) for family, data in found.items()}
        for name, found in known.items()
    }
    tables = {name: joined(found.values()) for name, found in families.items()}
    unseen_models(families)
    unseen_devices(tables)
    speed(list(tables.values()))


def measured(environment: dict[str, str], sizes: Sequence[int]) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(sizes)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def joined(tables: Sequence[CostTable]) -> CostTable:
    """Those of one device; each has measured the device's rates for itself, of which the median
    counts."""
    tables = list(tables)
    rates = [vars(table.device) for table in tables]
    device = DeviceProfile(**{name: statistics.median(r[name] for r in rates) for name in rates[0]})
    return CostTable(device, [sample for table in tables for sample in table.samples])


def errors(costs: OperatorCostModel, table: CostTable, without: Sequence[int] = ()) -> np.ndarray:
    """Relative, of each sample."""
    samples = [s for n, s in enumerate(table.samples) if n not in set(without)]
    said = costs.seconds([s.work for s in samples], table.device)
    return np.abs(said / np.array([s.seconds for s in samples]) - 1)


def unseen_models(families: dict[str, dict[str, CostTable]]) -> None:
    found, by_family = [], {}
    for left in next(iter(families.values())):
        seen = [joined([t for f, t in ts.items() if f != left]) for ts in families.values()]
        costs = OperatorCostModel(seen)
        here = [
            errors(costs, CostTable(table.device, tables[left].samples))
            for table, tables in zip(seen, families.values(), strict=True)
        ]
        by_family[left] = float(np.concatenate(here).mean())
        found.append(by_family[left])
    for family, error in by_family.items():
        print(f"  {family}: {error:.1%}")
    mean = statistics.fmean(found)
    report("error of a model that was not seen", mean, 1.0, "<= 0.15", "of the time")


def unseen_devices(tables: dict[str, CostTable]) -> None:
    ours, random, fitted = [], [], []
    for name, table in tables.items():
        base = [other for known, other in tables.items() if known != name]
        works = table.works
        few = choose_representative(works, table.device, FEW)
        costs = OperatorCostModel([*base, CostTable(table.device, [table.samples[n] for n in few])])
        ours.append(errors(costs, table, few).mean())
        draws = []
        for seed in range(5):
            picked = np.random.default_rng(seed).choice(len(works), len(few), replace=False)
            costs = OperatorCostModel(
                [*base, CostTable(table.device, [table.samples[n] for n in picked])]
            )
            draws.append(errors(costs, table, picked).mean())
        random.append(statistics.median(draws))
        fitted.append(roofline_error(table, few))
        print(f"  {name}: {ours[-1]:.1%}, random {random[-1]:.1%}, roofline {fitted[-1]:.1%}")
    said = statistics.fmean(ours)
    report("error of a new device, 50 samples", said, 1.0, "<= 0.12", "of the time")
    report("chosen against random", statistics.fmean(random), said, ">= 1.2", "of the time")
    report("against a fitted roofline", statistics.fmean(fitted), said, ">= 1.2", "of the time")


def roofline_error(table: CostTable, few: Sequence[int]) -> float:
    """Of a roofline with a factor for each kind of work, fitted to some samples."""
    works = [sample.work for sample in table.samples]
    seconds = np.array([sample.seconds for sample in table.samples])
    line = roofline_seconds(works, table.device)
    factors = dict.fromkeys(OPERATORS, 1.0)
    for op in OPERATORS:
        here = [n for n in few if works[n].op == op]
        if here:
            factors[op] = float(np.exp(np.log(seconds[here] / line[here]).mean()))
    said = line * np.array([factors[work.op] for work in works])
    rest = [n for n in range(len(works)) if n not in set(few)]
    return float(np.abs(said[rest] / seconds[rest] - 1).mean())


def speed(tables: list[CostTable]) -> None:
    begin = time.perf_counter()
    costs = OperatorCostModel(tables)
    trained = time.perf_counter() - begin
    works = [sample.work for sample in tables[0].samples]
    many: list[OperatorWork] = [works[n % len(works)] for n in range(10_000)]
    begin = time.perf_counter()
    costs.seconds(many, tables[0].device)
    asked = time.perf_counter() - begin
    report("seconds of training", trained, 1.0, "<= 60", "s")
    report("seconds of 10,000 predictions", asked, 1.0, "<= 1", "s")


if __name__ == "__main__":
    main()

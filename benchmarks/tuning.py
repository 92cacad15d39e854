"""How long jqconv.tune takes for ResNet-50, and what the next process finds.

Starts with an empty store of its own. The second process resolves every plan from the store alone.
With ``--mnist`` instead: 100 training steps of examples/mnist.py, twice, searching on first use.
With ``--compare`` instead: what two earlier runs chose, side by side where they differ.

    python benchmarks/tuning.py --json tuned.json
    python benchmarks/tuning.py --exhaustive --json exhaustive.json
    python benchmarks/tuning.py --compare tuned.json exhaustive.json --json compared.json
    python benchmarks/tuning.py --mnist --json mnist.json
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
from layers import resnet50
from measuring import (
    convolutions_per_call,
    copy_bandwidth,
    floor_us,
    measure_jqconv,
    need_gpu,
    write_json,
)

import jqconv
from jqconv import _choice, _native, _primitive
from jqconv._algorithm import Algorithm
from jqconv._spec import ConvSpec


def network(specs: list[ConvSpec]) -> tuple[Any, list[list[jax.ShapeDtypeStruct]]]:
    """Return a function that has every convolution, and the shapes of its operands."""

    def run(*operands: Any) -> list[jax.Array]:
        return [
            _primitive.conv(spec, _choice.choose(spec), *given)
            for spec, given in zip(specs, operands, strict=True)
        ]

    shapes = [[jax.ShapeDtypeStruct(*tensor) for tensor in s.operands.values()] for s in specs]
    return run, shapes


def load_all(specs: list[ConvSpec]) -> dict[str, Any]:
    """Choose every algorithm and load its plan, as a program's first run does."""
    device = need_gpu()
    _native.versions()  # starting CUDA and cuDNN is not what is measured
    start = time.perf_counter()
    for spec in specs:
        algorithm = _choice.settle(spec)
        core, named = jqconv._algorithm.core_of(spec, algorithm)
        _native.resolve(str(core), str(named), device.local_hardware_id, named.workspace)
    return {"seconds": time.perf_counter() - start, "searches": dict(jqconv.search_counts())}


MNIST = pathlib.Path(__file__).parents[1] / "examples" / "mnist.py"
#: Runs the example, 100 steps in three phases, and tells what was searched for and what is stored.
RUN_MNIST = """
import json, runpy, sys
import jqconv
path, picture = sys.argv[1:]
sys.argv = [path, "--epochs", "2", "--train-size", "3200", "--out", picture]
runpy.run_path(path, run_name="__main__")
print(json.dumps({"searches": jqconv.search_counts(), "stored": len(list(jqconv.cache.entries()))}))
"""


def run_mnist(store: str) -> dict[str, Any]:
    """Run the example in a process of its own, which looks for jqconv where it is installed."""
    picture = os.path.join(store, "mnist.png")
    command = [sys.executable, "-P", "-c", RUN_MNIST, str(MNIST), picture]
    start = time.perf_counter()
    found = last_line(command, store)
    return found | {"seconds": time.perf_counter() - start}


def last_line(command: list[str], store: str) -> dict[str, Any]:
    """Run a command that searches with `store`, and return what its last line says in JSON."""
    environment = os.environ | {"JQCONV_CACHE_DIR": store, "JQCONV_SEARCH": "tune"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_mnist(path: str | None) -> None:
    """Run the example twice; print and write what each run searched for."""
    with tempfile.TemporaryDirectory() as store:
        runs = [run_mnist(store) for _ in range(2)]
    for run in runs:
        searches = sum(run["searches"].values())
        print(f"{run['seconds']:.0f} s, {searches} searches, {run['stored']} signatures stored")
    write_json(path, {"mnist": runs})


def compare(paths: list[str], path: str | None) -> None:
    """Time the choices of two runs under jit; print and write how the first's compare."""
    first, second = (json.loads(pathlib.Path(p).read_text()) for p in paths)
    bandwidth = copy_bandwidth()
    rows = []
    for layer, one, other in zip(resnet50(), first["layers"], second["layers"], strict=True):
        spec, names = layer.spec(first["batch"]), [one["algorithm"], other["algorithm"]]
        row = {"layer": str(layer), "algorithms": names, "ratio": 1.0}
        if names[0] != names[1]:
            count = convolutions_per_call(floor_us(spec, bandwidth))
            row["us"] = us = [
                measure_jqconv(spec, count, Algorithm.parse(name))["jit_us"] for name in names
            ]
            row["ratio"] = us[0] / us[1]
        rows.append(row)
        print(f"{row['layer']:26s} {row['ratio']:6.3f}  {'  '.join(names)}", flush=True)
    mean = statistics.geometric_mean(row["ratio"] for row in rows)
    print(f"geometric mean: {mean:.3f}")
    write_json(path, {"compared": paths, "geomean_ratio": mean, "layers": rows})


def main() -> None:
    """Tune, start the second process, print and write both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--exhaustive", action="store_true", help="search through everything")
    parser.add_argument("--mnist", action="store_true", help="examples/mnist.py instead")
    parser.add_argument("--compare", nargs=2, metavar="JSON", help="two earlier runs instead")
    parser.add_argument("--load", action="store_true", help="only load: the second process")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    specs = [layer.spec(args.batch) for layer in resnet50()]
    if args.load:
        print(json.dumps(load_all(specs)))
        return

    need_gpu()
    if args.mnist:
        measure_mnist(args.json)
        return
    if args.compare:
        compare(args.compare, args.json)
        return
    with tempfile.TemporaryDirectory() as store, jqconv.config.using(cache_dir=store):
        run, shapes = network(specs)
        start = time.perf_counter()
        report = jqconv.tune(run, *shapes, exhaustive=args.exhaustive)
        seconds = time.perf_counter() - start
        print(report)
        print(f"tuned in {seconds:.1f} s on {os.cpu_count()} cores")
        command = [sys.executable, __file__, "--load", "--batch", str(args.batch)]
        second = last_line(command, store)
    print(f"the second process: {second['seconds']:.2f} s, searches {second['searches']}")
    rows = [
        {"layer": str(layer), "algorithm": row.algorithm, "us": row.microseconds, "note": row.note}
        for layer, row in zip(resnet50(), report.rows, strict=True)
    ]
    figures = {"seconds": seconds, "cores": os.cpu_count(), "exhaustive": args.exhaustive}
    write_json(args.json, figures | {"batch": args.batch, "second": second, "layers": rows})


if __name__ == "__main__":
    main()

"""How long jqconv.tune takes for ResNet-50, and what the next process finds.

Starts with an empty store of its own. The second process resolves every plan from the store alone.

    python benchmarks/tuning.py --json benchmarks/results/tuning_h200_n64.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
from layers import resnet50
from measuring import need_gpu, write_json

import jqconv
from jqconv import _choice, _native, _primitive
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


def main() -> None:
    """Tune, start the second process, print and write both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--exhaustive", action="store_true", help="search through everything")
    parser.add_argument("--load", action="store_true", help="only load: the second process")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    specs = [layer.spec(args.batch) for layer in resnet50()]
    if args.load:
        print(json.dumps(load_all(specs)))
        return

    need_gpu()
    with tempfile.TemporaryDirectory() as store, jqconv.config.using(cache_dir=store):
        run, shapes = network(specs)
        start = time.perf_counter()
        report = jqconv.tune(run, *shapes, exhaustive=args.exhaustive)
        seconds = time.perf_counter() - start
        print(report)
        print(f"tuned in {seconds:.1f} s on {os.cpu_count()} cores")
        command = [sys.executable, __file__, "--load", "--batch", str(args.batch)]
        environment = os.environ | {"JQCONV_CACHE_DIR": store, "JQCONV_SEARCH": "tune"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    second = json.loads(done.stdout.splitlines()[-1])
    print(f"the second process: {second['seconds']:.2f} s, searches {second['searches']}")
    rows = [
        {"layer": str(layer), "algorithm": row.algorithm, "us": row.microseconds, "note": row.note}
        for layer, row in zip(resnet50(), report.rows, strict=True)
    ]
    figures = {"seconds": seconds, "cores": os.cpu_count(), "exhaustive": args.exhaustive}
    write_json(args.json, figures | {"batch": args.batch, "second": second, "layers": rows})


if __name__ == "__main__":
    main()

"""dgrad and wgrad in bf16 against XLA's, which is given kernels in two orders.

HWIO is what Flax has, and XLA transposes them, or their gradient, in every call; OHWI is what cuDNN
reads and jqconv is given here.

    python benchmarks/gradients.py --json benchmarks/results/gradients_h200.json
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax import lax
from layers import Layer
from measuring import (
    Keys,
    compile_in_place,
    convolutions_per_call,
    copy_bandwidth,
    floor_us,
    kernel_shape,
    need_gpu,
    number,
    pipelined,
    write_json,
)

from jqconv import _choice, _primitive
from jqconv._spec import ConvSpec
from jqconv._timing import in_turn

LAYERS = [
    Layer(28, 128, 128, 3, 1, False, True),
    Layer(56, 64, 64, 3, 1, False, True),
    Layer(14, 256, 256, 3, 1, False, True),
    Layer(14, 1024, 256, 1, 1, False, True),
]

KERNELS = ("HWIO", "OHWI")


def measure_jqconv(spec: ConvSpec, count: int) -> float:
    """Time the primitive, whose kernels are OHWI."""
    algorithm = _choice.settle(spec)
    keys = Keys()
    sets = [
        [keys.array(shape, dtype) for shape, dtype in spec.operands.values()] for _ in range(count)
    ]
    results = [keys.array(*spec.result) for _ in range(count)]

    def gradients(_: Any, sets: Any) -> list[jax.Array]:
        return in_turn(lambda *operands: _primitive.conv(spec, algorithm, *operands), sets)

    return pipelined(compile_in_place(gradients, results, sets), results, sets) / count * 1e6


def measure_xla(spec: ConvSpec, count: int, kernels: str) -> float:
    """Time what jax.grad of XLA's own bf16 convolution runs."""
    keys = Keys()
    dtype = "bfloat16"
    w_shape = kernel_shape(spec, kernels)
    xs = [keys.array(spec.x_shape, dtype) for _ in range(count)]
    ws = [keys.array(w_shape, dtype) for _ in range(count)]
    dys = [keys.array(spec.y_shape, dtype) for _ in range(count)]

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, spec.strides, spec.padding, dimension_numbers=("NHWC", kernels, "NHWC")
        )

    def gradient(x: jax.Array, w: jax.Array, dy: jax.Array) -> jax.Array:
        if spec.direction == "dgrad":
            (found,) = jax.linear_transpose(lambda x: conv(x, w), x)(dy)
        else:
            (found,) = jax.linear_transpose(lambda w: conv(x, w), w)(dy)
        return found

    def gradients(_: Any, xs: Any, ws: Any, dys: Any) -> list[jax.Array]:
        return in_turn(gradient, zip(xs, ws, dys, strict=True))

    shape = spec.x_shape if spec.direction == "dgrad" else w_shape
    results = [keys.array(shape, dtype) for _ in range(count)]
    args = (results, xs, ws, dys)
    return pipelined(compile_in_place(gradients, *args), *args) / count * 1e6


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    device = need_gpu()
    specs = {
        f"{layer} {direction}": layer.spec(args.batch).backward(direction, "bfloat16")
        for layer in LAYERS
        for direction in ("dgrad", "wgrad")
    }
    with ThreadPoolExecutor(len(specs)) as pool:
        chosen = dict(zip(specs, pool.map(_choice.settle, specs.values()), strict=True))
    bandwidth = copy_bandwidth()
    rows = []
    print(f"{'bf16':30s}    jqconv  xla HWIO  xla OHWI  algorithm")
    for name, spec in specs.items():
        count = convolutions_per_call(floor_us(spec, bandwidth))
        row = {"name": name, "algorithm": str(chosen[name]), "jit_us": measure_jqconv(spec, count)}
        row |= {f"xla_{order}_us": measure_xla(spec, count, order) for order in KERNELS}
        trials = _choice.get(spec, device).trials
        rows.append(row | {"chosen_from": [dataclasses.astuple(trial) for trial in trials]})
        cells = " ".join(number(row[f"{cell}_us"]) for cell in ("jit", "xla_HWIO", "xla_OHWI"))
        print(f"{name:30s} {cells}  {chosen[name]}", flush=True)
    means = {
        f"geomean_speedup_{order}": statistics.geometric_mean(
            row[f"xla_{order}_us"] / row["jit_us"] for row in rows
        )
        for order in KERNELS
    }
    for name, mean in means.items():
        print(f"{name}: {mean:.3f}")
    write_json(args.json, {"batch": args.batch} | means | {"gradients": rows})


if __name__ == "__main__":
    main()

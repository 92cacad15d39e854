"""Shapes that cuDNN's int8 engines dislike: odd channels, a stem, small groups, depthwise.

Each against what it should come near: the next multiple of 64 channels for odd ones, XLA's ways of
the same convolution for the others.

    python benchmarks/shapes.py --json benchmarks/results/shapes_h200.json
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from layers import Layer
from measuring import (
    convolutions_per_call,
    copy_bandwidth,
    floor_us,
    measure_jqconv,
    measure_xla,
    need_gpu,
    number,
    write_json,
)

from jqconv import _choice
from jqconv._algorithm import Algorithm
from jqconv._spec import Activation, ConvSpec

ODD = (100, 129, 130, 131, 132, 144)


def square(channels: int, groups: int = 1, size: int = 28, batch: int = 64) -> ConvSpec:
    """Return a 3x3 convolution of as many channels out as in."""
    return ConvSpec(
        x_shape=(batch, size, size, channels),
        w_shape=(channels, 3, 3, channels // groups),
        padding=((1, 1), (1, 1)),
        groups=groups,
        multiplier="channel",
        bias=True,
        activation=Activation("relu"),
    )


def cases() -> dict[str, ConvSpec]:
    """Return the convolutions by name, those to compare with among them."""
    found = {f"{c} channels": square(c) for c in sorted({*ODD, *map(next_64, ODD)})}
    found["stem 7x7/2, 3 channels"] = Layer(224, 3, 64, 7, 2, False, True).spec(64)
    found["groups=32, 4 channels each"] = square(128, groups=32)
    found["depthwise 128, 28x28"] = square(128, groups=128)
    found["depthwise 384, 14x14"] = square(384, groups=384, size=14)
    found["depthwise 960, 7x7"] = square(960, groups=960, size=7)
    return found


def next_64(channels: int) -> int:
    """Return the next multiple of 64."""
    return -(-channels // 64) * 64


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    need_gpu()
    specs = cases()
    with ThreadPoolExecutor(len(specs)) as pool:
        list(pool.map(_choice.settle, specs.values()))
    bandwidth = copy_bandwidth()
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'3x3, batch 64':28s}       jit      bare   xla way  xla bf16     floor  algorithm")
    for name, spec in specs.items():
        floor = floor_us(spec, bandwidth)
        count = convolutions_per_call(floor)
        row = measure_jqconv(spec, count) | {"floor_us": floor}
        row["xla_way_us"] = measure_jqconv(spec, count, Algorithm("xla"))["jit_us"]
        row["xla_bf16_us"] = min(
            measure_xla(spec, count, "bfloat16", kernels) for kernels in ("HWIO", "OHWI")
        )
        rows[name] = row
        columns = ("jit_us", "bare_us", "xla_way_us", "xla_bf16_us", "floor_us")
        cells = " ".join(number(row[column]) for column in columns)
        print(f"{name:28s} {cells}  {row['algorithm']}", flush=True)
    for c in ODD:
        ratio = rows[f"{c} channels"]["jit_us"] / rows[f"{next_64(c)} channels"]["jit_us"]
        print(f"{c} channels over {next_64(c)}: {ratio:.2f}")
    write_json(args.json, {"shapes": rows})


if __name__ == "__main__":
    main()

"""Every distinct convolution of ResNet-50 v1.5, with the epilogue that the network has there.

One run compares, on one GPU: jqconv under jit; the same plan run bare; XLA's int8 convolution and
its bf16 one, each with the epilogue that XLA fuses and kernels in HWIO, as Flax has them, the bf16
one also with kernels in OHWI, as jqconv is given them; and the floor, the larger of bytes over the
copy bandwidth measured here and operations over the datasheet's peak. With ``--exhaustive`` also
the best that cuDNN has in any form and formulation.

    python benchmarks/conv_layers.py --batch 128 --json conv_layers_h200_n128.json
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from layers import resnet50
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

import jqconv
from jqconv import _choice, _search, _tune
from jqconv._spec import ConvSpec


def measure(batch: int, with_xla: bool, exhaustive: bool) -> Iterator[dict[str, Any]]:
    """Yield one row for each distinct layer."""
    device = need_gpu()
    bandwidth = copy_bandwidth()
    specs = {layer: layer.spec(batch) for layer in resnet50()}
    search_all(list(specs.values()), exhaustive)
    for layer, times in resnet50().items():
        spec = specs[layer]
        floor = floor_us(spec, bandwidth)
        count = convolutions_per_call(floor)
        row = {"layer": str(layer), "times": times, "floor_us": floor, "copy_bytes_s": bandwidth}
        row |= measure_jqconv(spec, count)
        if exhaustive:
            best = EXHAUSTIVE[spec].algorithm
            same = str(best) == row["algorithm"]
            again = row if same else measure_jqconv(spec, count, best)
            row |= {"best": str(best), "best_us": again["jit_us"]}
            row["trials"] = [dataclasses.astuple(trial) for trial in EXHAUSTIVE[spec].trials]
        if with_xla:
            row["xla_int8_us"] = measure_xla(spec, count, "int8")
            row["xla_bf16_us"] = measure_xla(spec, count, "bfloat16")
            row["xla_ohwi_us"] = measure_xla(spec, count, "bfloat16", "OHWI")
        row["chosen_from"] = [
            dataclasses.astuple(trial) for trial in _choice.get(spec, device).trials
        ]
        yield row


#: What a search through everything found.
EXHAUSTIVE: dict[ConvSpec, _choice.Choice] = {}


def search_all(specs: list[ConvSpec], exhaustive: bool) -> None:
    """Choose the algorithms of all layers side by side: builds take seconds, of one core each."""
    device = need_gpu()
    with ThreadPoolExecutor(len(specs)) as pool:
        list(pool.map(_choice.settle, specs))
    if exhaustive:
        with ThreadPoolExecutor(_tune._EXHAUSTIVE_AT_A_TIME) as pool:
            found = pool.map(lambda s: _search.search(s, device, exhaustive=True), specs)
            EXHAUSTIVE.update(zip(specs, found, strict=True))


def summarize(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Return geometric means over the layers and sums over the network."""
    found = {}
    for name in names:
        if name != "jit_us":
            found[f"geomean_jit_over_{name}"] = statistics.geometric_mean(
                row["jit_us"] / row[name] for row in rows if row[name] is not None
            )
        if all(row[name] is not None for row in rows):
            found[f"network_{name}"] = sum(row["times"] * row[name] for row in rows)
    return found


def bf16_wins(rows: list[dict[str, Any]]) -> list[str]:
    """Return the layers that XLA runs faster in bf16, kernels in either order, with both times."""
    return [
        f"{row['layer']}: {bf16:.1f} against {row['jit_us']:.1f}"
        for row in rows
        if (bf16 := min(row["xla_bf16_us"], row["xla_ohwi_us"])) < row["jit_us"]
    ] or ["none"]


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--no-xla", action="store_true", help="leave XLA's convolutions out")
    parser.add_argument("--exhaustive", action="store_true", help="search through everything too")
    args = parser.parse_args()

    names = ["floor_us", "stream_us", "bare_us", "jit_us"]
    names += ["best_us"] * args.exhaustive
    names += ["xla_int8_us", "xla_bf16_us", "xla_ohwi_us"] * (not args.no_xla)
    print(f"{'layer':28s} times " + " ".join(f"{name[:-3]:>9s}" for name in names) + "  algorithm")
    rows = []
    for row in measure(args.batch, not args.no_xla, args.exhaustive):
        rows.append(row)
        cells = " ".join(number(row[name]) for name in names)
        print(f"{row['layer']:28s} {row['times']:5d} {cells}  {row['algorithm']}", flush=True)
    summary = summarize(rows, names)
    for name, value in summary.items():
        print(f"{name}: {value:.3f}")
    if not args.no_xla:
        print("XLA's bf16 is faster for:", *bf16_wins(rows), sep="\n  ")
    search = jqconv.config.search
    report = {"batch": args.batch, "search": search, "summary": summary, "layers": rows}
    write_json(args.json, report)


if __name__ == "__main__":
    main()

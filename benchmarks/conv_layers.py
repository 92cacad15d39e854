"""Every distinct convolution of ResNet-50 v1.5, with the epilogue that the network has there.

One run compares, on one GPU: jqconv under jit; the same plan run bare; XLA's int8 convolution and
its bf16 one, each with the epilogue that XLA fuses; and the floor, the larger of bytes over the
copy bandwidth measured here and operations over the datasheet's peak. All figures are microseconds
of one convolution: many to a call, each with weights of its own, calls pipelined so that dispatch
does not count.

Bare, a plan is replayed in a CUDA graph with nothing of JAX or XLA. "bare" records each run as a
node, as XLA does with every custom call; "stream" records the runs back to back on one stream,
where cuDNN's kernels overlap at their ends, about a microsecond that no custom call can have.

    python benchmarks/conv_layers.py --batch 64 --json benchmarks/results/conv_layers_h200_n64.json
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jqconv
from jqconv import _choice, _native, _primitive
from jqconv._spec import Activation, ConvSpec
from jqconv._timing import time_plans

PEAK_INT8 = 1979e12  # operations per second, dense, by the H200's datasheet
BATCH_SECONDS = 0.1
SETS = 3  # of activations, taken in turn so that the cache does not hold them


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution as the network has it; `residual` and `relu` are its epilogue's."""

    size: int
    c: int
    k: int
    window: int
    stride: int
    residual: bool
    relu: bool

    def __str__(self) -> str:
        tail = (" +res" if self.residual else "") + ("" if self.relu else " linear")
        stride = f"/{self.stride}" if self.stride > 1 else ""
        return f"{self.window}x{self.window}{stride} {self.size} {self.c}->{self.k}{tail}"

    def spec(self, batch: int) -> ConvSpec:
        """Return the fused int8 convolution with per-channel scales and bias."""
        pad = (self.window // 2, self.window // 2)
        return ConvSpec(
            x_shape=(batch, self.size, self.size, self.c),
            w_shape=(self.k, self.window, self.window, self.c),
            strides=(self.stride, self.stride),
            padding=(pad, pad),
            multiplier="channel",
            bias=True,
            residual="int8" if self.residual else None,
            residual_scale=self.residual,
            activation=Activation("relu") if self.relu else None,
        )


def resnet50() -> dict[Layer, int]:
    """Return the distinct convolutions and how often the network runs each."""
    layers: collections.Counter[Layer] = collections.Counter([Layer(224, 3, 64, 7, 2, False, True)])
    size, c = 56, 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 0 else 1
            layers[Layer(size, c, width, 1, 1, False, True)] += 1
            layers[Layer(size, width, width, 3, stride, False, True)] += 1
            if block == 0:
                layers[Layer(size, c, 4 * width, 1, stride, False, False)] += 1
            size //= stride
            layers[Layer(size, width, 4 * width, 1, 1, True, True)] += 1
            c = 4 * width
    return dict(layers)


def floor_us(spec: ConvSpec, bandwidth: float) -> float:
    """Return the time below which no kernel can run it: every byte once, every product once."""
    tensors = [*spec.operands.values(), spec.result]
    moved = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in tensors)
    operations = 2 * math.prod(spec.y_shape) * spec.products
    return max(moved / bandwidth, operations / PEAK_INT8) * 1e6


def copy_bandwidth() -> float:
    """Return bytes per second, read and written, of a large device-to-device copy."""
    x = jnp.zeros((2**31,), jnp.uint8)
    copy = jax.jit(lambda _, x: x + jnp.uint8(1), donate_argnums=0, keep_unused=True)
    return 2 * x.nbytes / pipelined(copy, jnp.copy(x), x)


def pipelined(call: Callable[..., Any], results: Any, *args: Any) -> float:
    """Return seconds of one call, best of three long batches issued without waiting in between.

    A call writes its results over those of the call before, which it takes: as in a network, where
    activations live in scratch memory at fixed places, nothing is allocated.
    """

    def batch(calls: int) -> float:
        nonlocal results
        start = time.perf_counter()
        for _ in range(calls):
            results = call(results, *args)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / calls

    batch(2)
    # The first call's dispatch and the last one's wait do not overlap with anything: enough calls
    # for them to vanish.
    calls = max(8, math.ceil(BATCH_SECONDS / batch(8)))
    return min(batch(calls) for _ in range(3))


class Keys:
    """Random operands: int8 over the whole range, floats of a plausible size."""

    def __init__(self, seed: int = 0) -> None:
        self._key = jax.random.key(seed)

    def array(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        if dtype == "int8":
            return jax.random.randint(key, shape, -128, 128, jnp.int8)
        return jax.random.normal(key, shape, dtype)


def measure_jqconv(spec: ConvSpec, count: int) -> dict[str, Any]:
    """Time jqconv under jit, `count` convolutions to a call, and the same plan bare."""
    algorithm = _choice.settle(spec)
    keys = Keys()
    # Products of random codes have a spread of about 74**2: this scale brings sums back to int8.
    scale = jnp.full((spec.w_shape[0],), 1 / (74 * math.sqrt(spec.products)), jnp.float32)
    vectors = [scale, jnp.zeros_like(scale)]
    scalars = [jnp.float32(0.5)] if spec.residual else []
    xs = [keys.array(spec.x_shape, "int8") for _ in range(SETS)]
    ws = [keys.array(spec.w_shape, "int8") for _ in range(count)]
    ys = [keys.array(spec.y_shape, "int8") for _ in range(count)]

    def operands(ys: Any, xs: Any, ws: Any, vectors: Any, scalars: Any) -> list[Any]:
        # A residual is what the layer writes over, as in the network.
        return [
            [xs[i % SETS], w, *vectors, *([y] if spec.residual else []), *scalars]
            for i, (w, y) in enumerate(zip(ws, ys, strict=True))
        ]

    def layers(*args: Any) -> list[jax.Array]:
        return [_primitive.conv(spec, algorithm, *given) for given in operands(*args)]

    args = (ys, xs, ws, vectors, scalars)
    bare, stream = (
        float(np.median(time_plans(spec, [algorithm], operands(*args), runs=1, overlaps=overlaps)))
        for overlaps in (False, True)
    )
    us = pipelined(compile_in_place(layers, *args), *args) / count * 1e6
    times = {"jit_us": us, "bare_us": bare, "stream_us": stream}
    return {"algorithm": str(algorithm), "jit_over_bare": us / bare, **times}


def compile_in_place(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Compile a function whose results take the memory of its first argument."""
    return jax.jit(function, donate_argnums=0, keep_unused=True).lower(*args).compile()


def measure_xla(spec: ConvSpec, count: int, dtype: str) -> float:
    """Time XLA's own convolution, in int8 with one scalar scale (the form it fuses) or in bf16."""
    keys = Keys()
    xs = [keys.array(spec.x_shape, dtype) for _ in range(SETS)]
    ws = [keys.array((*spec.w_shape[1:], spec.w_shape[0]), dtype) for _ in range(count)]
    zs = [keys.array(spec.y_shape, dtype) for _ in range(SETS if spec.residual else 0)]
    wide = "float32" if dtype == "int8" else dtype
    bias = jnp.ones(spec.w_shape[0], wide)

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            w,
            spec.strides,
            spec.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            preferred_element_type=wide,
        )

    def layers(ys: Any, xs: Any, ws: Any, zs: Any, bias: jax.Array) -> list[jax.Array]:
        out = []
        for i, w in enumerate(ws):
            y = conv(xs[i % SETS], w)
            y = y * 1e-4 if dtype == "int8" else y
            if zs:
                z = zs[i % SETS].astype(wide)
                y = y + (z * 0.5 if dtype == "int8" else z)
            y = y + bias
            y = jnp.maximum(y, 0) if spec.activation else y
            out.append(jnp.clip(y, -128, 127).astype(jnp.int8) if dtype == "int8" else y)
        return out

    ys = [jnp.zeros(spec.y_shape, dtype) for _ in range(count)]
    compiled = compile_in_place(layers, ys, xs, ws, zs, bias)
    return pipelined(compiled, ys, xs, ws, zs, bias) / count * 1e6


def convolutions_per_call(floor: float) -> int:
    """Return as many as keep the device busy for about as long as the network does, 2 ms or so.

    A call costs the device some microseconds between the one before and the one after: it has to be
    long for them not to count.
    """
    return math.ceil(1000 / floor)


def measure(batch: int, with_xla: bool) -> Iterator[dict[str, Any]]:
    """Yield one row for each distinct layer."""
    bandwidth = copy_bandwidth()
    layers = resnet50()
    with ThreadPoolExecutor() as pool:  # building a plan takes seconds, of one core each
        list(pool.map(_choice.settle, [layer.spec(batch) for layer in layers]))
    for layer, times in layers.items():
        spec = layer.spec(batch)
        floor = floor_us(spec, bandwidth)
        count = convolutions_per_call(floor)
        row = {"layer": str(layer), "times": times, "floor_us": floor, "copy_bytes_s": bandwidth}
        row |= measure_jqconv(spec, count)
        if with_xla:
            row["xla_int8_us"] = measure_xla(spec, count, "int8")
            row["xla_bf16_us"] = measure_xla(spec, count, "bfloat16")
        yield row


def summarize(rows: list[dict[str, Any]], with_xla: bool) -> dict[str, Any]:
    """Return geometric means over the layers and sums over the network."""
    others = ["xla_int8_us", "xla_bf16_us"] if with_xla else []
    names = ["floor_us", "stream_us", "bare_us", "jit_us", *others]
    ratio = {f"geomean_jit_over_{name}": geomean(rows, name) for name in names if name != "jit_us"}
    total = {f"network_{name}": sum(row["times"] * row[name] for row in rows) for name in names}
    return ratio | total


def geomean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.geometric_mean(row["jit_us"] / row[name] for row in rows)


def environment() -> dict[str, Any]:
    """Return what the figures belong to."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jqconv": jqconv.__version__,
        "cudnn": _native.versions()["cudnn"],
        "cudnn_frontend": _native.versions()["frontend"],
        "cuda": device.client.platform_version,
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--no-xla", action="store_true", help="leave XLA's convolutions out")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("this benchmark needs an NVIDIA GPU; JAX found none")

    with_xla = not args.no_xla
    columns = ["floor_us", "stream_us", "bare_us", "jit_us"] + [
        "xla_int8_us",
        "xla_bf16_us",
    ] * with_xla
    print(f"{'layer':28s} times " + " ".join(f"{name:>11s}" for name in columns) + "  jit/bare")
    rows = []
    for row in measure(args.batch, with_xla):
        rows.append(row)
        cells = " ".join(f"{row[name]:11.1f}" for name in columns)
        print(
            f"{row['layer']:28s} {row['times']:5d} {cells} {row['jit_over_bare']:9.3f}", flush=True
        )
    summary = summarize(rows, with_xla)
    for name, value in summary.items():
        print(f"{name}: {value:.3f}")
    if args.json:
        report = {"environment": environment(), "batch": args.batch, "summary": summary}
        with open(args.json, "w") as file:
            json.dump(report | {"layers": rows}, file, indent=1)


if __name__ == "__main__":
    main()

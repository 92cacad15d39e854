"""How the benchmarks measure: on one GPU, many convolutions to a call, calls pipelined.

All figures are microseconds of one convolution. Each has weights of its own, so that nothing is
shared, and calls are long and issued without waiting, so that dispatch does not count.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jqconv
from jqconv import _choice, _forms, _native, _primitive
from jqconv._algorithm import Algorithm, core_of
from jqconv._spec import ConvSpec
from jqconv._timing import in_turn, time_plans

PEAK_INT8 = 1979e12  # operations per second, dense, by the H200's datasheet
BATCH_SECONDS = 0.1
SETS = 3  # of activations, taken in turn so that the cache does not hold them


def floor_us(spec: ConvSpec, bandwidth: float) -> float:
    """Return the time below which no kernel can run it: every byte once, every product once."""
    return max(spec.bytes_moved / bandwidth, spec.operations / PEAK_INT8) * 1e6


def copy_bandwidth() -> float:
    """Return bytes per second, read and written, of a large device-to-device copy."""
    x = jnp.zeros((2**29,), jnp.uint32)  # bytes would be added one by one, at a third of the rate
    copy = jax.jit(lambda _, x: x + jnp.uint32(1), donate_argnums=0, keep_unused=True)
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


def compile_in_place(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Compile a function whose results take the memory of its first argument."""
    return jax.jit(function, donate_argnums=0, keep_unused=True).lower(*args).compile()


class Keys:
    """Random operands: int8 over the whole range, floats of a plausible size."""

    def __init__(self, seed: int = 0) -> None:
        self._key = jax.random.key(seed)

    def array(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        if dtype == "int8":
            return jax.random.randint(key, shape, -128, 128, jnp.int8)
        return jax.random.normal(key, shape, dtype)


def measure_jqconv(
    spec: ConvSpec, count: int, algorithm: Algorithm | None = None
) -> dict[str, Any]:
    """Time jqconv under jit, `count` convolutions to a call, and the same plan bare.

    Bare, a plan is replayed in a CUDA graph with nothing of JAX or XLA. "bare" records each run as
    a node, as XLA does with every custom call; "stream" records the runs back to back on one
    stream, where cuDNN's kernels overlap at their ends, about a microsecond that no custom call can
    have. A form's bare plan leaves out what the form does before and after.
    """
    algorithm = algorithm or _choice.settle(spec)
    sets, xs, ws = Operands(spec), min(count, SETS), count
    x = [sets.draw("x") for _ in range(xs)]
    w = [sets.draw("w") for _ in range(ws)]
    y = [sets.keys.array(*spec.result) for _ in range(count)]
    rest = sets.rest()

    def operands(ys: Any, xs: Any, ws: Any, rest: Any) -> list[list[Any]]:
        # A residual is what the layer writes over, as in the network.
        return [
            [
                {"x": xs[i % len(xs)], "w": ws[i], "residual": ys[i], **rest}[name]
                for name in spec.operands
            ]
            for i in range(count)
        ]

    def one(*given: jax.Array) -> jax.Array:
        return _primitive.conv(spec, algorithm, *given, pinned=True)

    def convolutions(*args: Any) -> list[jax.Array]:
        return in_turn(one, operands(*args))

    bare = bare_us(spec, algorithm, operands(y, x, w, rest))
    args = (y, x, w, rest)
    us = pipelined(compile_in_place(convolutions, *args), *args) / count * 1e6
    return {"algorithm": str(algorithm), "jit_us": us} | bare


def bare_us(
    spec: ConvSpec, algorithm: Algorithm, operands: list[list[Any]]
) -> dict[str, float | None]:
    """Time the algorithm's plan alone, as nodes and as a stream; None for the lax lowering."""
    if algorithm.form == "xla":
        return {"bare_us": None, "stream_us": None}
    core, named = core_of(spec, algorithm)
    presentation = _forms.present(spec, algorithm.form)

    @jax.jit
    def prepare(given: list[Any]) -> list[Any]:
        return _forms.in_order(core, presentation.prepare(_forms.named(spec, given)))

    prepared = [prepare(given) if presentation.steps else given for given in operands]
    nodes, stream = (
        float(np.median(time_plans(core, [named], prepared, runs=1, overlaps=overlaps)))
        for overlaps in (False, True)
    )
    return {"bare_us": nodes, "stream_us": stream}


class Operands:
    """Random operands of a spec: codes over the whole range, and scales that bring sums back."""

    def __init__(self, spec: ConvSpec) -> None:
        self.spec = spec
        self.keys = Keys()

    def draw(self, name: str) -> jax.Array:
        """Return a tensor: an operand that is not a scale."""
        return self.keys.array(*self.spec.operands[name])

    def rest(self) -> dict[str, jax.Array]:
        """Return the scales and the bias."""
        # Products of random codes have a spread of about 74**2.
        values = {"multiplier": 1 / (74 * math.sqrt(self.spec.products)), "residual_scale": 0.5}
        return {
            name: jnp.full(shape, values.get(name, 0.0), jnp.float32)
            for name, (shape, _) in self.spec.operands.items()
            if len(shape) < 4
        }


def measure_xla(spec: ConvSpec, count: int, dtype: str, kernels: str = "HWIO") -> float:
    """Time XLA's own convolution with the epilogue that it fuses: bf16, or int8 with one scale.

    Kernels in HWIO are what Flax has; XLA transposes them in every call to OHWI, which cuDNN reads.
    """
    keys = Keys()
    xs = [keys.array(spec.x_shape, dtype) for _ in range(SETS)]
    ws = [keys.array(kernel_shape(spec, kernels), dtype) for _ in range(count)]
    zs = [keys.array(spec.y_shape, dtype) for _ in range(SETS if spec.residual else 0)]
    wide = "float32" if dtype == "int8" else dtype
    bias = jnp.ones(spec.w_shape[0], wide)

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            w,
            spec.strides,
            spec.padding,
            dimension_numbers=("NHWC", kernels, "NHWC"),
            feature_group_count=spec.groups,
            preferred_element_type=wide,
        )

    def layer(x: jax.Array, w: jax.Array, bias: jax.Array, z: jax.Array | None) -> jax.Array:
        y = conv(x, w)
        y = y * 1e-4 if dtype == "int8" else y
        if z is not None:
            z = z.astype(wide)
            y = y + (z * 0.5 if dtype == "int8" else z)
        y = y + bias
        y = jnp.maximum(y, 0) if spec.activation else y
        return jnp.clip(y, -128, 127).astype(jnp.int8) if dtype == "int8" else y

    def layers(ys: Any, xs: Any, ws: Any, zs: Any, bias: jax.Array) -> list[jax.Array]:
        zs = zs or [None]
        return in_turn(layer, [(xs[i % SETS], w, bias, zs[i % len(zs)]) for i, w in enumerate(ws)])

    ys = [jnp.zeros(spec.y_shape, dtype) for _ in range(count)]
    compiled = compile_in_place(layers, ys, xs, ws, zs, bias)
    return pipelined(compiled, ys, xs, ws, zs, bias) / count * 1e6


def kernel_shape(spec: ConvSpec, kernels: str) -> tuple[int, ...]:
    """Return the shape of the kernel in an order of axes."""
    return tuple(dict(zip("OHWI", spec.w_shape, strict=True))[axis] for axis in kernels)


def convolutions_per_call(floor: float) -> int:
    """Return as many as keep the device busy for about as long as the network does, 2 ms or so.

    A call costs the device some microseconds between the one before and the one after: it has to be
    long for them not to count. Nor is it longer than that: the smallest layers, which take several
    times their floor, would be compiled hundreds of times over.
    """
    return min(128, math.ceil(1000 / floor))


def need_gpu() -> jax.Device:
    """Return the GPU, or end the program."""
    if jax.default_backend() != "gpu":
        raise SystemExit("this benchmark needs an NVIDIA GPU; JAX found none")
    return jax.devices()[0]


def write_json(path: str | None, report: dict[str, Any]) -> None:
    """Write a report with what its figures belong to, if there is somewhere to write it."""
    if path:
        with open(path, "w") as file:
            json.dump({"environment": environment()} | report, file, indent=1)


def number(value: float | None, width: int = 9) -> str:
    """Return a table's cell."""
    return f"{'-':>{width}s}" if value is None else f"{value:{width}.1f}"


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

"""ResNet-50 v1.5 whole: int8 against bf16 and float32 under XLA, and the training step.

One model, that of examples/resnet50.py, in one run on one GPU. Inference has BatchNorm folded on
all sides. The training step is a gradient and an update: in bf16, parameters included, and
quantization-aware with float32 parameters; with BatchNorm folded, and live.

    python benchmarks/resnet50.py --json resnet50_h200.json --plot resnet50_h200.png
"""

from __future__ import annotations

import argparse
import pathlib
import runpy
import statistics
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from matplotlib.figure import Figure
from measuring import (
    compile_in_place,
    copy_bandwidth,
    floor_us,
    need_gpu,
    pipelined,
    write_json,
)

import jqconv.flax
from jqconv import _collect

BATCHES = (1, 8, 64, 128, 256)


PATH = pathlib.Path(__file__).parents[1] / "examples" / "resnet50.py"
example = types.SimpleNamespace(**runpy.run_path(str(PATH)))


def make_model(images: jax.Array, *, folded: bool = True, **options: Any) -> nnx.Module:
    """Return the network in float32 with statistics of the images, BatchNorm folded if wanted."""
    model = example.ResNet50(nnx.Rngs(0), **options)
    example.trained_looking(model, images)
    if folded:
        jqconv.flax.fold_batch_norm(model, images[:1])
    return model


def cast(model: nnx.Module, dtype: str) -> nnx.Module:
    """Turn the parameters of a float model into `dtype`."""
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    return model


def functional(model: nnx.Module) -> tuple[Callable[[Any, jax.Array], jax.Array], Any]:
    """Return the model as a function of its state, and the state."""
    graph, state = nnx.split(model)
    return lambda state, images: nnx.merge(graph, state)(images), state


# --- inference ------------------------------------------------------------------------------------


def inference_models(calibration: jax.Array) -> dict[str, nnx.Module]:
    """Return the same network three times, ready to serve."""
    int8 = make_model(calibration)
    jqconv.flax.calibrate(int8, [calibration], progress=False)
    jqconv.flax.freeze(int8, calibration[:1].astype("bfloat16"))
    return {
        "float32": make_model(calibration),
        "bfloat16": cast(make_model(calibration), "bfloat16"),
        "int8": int8,
    }


def measure_inference(
    models: dict[str, nnx.Module], batch: int, size: int, bandwidth: float
) -> dict[str, Any]:
    """Time one batch size: calls one after the other, and a call that is waited for."""
    row: dict[str, Any] = {"batch": batch}
    for kind, model in models.items():
        dtype = "float32" if kind == "float32" else "bfloat16"
        images = example.natural(jax.random.key(1), batch, size).astype(dtype)
        run, state = functional(model)
        if kind == "int8":
            jqconv.tune(run, state, images, progress=False)
            row["floor_us"] = sum(
                one.count * floor_us(one.spec, bandwidth)
                for one in _collect.convolutions(run, state, images)
            )
        logits = jax.eval_shape(run, state, images)
        call = compile_in_place(lambda _, *args: run(*args), logits, state, images)  # noqa: B023
        row[f"{kind}_images_s"] = batch / pipelined(call, jnp.zeros_like(logits), state, images)
        row[f"{kind}_latency_ms"] = 1e3 * waited(call, jnp.zeros_like(logits), state, images)
    return row


def waited(call: Callable[..., Any], results: Any, *args: Any) -> float:
    """Return the median of seconds from a call to its result."""
    times = []
    for _ in range(60):
        start = time.perf_counter()
        results = jax.block_until_ready(call(results, *args))
        times.append(time.perf_counter() - start)
    return statistics.median(times[10:])


# --- training -------------------------------------------------------------------------------------


def training_models(calibration: jax.Array) -> dict[str, nnx.Module]:
    """Return the networks that take a step."""
    models: dict[str, nnx.Module] = {}
    for suffix, folded in (("", True), (", live BatchNorm", False)):
        # What a BatchNorm reads and writes is bf16 on both sides; folded, it is not there.
        dtype = None if folded else jnp.bfloat16
        floats = make_model(calibration, folded=folded, dtype=dtype)
        models[f"bfloat16{suffix}"] = cast(floats, "bfloat16")
        for name, learned in (("int8", False), ("int8, learned scales", True)):
            if learned and not folded:
                continue
            model = make_model(calibration, folded=folded, learned_scales=learned, dtype=dtype)
            jqconv.flax.calibrate(model, [calibration], progress=False)
            models[name + suffix] = model
        if not folded:
            for name in (f"bfloat16{suffix}", f"int8{suffix}"):
                models[name].train()
    return models


def make_step(model: nnx.Module) -> tuple[Callable[..., Any], Any]:
    """Return a step of gradient descent as a function of the model's state, and the state."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(model: nnx.Module, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(model(images).astype(jnp.float32))
        return -jnp.take_along_axis(logits, labels[:, None], 1).mean()

    def step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        model = nnx.merge(graph, *state)
        grads = nnx.grad(loss)(model, images, labels)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        return jax.tree.map(lambda p, g: p - (1e-6 * g).astype(p.dtype), params, grads), rest

    return step, (params, rest)


def measure_training(model: nnx.Module, batch: int, size: int) -> dict[str, float]:
    """Time a step, and tell what it needs beside parameters and images."""
    images = example.natural(jax.random.key(1), batch, size).astype("bfloat16")
    labels = jnp.arange(batch) % 1000
    step, state = make_step(model)
    if any(layer.mode == "train" for layer in jqconv.flax.qconvs(model).values()):
        jqconv.tune(step, state, images, labels, progress=False)
    compiled = jax.jit(step, donate_argnums=0).lower(state, images, labels).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return {"ms": 1e3 * pipelined(compiled, state, images, labels), "temporary_bytes": temporary}


# --- the report -----------------------------------------------------------------------------------


def draw(inference: list[dict[str, Any]], training: dict[str, Any], title: str, path: str) -> None:
    """Save a picture of both."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    figure.suptitle(title)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.4, 1, 1))
    batches = [str(row["batch"]) for row in inference]
    for kind in ("float32", "bfloat16", "int8"):
        left.plot(batches, [row[f"{kind}_images_s"] for row in inference], "o-", label=kind)
    floor = [1e6 * row["batch"] / row["floor_us"] for row in inference]
    left.plot(batches, floor, "k:", label="int8's floor")
    left.set(title="Inference, images/s", xlabel="batch", yscale="log")
    left.legend()
    left.grid(alpha=0.3)
    names = list(training)
    for axes, key, factor, what in (
        (middle, "ms", 1, "Training step, ms"),
        (right, "temporary_bytes", 1e-9, "Temporary memory, GB"),
    ):
        axes.barh(names, [factor * training[name][key] for name in names])
        axes.invert_yaxis()
        axes.set(title=what)
        axes.grid(axis="x", alpha=0.3)
    right.set_yticklabels([])
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print tables, write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="of inference")
    parser.add_argument("--training-batch", type=int, default=128, help="0 for none")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--plot", help="file for the picture")
    args = parser.parse_args()
    device = need_gpu()
    bandwidth = copy_bandwidth()
    calibration = example.natural(jax.random.key(0), 32, args.image_size)

    inference = []
    models = inference_models(calibration)
    print(
        "batch  images/s: float32  bfloat16      int8     floor   over bf16   ms waited: bf16  int8"
    )
    for batch in args.batches:
        row = measure_inference(models, batch, args.image_size, bandwidth)
        inference.append(row)
        print(
            f"{batch:5d} {row['float32_images_s']:18.0f} {row['bfloat16_images_s']:9.0f}"
            f" {row['int8_images_s']:9.0f} {1e6 * batch / row['floor_us']:9.0f}"
            f" {row['int8_images_s'] / row['bfloat16_images_s']:11.2f}"
            f" {row['bfloat16_latency_ms']:17.3f} {row['int8_latency_ms']:5.3f}",
            flush=True,
        )
    del models

    training = {}
    if args.training_batch:
        print(f"\ntraining step, batch {args.training_batch}        ms   temporary GB")
        for name, model in training_models(calibration).items():
            training[name] = measure_training(model, args.training_batch, args.image_size)
            ms, size = training[name]["ms"], training[name]["temporary_bytes"] / 1e9
            print(f"{name:30s} {ms:8.2f} {size:14.2f}", flush=True)
    figures = {"image_size": args.image_size, "training_batch": args.training_batch}
    write_json(args.json, figures | {"inference": inference, "training": training})
    if args.plot:
        draw(inference, training, f"ResNet-50 v1.5 on {device.device_kind}", args.plot)


if __name__ == "__main__":
    main()

"""ResNet-50 from float to int8: fold, calibrate, look at every layer, freeze, compare.

The weights are random, with BatchNorm statistics of real data flow, so that nothing has to be
downloaded: what is compared is int8 with float, not accuracy.

    python examples/resnet50.py                                  # small, on a CPU
    python examples/resnet50.py --batch 128 --image-size 224     # on a GPU
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

import jqconv.flax
import jqconv.nn
from jqconv.flax import QConv

BLOCKS = (3, 4, 6, 3)


class Bottleneck(nnx.Module):
    """1x1, 3x3 and 1x1, the last with the residual in its epilogue; v1.5 strides in the middle."""

    def __init__(self, c: int, width: int, stride: int, conv: Callable[..., QConv]) -> None:
        self.reduce = conv(c, width, (1, 1), activation="relu")
        self.spatial = conv(width, width, (3, 3), stride, padding=1, activation="relu")
        self.expand = conv(width, 4 * width, (1, 1), activation="relu")
        projects = stride > 1 or c != 4 * width
        self.project = conv(c, 4 * width, (1, 1), stride) if projects else nnx.data(None)

    def __call__(self, x: Any) -> Any:
        """Return the block's output: int8 where `x` is, float where it is float."""
        residual = x if self.project is None else self.project(x)
        return self.expand(self.spatial(self.reduce(x)), residual=residual)


class ResNet50(nnx.Module):
    """ResNet-50 v1.5; int8 from the first convolution to the pooling before the head.

    Parameters
    ----------
    rngs : nnx.Rngs
        For the parameters.
    classes : int
        Outputs.
    blocks : sequence of int
        Bottlenecks in each stage.
    width : int
        Channels of the stem.
    **options
        Of every QConv, such as `learned_scales`.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        classes: int = 1000,
        blocks: Sequence[int] = BLOCKS,
        width: int = 64,
        **options: Any,
    ) -> None:
        def conv(c: int, k: int, *args: Any, **kwargs: Any) -> QConv:
            norm = nnx.BatchNorm(k, momentum=0.9, dtype=options.get("dtype"), rngs=rngs)
            kwargs |= {"use_bias": False, "norm": norm, "output": "int8", "rngs": rngs}
            return QConv(c, k, *args, **kwargs, **options)

        self.stem = conv(3, width, (7, 7), 2, padding=3, activation="relu")
        stages, c = [], width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if block == 0 and stage > 0 else 1
                stages.append(Bottleneck(c, width * 2**stage, stride, conv))
                c = 4 * width * 2**stage
        self.blocks = nnx.List(stages)
        self.head = QConv(c, classes, (1, 1), rngs=rngs, **options)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return logits (N, classes) of images (N, H, W, 3)."""
        x = jqconv.nn.max_pool(self.stem(images), (3, 3), (2, 2), ((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(jqconv.nn.mean(x, (1, 2), keepdims=True))[:, 0, 0]


def trained_looking(model: nnx.Module, images: jax.Array) -> None:
    """Give every BatchNorm what training would: data's statistics, and small residual branches."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            module.momentum = 0.0
        if isinstance(module, Bottleneck):
            module.expand.norm.scale[...] = 0.3 * module.expand.norm.scale[...]
    model.train()
    nnx.jit(lambda model, x: model(x))(model, images)
    model.eval()


def natural(key: jax.Array, batch: int, size: int) -> jax.Array:
    """Return smooth random images: neighbours alike, as in photographs."""
    coarse = jax.random.normal(key, (batch, max(size // 8, 1), max(size // 8, 1), 3))
    fine = 0.2 * jax.random.normal(jax.random.fold_in(key, 1), (batch, size, size, 3))
    return jax.image.resize(coarse, fine.shape, "linear") + fine


def decibels(want: jax.Array, got: jax.Array) -> float:
    """Return the signal-to-quantization-noise ratio."""
    signal, noise = np.sum(np.square(want)), np.sum(np.square(want - got))
    return float(10 * np.log10(signal / noise)) if noise else float("inf")


def images_per_second(model: nnx.Module, images: jax.Array) -> float:
    """Time the jitted model, calls issued without waiting in between."""
    graph, state = nnx.split(model)
    run = jax.jit(lambda state, images: nnx.merge(graph, state)(images))
    run(state, images).block_until_ready()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < 1:
        y = run(state, images)
        calls += 1
        if jax.default_backend() == "cpu":
            y.block_until_ready()
    y.block_until_ready()
    return calls * len(images) / (time.perf_counter() - start)


def main() -> None:
    """Go the whole way, and print what it costs and gains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--calibration-batches", type=int, default=4)
    args = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), args.calibration_batches + 1)
    images, *batches = [natural(key, args.batch, args.image_size) for key in keys]
    model = ResNet50(nnx.Rngs(0))
    trained_looking(model, batches[0])
    jqconv.flax.fold_batch_norm(model, images[:1])
    logits = model(images)
    float_rate = images_per_second(model, images)

    jqconv.flax.calibrate(model, batches)
    print(jqconv.flax.sensitivity(model, batches[:1]))
    jqconv.flax.freeze(model, images[:1])
    int8_logits = nnx.jit(lambda model, x: model(x))(model, images)
    int8_rate = images_per_second(model, images)

    device = jax.devices()[0].device_kind
    print(f"\nlogits: {decibels(logits, int8_logits):.1f} dB against float")
    agree = np.mean(np.argmax(logits, 1) == np.argmax(int8_logits, 1))
    print(f"same class for {agree:.0%} of {args.batch} images")
    print(f"{device}, batch {args.batch}, {args.image_size}x{args.image_size}:")
    print(f"  float32 {float_rate:10,.0f} images/s")
    print(f"  int8    {int8_rate:10,.0f} images/s")


if __name__ == "__main__":
    main()

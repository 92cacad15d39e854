"""The convolutions of ResNet-50 v1.5, each with the epilogue that the network has there."""

from __future__ import annotations

import collections
import dataclasses

from jqconv._spec import Activation, ConvSpec


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

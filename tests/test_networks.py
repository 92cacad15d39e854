"""Whole networks, from float to frozen int8: ResNet-50's and MobileNetV2's blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import examples
import jqconv.flax as jf
import jqconv.nn
from jqconv import QTensor
from jqconv.flax import QConv

resnet50 = examples.load("resnet50")


class InvertedResidual(nnx.Module):
    """MobileNetV2's block: expand, depthwise, and a linear bottleneck that adds in its epilogue."""

    def __init__(self, c, k, stride, expansion, rngs):
        def conv(c, k, *args, **options):
            norm = nnx.BatchNorm(k, momentum=0.0, rngs=rngs)
            return QConv(
                c, k, *args, use_bias=False, norm=norm, output="int8", rngs=rngs, **options
            )

        wide = c * expansion
        self.expand = conv(c, wide, (1, 1), activation="relu6")
        self.depthwise = conv(
            wide, wide, (3, 3), stride, feature_group_count=wide, activation="relu6"
        )
        self.project = conv(wide, k, (1, 1))
        self.adds = stride == 1 and c == k

    def __call__(self, x):
        y = self.depthwise(self.expand(x))
        return self.project(y, residual=x if self.adds else None)


class MobileNetV2(nnx.Module):
    """With fewer and narrower blocks than the paper's, and all of their kinds."""

    def __init__(self, rngs):
        norm = nnx.BatchNorm(16, momentum=0.0, rngs=rngs)
        self.stem = QConv(3, 16, (3, 3), 2, norm=norm, activation="relu6", output="int8", rngs=rngs)
        plan = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1)]
        self.blocks = nnx.List([InvertedResidual(c, k, s, 6, rngs) for c, k, s in plan])
        norm = nnx.BatchNorm(128, momentum=0.0, rngs=rngs)
        self.last = QConv(32, 128, (1, 1), norm=norm, activation="relu6", output="int8", rngs=rngs)
        self.head = QConv(128, 10, (1, 1), rngs=rngs)

    def __call__(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(jqconv.nn.mean(self.last(x), (1, 2), keepdims=True))[:, 0, 0]


NETWORKS = {
    "resnet": lambda: resnet50.ResNet50(nnx.Rngs(0), classes=10, blocks=(1, 2, 1), width=16),
    "mobilenet": lambda: MobileNetV2(nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_goes_from_float_to_int8(name):
    model = NETWORKS[name]()
    images, batch, example = (
        resnet50.natural(jax.random.key(i), n, 48) for i, n in enumerate((4, 4, 1))
    )
    resnet50.trained_looking(model, batch)
    normed = nnx.jit(lambda m, x: m(x))(model, images)
    report = jf.fold_batch_norm(model, example)
    assert all(into for _, into, _ in report.rows)
    want = nnx.jit(lambda m, x: m(x))(model, images)
    np.testing.assert_allclose(want, normed, rtol=1e-2, atol=1e-2)

    jf.calibrate(model, [batch, images], progress=False)
    sensitivity = jf.sensitivity(model, [batch])
    assert set(sensitivity.sqnr) == set(jf.qconvs(model))
    assert min(sensitivity.sqnr.values()) > 20
    trained = nnx.jit(lambda m, x: m(x))(model, images)
    assert resnet50.decibels(want, trained) > 20

    jf.freeze(model, example)
    frozen = nnx.jit(lambda m, x: m(x))(model, images)
    assert resnet50.decibels(trained, frozen) > 40
    kinds = {type(m) for _, m in nnx.iter_modules(model)}
    assert QConv not in kinds
    assert jf.Int8Conv in kinds


def test_between_its_layers_a_frozen_network_passes_int8():
    model = NETWORKS["resnet"]()
    images = resnet50.natural(jax.random.key(0), 2, 32)
    resnet50.trained_looking(model, images)
    jf.fold_batch_norm(model, images)
    jf.calibrate(model, [images], progress=False)
    jf.freeze(model, images)
    x = model.stem(images)
    for block in [lambda x: jqconv.nn.max_pool(x, (3, 3), (2, 2)), *model.blocks]:
        x = block(x)
        assert isinstance(x, QTensor)
        assert x.dtype == jnp.int8

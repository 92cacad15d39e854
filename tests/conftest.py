"""Two host devices, strict dtypes, no settings of the user's, fixed seeds, measured errors."""

import glob
import os

HAS_GPU_NODE = bool(glob.glob("/dev/nvidia[0-9]*"))

if (
    not HAS_GPU_NODE or os.environ.get("JAX_PLATFORMS") == "cpu"
):  # read once, when jax starts its backend
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=2".strip()

# Read at the import of jqconv. The user's settings and store are not the suite's, nor does it time
# each convolution: a test that wants something else says so with jqconv.config.using.
for variable in [name for name in os.environ if name.startswith("JQCONV_")]:
    del os.environ[variable]
os.environ["JQCONV_SEARCH"] = "heuristic"
os.environ["JQCONV_CACHE_DIR"] = ""

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")


def _has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(
                pytest.mark.skip(
                    reason="no CUDA device: JAX's default backend is " + jax.default_backend()
                )
            )


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Seeded by the test's own name, so that no test's numbers hang on another's."""
    return np.random.default_rng(list(request.node.nodeid.split("::", 1)[-1].encode()))


@pytest.fixture
def measured(request):
    """measured(what, error): a line of the table at the end of the run."""
    properties = request.node.user_properties  # they travel with the test's report
    return lambda what, error: properties.append(("measured", (what, error)))


def pytest_terminal_summary(terminalreporter):
    reports = [report for found in terminalreporter.stats.values() for report in found]
    rows = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "measured"
    ]
    if rows:
        terminalreporter.section("measured against float64")
        for what, error in rows:
            terminalreporter.line(f"{what:<70} {error}")

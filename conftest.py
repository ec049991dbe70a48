"""What every test and every doctest runs under: eight simulated CPU devices and JAX at its
strictest.

pytest reads this file before it collects anything, in each worker process as well, and so before
JAX makes its devices. It stands at the root because the doctests in `functree/`, `docs/` and
`README.md` need it too.
"""

import gc
import importlib.util
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

DEVICES = 8

# The compilers of accelerators are extras of a gigabyte. `.ci/run` installs them, and names this
# file on the command line, so that it fails if these tests do not run.
_COMPILERS = ("libtpu", "jax_cuda13_plugin")
collect_ignore = (
    []
    if all(map(importlib.util.find_spec, _COMPILERS))
    else ["tests/compiled/test_accelerators.py"]
)

# Pages are opened in a browser, which no package of Python brings along. `.ci/run` installs one, so
# there its absence is a failure; elsewhere it is said at the head of the tests.
_BROWSER = ("chromium", "chromedriver")
_NO_BROWSER = not os.environ.get("CI") and not all(map(shutil.which, _BROWSER))
if _NO_BROWSER:
    collect_ignore.append("tests/report/test_browser.py")

# The documentation is built by an extra that only `.ci/run` installs, which names this folder.
if _NO_BROWSER or not all(map(importlib.util.find_spec, ("mkdocs", "nbclient"))):
    collect_ignore.append("tests/pages")

# The comparison of the documentation, with libraries that only `.ci/run` installs.
if not all(map(importlib.util.find_spec, ("flax", "haliax"))):
    collect_ignore.append("tests/peers/test_side_by_side.py")


def pytest_report_header() -> list[str]:
    """What does not run here."""
    if not _NO_BROWSER:
        return []
    return [f"no {' and '.join(_BROWSER)} here: pages are opened by the tests in CI alone"]


# Most of a test's time is compilation, and most of that is machine code. So this is not optimized,
# and by jaxlib 0.10 made in XLA's older way, which takes half the time. Later ones know only the
# newer way, so the tests with the newest JAX run by that. The collectives of a program are the same
# in both. Programs as small as these are not split for threads, which is a tenth of the time.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")


def _with_flags(flags: str) -> str:
    """`flags` (the text of XLA_FLAGS) with those of the tests; but for the devices, what it sets
    itself stays."""
    devices = f"--xla_force_host_platform_device_count={DEVICES}"
    return " ".join(
        {flag.partition("=")[0]: flag for flag in [*_FLAGS, *flags.split(), devices]}.values()
    )


# Both are read once: JAX_PLATFORMS when jax is imported, XLA_FLAGS when it makes its devices.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = _with_flags(os.environ.get("XLA_FLAGS", ""))

import equinox as eqx  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import AxisType, Mesh, PartitionSpec  # noqa: E402
from jaxtyping import Array, Float, Int  # noqa: E402

# Hostile on purpose. Users' programs run under either setting, and a library that promotes by
# accident breaks the strict ones and hides a wrong rank or dtype from the others. A test that runs
# code which is not ours and promotes (optax.adam's bias correction does) says so where it does:
# `with jax.numpy_dtype_promotion("standard"):`, or `with jax.numpy_rank_promotion("allow"):`.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# No limits on time: the first example pays for a compilation, and on a busy machine anything is
# slow. Derandomized where a run must be repeatable.
hypothesis.settings.register_profile(
    "functree",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=200,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
hypothesis.settings.load_profile("functree")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run on other devices: nothing here may be skipped or pass for want of a mesh."""
    found = jax.devices()
    if len(found) != DEVICES or found[0].platform != "cpu":
        raise pytest.UsageError(
            f"The tests need {DEVICES} simulated CPU devices and found {len(found)} of platform "
            f"{found[0].platform!r}: JAX made its devices before conftest.py could ask for them."
        )


# A million objects of JAX and pytest live as long as the process, and so do the programs in JAX's
# caches. Collections that walk over all of them again take a tenth of the time of the tests.
gc.set_threshold(10_000, 10, 10)


class _Memory:
    """What a worker may have in memory before it forgets its programs, in bytes: all together they
    take ten gigabytes, and two workers would not fit into the memory of a small machine."""

    MORE = 3 * 2**30
    limit = MORE


@pytest.fixture(autouse=True, scope="module")
def _collections_pass_by_what_was_there_before() -> None:
    forgets = _resident() > _Memory.limit
    if forgets:
        # What still runs needs its program.
        for array in jax.live_arrays():
            with suppress(jax.errors.JaxRuntimeError):  # which a test has seen
                array.block_until_ready()
        gc.unfreeze()
        jax.clear_caches()
    gc.collect()
    gc.freeze()
    if forgets:
        # Not all of it is given back, and then each module would compile all anew.
        _Memory.limit = max(_Memory.MORE, _resident() + _Memory.MORE // 2)


def _resident() -> int:
    """The bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.fixture
def mesh() -> Mesh:
    """A 2 by 4 mesh with axes `data` and `model`, both Auto."""
    return Mesh(
        np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )


@pytest.fixture(autouse=True)
def _doctest_surroundings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give doctests the names that every page would otherwise import, and pages JAX's own defaults.

    What a page shows is a user's program, with optax in it, not a part of the library.
    """
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    import functree as ft

    names = request.getfixturevalue("doctest_namespace")
    names.update(ft=ft, jax=jax, jnp=jnp, eqx=eqx, np=np)
    names.update(Array=Array, Float=Float, Int=Int, P=PartitionSpec)
    names.update(folder=request.getfixturevalue("tmp_path"))
    if request.node.path.suffix != ".md":
        yield
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield

"""What every test and every doctest runs under: eight simulated CPU devices, and JAX at its
strictest.

pytest reads this file before it collects anything, in each worker process as well, and so before
JAX makes its devices. It stands at the root because the doctests in `functree/`, `docs/` and
`README.md` need it too.
"""

import gc
import importlib.util
import os
import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

DEVICES = 8

# Tests that need more than the extra `test`, with the packages and programs that they need. They
# are collected where these are installed; elsewhere the head of the run lists them.
_BROWSER = ("selenium", "chromium", "chromedriver")
_NEEDS = {
    "tests/compiled/test_accelerators.py": ("libtpu", "jax_cuda13_plugin", "diffrax"),
    "tests/examples": ("grain", "matplotlib", "penzai", "treescope"),
    "tests/libraries": (
        *("IPython", "coordax", "diffrax", "distreqx", "equimo", "flowjax"),
        *("jax_dataclasses", "lineax", "optimistix", "paramax", "pdequinox", "penzai"),
        "transformer_flows",
    ),
    "docs/any-program.md": ("flax",),
    "docs/library-model.md": ("equimo",),
    "tests/pages": ("IPython", "mkdocs", "nbclient", *_BROWSER),
    "tests/report/test_browser.py": _BROWSER,
    "tests/why": ("flax",),
}
_MISSING = {
    path: missing
    for path, needed in _NEEDS.items()
    if (missing := [x for x in needed if not (importlib.util.find_spec(x) or shutil.which(x))])
}
collect_ignore = list(_MISSING)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--complete",
        action="store_true",
        help="fail if a test is not collected because a package that it needs is not installed",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What is not collected here."""
    return [f"not collected: {path} needs {', '.join(x)}" for path, x in _missing(config).items()]


def _missing(config: pytest.Config) -> dict[str, list[str]]:
    """The tests that are not collected for want of a package, with the packages."""
    ignored = config.getoption("ignore") or []
    return {path: missing for path, missing in _MISSING.items() if path not in ignored}


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
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402
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


# What a worker compiles before it forgets its programs: about a gigabyte of them. All together
# would take ten.
_PROGRAMS = 600
# What a worker needs at most, in bytes.
_WORKER = 5 * 2**29
# How long the compilations of a run are kept, in seconds.
_WEEK = 7 * 24 * 3600


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run on other devices: nothing here may be skipped or pass for want of a mesh."""
    found = jax.devices()
    if len(found) != DEVICES or found[0].platform != "cpu":
        raise pytest.UsageError(
            f"The tests need {DEVICES} simulated CPU devices and found {len(found)} of platform "
            f"{found[0].platform!r}: JAX made its devices before conftest.py could ask for them."
        )
    if config.getoption("complete") and _missing(config):
        raise pytest.UsageError("\n".join(pytest_report_header(config)))
    if (cache := getattr(config, "cache", None)) is not None:  # without `-p no:cacheprovider`
        _keep_compilations(cache.mkdir(f"jaxlib-{version('jaxlib')}"))


def _keep_compilations(folder: Path) -> None:
    """Let JAX keep its compilations in a folder, in the processes that tests start as well.

    JAX's key for a program has everything that changes the machine code. It leaves out the lines
    and scopes of the source: what reads these, or the compiler's own words, uses
    `compiles_anew`.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for file in folder.iterdir():
            if file.stat().st_mtime < time.time() - _WEEK:
                file.unlink(missing_ok=True)
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    # JAX does not write its files in one step. A process that reads one too early compiles.
    os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache"


@pytest.fixture
def compiles_anew() -> Iterator[None]:
    """JAX does not read the compilations that are kept: they have the lines of an earlier run, and
    the compiler says nothing."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # which remembers whether it is used
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """As many workers as cores, and not more than fit into the memory, where the system tells it
    (Windows does not)."""
    cores = yield
    if not hasattr(os, "sysconf"):
        return cores
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores, memory // _WORKER))


# A million objects of JAX and pytest live as long as the process, and so do the programs in JAX's
# caches. Collections that walk over all of them again take a tenth of the time of the tests.
gc.set_threshold(10_000, 10, 10)


class _Programs:
    """The programs that this process has compiled since it forgot them."""

    number = 0

    @classmethod
    def count(cls, event: str, seconds: float, **_: object) -> None:
        cls.number += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_Programs.count)


@pytest.fixture(autouse=True)
def _forget_programs() -> None:
    """Forget the programs when there are many, between two tests."""
    if _Programs.number <= _PROGRAMS:
        return
    _Programs.number = 0
    # What still runs needs its program.
    for array in jax.live_arrays():
        with suppress(jax.errors.JaxRuntimeError):  # which a test has seen
            array.block_until_ready()
    gc.unfreeze()
    jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _collections_pass_by_what_was_there_before() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture
def mesh() -> Mesh:
    """A 2 by 4 mesh with axes `data` and `model`, both Auto."""
    return Mesh(
        np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )


@pytest.fixture(autouse=True)
def _doctest_surroundings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give docstrings the names that each would otherwise import, and pages JAX's own defaults.

    What a page shows is a user's program, with optax in it, not a part of the library. It imports
    what it uses, so that it can be read from its top.
    """
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    import functree as ft

    # Pages print lines of source, and what the compiler says.
    request.getfixturevalue("compiles_anew")
    names = request.getfixturevalue("doctest_namespace")
    names.clear()  # those of another doctest of this process
    if request.node.path.suffix != ".md":
        names.update(ft=ft, jax=jax, jnp=jnp, eqx=eqx, np=np)
        names.update(Array=Array, Float=Float, Int=Int, P=PartitionSpec)
        names.update(folder=request.getfixturevalue("tmp_path"))
        yield
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield

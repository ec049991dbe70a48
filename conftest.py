"""This module gives every test and doctest eight simulated CPU devices and JAX's strict settings.

pytest reads it before it collects anything, in each worker process too, and thus before JAX creates
its devices. It is in the root folder because the doctests in `functree/`, `docs/` and `README.md`
need it too.
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

# Tests that need more than the extra `test`, with the packages and programs that they need. Where
# any is missing, they are not collected, and the header of the run lists them.
_BROWSER = ("selenium", "chromium", "chromedriver")
_NEEDS = {
    "tests/compiled/test_accelerators.py": ("libtpu", "jax_cuda13_plugin", "diffrax"),
    "tests/examples": ("grain", "matplotlib", "penzai", "treescope"),
    "tests/libraries": (
        *("IPython", "coordax", "diffrax", "equimo", "flax", "flowjax"),
        *("jax_dataclasses", "lineax", "optimistix", "paramax", "penzai"),
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
        help="fail if a test is not collected because a package is not installed",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """List the tests that are not collected here."""
    return [f"not collected: {path} needs {', '.join(x)}" for path, x in _missing(config).items()]


def _missing(config: pytest.Config) -> dict[str, list[str]]:
    """Return the tests that are not collected, with their missing packages."""
    ignored = config.getoption("ignore") or []
    return {path: missing for path, missing in _MISSING.items() if path not in ignored}


# Most of a test's time is compilation, and most of compilation is machine code. The code is
# therefore not optimized. jaxlib 0.10 generates it with XLA's older emitters, in half the time.
# Later versions have only the newer emitters. The collectives of a program are the same with both.
# Code generation is not split over threads, which saves a tenth of the time for small programs.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")


def _with_flags(flags: str) -> str:
    """Add the tests' flags to `flags`, the text of XLA_FLAGS.

    Flags that are already set keep their values, except the number of devices.
    """
    devices = f"--xla_force_host_platform_device_count={DEVICES}"
    return " ".join(
        {flag.partition("=")[0]: flag for flag in [*_FLAGS, *flags.split(), devices]}.values()
    )


# JAX reads each variable once: JAX_PLATFORMS during its import, XLA_FLAGS when it creates devices.
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

# Strict on purpose. Users' programs run under either setting. A library that promotes by accident
# breaks programs with strict settings, and hides a wrong rank or dtype in others. A test may run
# other libraries' code that promotes, such as optax.adam's bias correction. It then runs this code
# in `with jax.numpy_dtype_promotion("standard"):` or `with jax.numpy_rank_promotion("allow"):`.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# There is no time limit: the first example includes a compilation, and a busy machine is slow. In
# CI the examples are derandomized, because a run must be repeatable.
hypothesis.settings.register_profile(
    "functree",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=200,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
hypothesis.settings.load_profile("functree")


# The number of programs that a worker compiles before it drops them: about a gigabyte. All programs
# together would take ten gigabytes.
_PROGRAMS = 600
# The most memory that a worker needs, in bytes.
_WORKER = 5 * 2**29
# The age at which cached compilations are deleted, in seconds.
_WEEK = 7 * 24 * 3600


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run on other devices, so that no test is skipped or passes without a mesh."""
    devices = jax.devices()
    if len(devices) != DEVICES or devices[0].platform != "cpu":
        raise pytest.UsageError(
            f"The tests need {DEVICES} simulated CPU devices, but JAX has {len(devices)} of "
            f"platform {devices[0].platform!r}: it created them before conftest.py set XLA_FLAGS."
        )
    if config.getoption("complete") and _missing(config):
        raise pytest.UsageError("\n".join(pytest_report_header(config)))
    if (cache := getattr(config, "cache", None)) is not None:  # without `-p no:cacheprovider`
        _keep_compilations(cache.mkdir(f"jaxlib-{version('jaxlib')}"))


def _keep_compilations(folder: Path) -> None:
    """Let JAX cache its compilations in a folder, including compilations in subprocesses.

    JAX's key of a program covers everything that changes the machine code. It omits source lines
    and scopes. Tests that read these, or the compiler's messages, use `compiles_anew`.
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
    # JAX does not write its files atomically. A process that reads a partial file compiles instead.
    os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache"


@pytest.fixture
def compiles_anew() -> Iterator[None]:
    """Turn JAX's compilation cache off.

    Cached programs have the source lines of an earlier run, and no compiler messages.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the cache remembers whether it is enabled
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Return the number of workers: one per core, but at most as many as fit into memory.

    Windows does not report its memory, so only its cores count.
    """
    cores = yield
    if not hasattr(os, "sysconf"):
        return cores
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores, memory // _WORKER))


# A million objects of JAX and pytest live as long as the process, as do the programs in JAX's
# caches. Repeated garbage collections over all of them take a tenth of the tests' time.
gc.set_threshold(10_000, 10, 10)


class _Programs:
    """The number of programs that this process has compiled since it last dropped them."""

    number = 0

    @classmethod
    def count(cls, event: str, seconds: float, **_: object) -> None:
        cls.number += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_Programs.count)


@pytest.fixture(autouse=True)
def _forget_programs() -> None:
    """Drop the compiled programs between two tests if there are many."""
    if _Programs.number <= _PROGRAMS:
        return
    _Programs.number = 0
    # A program that still runs must not be dropped.
    for array in jax.live_arrays():
        with suppress(jax.errors.JaxRuntimeError):  # a test has already seen this error
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
    """Return a 2 × 4 mesh with the Auto mesh axes `data` and `model`."""
    return Mesh(
        np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )


@pytest.fixture(autouse=True)
def _doctest_surroundings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give docstrings common names without imports, and run pages with JAX's default settings.

    A page shows a user's program, with optax in it, and not a part of the library. It imports
    everything that it uses, so that it can be read from the top.
    """
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    import functree as ft

    # Pages print source lines and compiler messages.
    request.getfixturevalue("compiles_anew")
    names = request.getfixturevalue("doctest_namespace")
    names.clear()  # drops the names of this process's previous doctest
    if request.node.path.suffix != ".md":
        names.update(ft=ft, jax=jax, jnp=jnp, eqx=eqx, np=np)
        names.update(Array=Array, Float=Float, Int=Int, P=PartitionSpec)
        names.update(folder=request.getfixturevalue("tmp_path"))
        yield
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield

"""`made` runs a factory, given as `module:factory`, without allocating arrays.

`prepare` and `check_devices` handle the options `--devices`, `--mesh` and `--target`.
"""

import importlib
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.core import Tracer

from functree.argument_checks import shown
from functree.calls.closures import closed_over, held
from functree.cli.failure import Failure, UsersCode, users_error
from functree.devices.targets import Target
from functree.errors import count, did_you_mean
from functree.explorer.ranking import mesh_text
from functree.tree.arrays import AnyArray, Tree
from functree.tree.skeleton.skeleton import Skeleton

_FORMS = {
    "factory": "write `module:factory`, where the module is installed or in the current folder",
    "layout": "write `module:name`, where the module is installed or in the current folder",
}


def made(text: str) -> Tree:
    """Run a factory abstractly, without allocating arrays, and return its value.

    Raises:
        Failure: if `text` does not name a function.
        Failure: if the function raises an error.
        Failure: if the function returns no arrays.
    """
    factory = _found(text)
    with UsersCode(f"{text} raised"):
        try:
            value = _abstractly(factory)
        except jax.errors.ConcretizationTypeError as error:
            raise users_error(
                f"{text} needs the value of an array, but factories are only traced", error
            ) from error
    if not is_call(value) and not Skeleton.apart(value)[1]:
        raise Failure(
            f"{text} returned {_kind(value)}, which has no arrays: return a tree of arrays, or a "
            "function with its arguments"
        )
    return value


def made_call(text: str) -> tuple[Callable[..., Tree], tuple[Tree, ...]]:
    """Run a factory that returns a function and its arguments.

    Raises:
        Failure: if the factory returns anything else.
    """
    value = made(text)
    if is_call(value):
        step, args = value
        for path, one in held(closed_over(inspect.unwrap(step))):
            # A tracer from the factory's trace, which has ended.
            if isinstance(one, Tracer):
                raise Failure(
                    f"{text}: the function closes over `{path}`, an array that has no value, "
                    "because the factory is only traced: pass the array as an argument, or create "
                    "it in the function"
                )
        return step, tuple(args)
    raise Failure(
        f"{text} returned {_kind(value)} instead of a function with its arguments: write "
        "`return step, (state, batch)`"
    )


def is_call(value: object) -> bool:
    """Return whether a value is a pair of a function and its arguments."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    step, args = value
    return callable(step) and isinstance(args, tuple | list)


def _kind(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, tuple):
        names = ", ".join(type(one).__name__ for one in value)
        return f"a tuple of {names}" if names else "an empty tuple"
    return f"a value of type {type(value).__name__}"


def named(text: str, what: str) -> Any:
    """Import the value that `module:name` refers to.

    Args:
        text: the module and the name.
        what: the expected kind, "factory" or "layout", for messages.

    Raises:
        Failure: if `text` does not have the form `module:name`.
        Failure: if the module cannot be imported.
        Failure: if the module does not define the name.
    """
    module_name, _, name = text.partition(":")
    plain = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
    # The path of a file in a parent folder now begins with a dot.
    if not all(plain.split(".")) or not all(name.split(".")):
        raise Failure(f"{text!r} is not a {what}: {_FORMS[what]}")
    if plain != module_name:
        raise Failure(f"{text!r} names a file instead of a module: write `{plain}:{name}`")
    module = _imported(module_name)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            known = [one for one in dir(value) if not one.startswith("_")]
            raise Failure(f"{module_name} has no `{part}`{did_you_mean(part, known)}")
        value = getattr(value, part)
    return value


def _found(text: str) -> Callable[[], Any]:
    """Import a factory, and check that it can be called without arguments."""
    value = named(text, "factory")
    if not callable(value):
        raise Failure(
            f"{text} is {shown(value)}, not a function: write a function that returns this value"
        )
    try:
        inspect.signature(value).bind()
    except ValueError:  # a C function without a signature
        pass
    except TypeError as error:
        raise Failure(
            f"{text}{inspect.signature(value)} must accept a call without arguments: {error}; "
            "give each parameter a default value"
        ) from error
    return value


def _imported(name: str) -> Any:
    with UsersCode(f"{name} cannot be imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # With a different name, the module exists, but an import inside it failed.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            here = [path.stem for path in Path.cwd().glob("*.py")]
            raise Failure(f"no module named `{error.name}`{did_you_mean(name, here)}") from error


def _abstractly(factory: Callable[[], Tree]) -> Tree:
    """Trace a function, and return its result with abstract arrays."""
    results: list[tuple[Skeleton, list[AnyArray]]] = []

    def run() -> list[Any]:
        skeleton, arrays = Skeleton.apart(factory())
        results.append((skeleton, arrays))
        # A traced function cannot return abstract arrays.
        return [None if isinstance(array, jax.ShapeDtypeStruct) else array for array in arrays]

    computed = jax.eval_shape(run)
    skeleton, arrays = results[-1]
    abstract: list[AnyArray] = []
    for array, traced in zip(arrays, computed, strict=True):
        abstract.append(array if traced is None else traced)
    return skeleton.fill(abstract)


_FLAG = "--xla_force_host_platform_device_count"


def prepare(devices: int | None, *, only_compile: bool) -> None:
    """Configure JAX to use simulated devices, or only the CPU.

    Args:
        devices: the number of simulated CPU devices; None to use the existing devices.
        only_compile: whether the command needs no accelerator. JAX then uses only the CPU.

    Raises:
        Failure: if JAX has already created fewer devices.
    """
    if devices is not None:
        # JAX reads the flag when it creates its devices, not when it is imported.
        others = re.sub(rf"{_FLAG}=\S+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{others} {_FLAG}={devices}".strip()
        jax.config.update("jax_platforms", "cpu")
        if len(jax.devices()) < devices:
            have = count(len(jax.devices()), "device")
            raise Failure(
                f"--devices {devices} cannot take effect, because JAX has already created {have}: "
                "run the command in a new process"
            )
    elif only_compile and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def check_devices(
    mesh: Mapping[str, int] | int, target: Target | None, devices: int | None
) -> None:
    """Raise Failure if the target or this machine has too few devices for the mesh.

    A target must have exactly as many devices as the mesh.
    """
    if isinstance(mesh, Mapping):
        needed = math.prod(mesh.values())
        asked = f"--mesh {mesh_text(mesh)} needs {count(needed, 'device')}"
    else:
        needed, asked = mesh, f"--mesh {mesh} needs {count(mesh, 'device')}"
    if target is not None:
        if needed != target.size:
            raise Failure(
                f"{asked}, but --target {target.text} has {target.size}: change one of them"
            )
        return
    have = len(jax.devices())
    if needed <= have:
        return
    if devices is not None:
        raise Failure(f"{asked}, but --devices is {devices}: write `--devices {needed}`")
    there = "there is 1" if have == 1 else f"there are {have}"
    add = f"add `--devices {needed}` to simulate them, or a target, such as `--target tpu:v5e:2x4`"
    raise Failure(f"{asked}, but {there}: {add}")

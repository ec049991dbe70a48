"""`made` runs a factory, named as `module:factory`, with abstract arrays.

`prepare` and `check_devices` handle the devices of the command line's options.
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
    "factory": "write `module:factory`, a function in a module of this folder or an installed one",
    "layout": "write `module:name`, a layout in a module of this folder or an installed one",
}


def made(text: str) -> Tree:
    """Run a factory abstractly, without allocating arrays, and return its value.

    Raises:
        Failure: if there is no such function.
        Failure: if it raises, or returns no arrays.
    """
    factory = _found(text)
    with UsersCode(f"{text} raised"):
        try:
            value = _abstractly(factory)
        except jax.errors.ConcretizationTypeError as error:
            raise users_error(
                f"{text} needs the value of an array, but factories run without values", error
            ) from error
    if not is_call(value) and not Skeleton.apart(value)[1]:
        raise Failure(f"{text} returned {_kind(value)} without arrays")
    return value


def made_call(text: str) -> tuple[Callable[..., Tree], tuple[Tree, ...]]:
    """Return the function and the arguments that a factory returns.

    Raises:
        Failure: if it returns anything else.
    """
    value = made(text)
    if is_call(value):
        step, args = value
        for path, one in held(closed_over(inspect.unwrap(step))):
            # A tracer from the factory's trace, which has ended.
            if isinstance(one, Tracer):
                raise Failure(
                    f"{text}: the function closes over `{path}`, an array of the factory, which "
                    "has no values here: pass it as an argument, or create it in the function"
                )
        return step, tuple(args)
    raise Failure(
        f"{text} returned {_kind(value)} instead of a function with its arguments: write "
        "`return step, (state, batch)`"
    )


def is_call(value: object) -> bool:
    """Return whether a value is a function with its arguments."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    step, args = value
    return callable(step) and isinstance(args, tuple | list)


def _kind(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(one).__name__ for one in value) or 'nothing'}"
    return f"a {type(value).__name__}"


def named(text: str, what: str) -> Any:
    """Return the value that a text names: `module:name`.

    Args:
        text: the text.
        what: the expected kind, "factory" or "layout", for messages.

    Raises:
        Failure: if there is no such value.
    """
    module_name, _, name = text.partition(":")
    plain = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
    # A file in a parent folder now begins with a dot.
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
    """Find the factory that a text names."""
    value = named(text, "factory")
    if not callable(value):
        raise Failure(
            f"{text} is {shown(value)}, not a function: write a function that returns it, which "
            "can run without values"
        )
    try:
        inspect.signature(value).bind()
    except ValueError:  # a function in C without a signature
        pass
    except TypeError as error:
        raise Failure(
            f"{text}{inspect.signature(value)} takes arguments, but a factory takes none: {error}"
        ) from error
    return value


def _imported(name: str) -> Any:
    with UsersCode(f"{name} cannot be imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Otherwise the module exists, but an import inside it failed.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            here = [path.stem for path in Path.cwd().glob("*.py")]
            raise Failure(f"no module named `{error.name}`{did_you_mean(name, here)}") from error


def _abstractly(factory: Callable[[], Tree]) -> Tree:
    """Return a function's result without computing anything."""
    results: list[tuple[Skeleton, list[AnyArray]]] = []

    def run() -> list[Any]:
        skeleton, arrays = Skeleton.apart(factory())
        results.append((skeleton, arrays))
        # A trace cannot return abstract arrays.
        return [None if isinstance(array, jax.ShapeDtypeStruct) else array for array in arrays]

    computed = jax.eval_shape(run)
    skeleton, arrays = results[-1]
    abstract: list[AnyArray] = []
    for array, traced in zip(arrays, computed, strict=True):
        abstract.append(array if traced is None else traced)
    return skeleton.fill(abstract)


_FLAG = "--xla_force_host_platform_device_count"


def prepare(devices: int | None, *, only_compile: bool) -> None:
    """Configure JAX's devices: simulated ones, or only the CPU.

    Args:
        devices: the number of simulated devices; None for none.
        only_compile: whether the command needs no devices, so accelerators stay free for others.

    Raises:
        Failure: if JAX already has fewer devices.
    """
    if devices is not None:
        # JAX reads the flag when it creates its devices, not when it is imported.
        others = re.sub(rf"{_FLAG}=\S+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{others} {_FLAG}={devices}".strip()
        jax.config.update("jax_platforms", "cpu")
        if len(jax.devices()) < devices:
            have = count(len(jax.devices()), "device")
            raise Failure(f"--devices {devices}: JAX has already created {have}")
    elif only_compile and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def check_devices(
    mesh: Mapping[str, int] | int, target: Target | None, devices: int | None
) -> None:
    """Raise Failure if the target or this machine does not have the mesh's devices.

    A target must have exactly as many.
    """
    if isinstance(mesh, Mapping):
        needed = math.prod(mesh.values())
        asked = f"--mesh {mesh_text(mesh)} is {count(needed, 'device')}"
    else:
        needed, asked = mesh, f"--mesh {mesh} is {count(mesh, 'device')}"
    if target is not None:
        if needed != target.size:
            raise Failure(f"{asked}, but --target {target.text} has {target.size}")
        return
    have = len(jax.devices())
    if needed <= have:
        return
    if devices is not None:
        raise Failure(f"{asked}, but --devices is {devices}: write `--devices {needed}`")
    there = "there is 1" if have == 1 else f"there are {have}"
    add = f"add `--devices {needed}` to simulate them, or `--target tpu:v5e:2x4`"
    raise Failure(f"{asked}, but {there}: {add}")

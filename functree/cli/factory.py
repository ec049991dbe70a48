"""`made` runs a factory, given as `module:factory`, without allocating arrays."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
from jax.core import Tracer

from functree.argument_checks import shown
from functree.calls.closures import closed_over, held
from functree.cli.failure import Failure, UsersCode
from functree.errors import did_you_mean
from functree.tree.arrays import Tree
from functree.tree.skeleton.skeleton import Skeleton


def made(text: str) -> Tree:
    """Run a factory abstractly, without allocating arrays, and return its value.

    Raises:
        Failure: if the factory cannot be imported.
        Failure: if the factory raises an error.
        Failure: if the factory returns no arrays.
    """
    factory = named(text, "factory")
    with UsersCode(f"{text} raised"):
        value = eqx.filter_eval_shape(factory)
    if not is_call(value) and not Skeleton.apart(value)[1]:
        raise Failure(
            f"{text} returned {shown(value)}, which has no arrays: return a tree of arrays, or a "
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
        f"{text} returned {shown(value)} instead of a function with its arguments: write "
        "`return step, (state, batch)`"
    )


def is_call(value: object) -> bool:
    """Return whether a value is a pair of a function and its arguments."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    step, args = value
    return callable(step) and isinstance(args, tuple | list)


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
    if not all(module_name.split(".")) or not all(name.split(".")):
        raise Failure(
            f"{text!r} is not a {what}: write `module:name`, where the module is installed or in "
            "the current folder"
        )
    value = _imported(module_name)
    for part in name.split("."):
        if not hasattr(value, part):
            known = [one for one in dir(value) if not one.startswith("_")]
            raise Failure(f"{module_name} has no `{part}`{did_you_mean(part, known)}")
        value = getattr(value, part)
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

"""A `Step` is a function with its arguments, to be compiled with different layouts."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.signature import Partial, Record, Signature, with_static
from functree.calls.stages import Compiled
from functree.devices.meshes import agreed_mesh
from functree.layout.decide import plan_leaves
from functree.layout.layout import LayoutTree, broadcast, own_meshes
from functree.layout.plan.plan import Plan
from functree.transforms.jit.jit import jit
from functree.transforms.jit.jitted import Jit
from functree.tree.arrays import Tree, abstract
from functree.tree.skeleton.skeleton import Skeleton

T = TypeVar("T")


class Step:
    """A function, with its options if it comes from `ft.jit`, and abstract arguments.

    Args:
        fn: the function.
        args: its arguments, abstract or concrete. The placement of concrete arrays is ignored.
    """

    def __init__(self, fn: Callable[..., Tree], args: Sequence[Tree]):
        arguments = tuple(args)
        fun, bound, names = Partial.of(fn)
        if isinstance(fun, Jit) and not names:  # such as a method
            fn, arguments = fun, (*bound, *arguments)
        # Options such as donation are kept, and layouts are replaced.
        self._jit: Jit[..., Tree] = fn if isinstance(fn, Jit) else jit(fn)
        self.name: str = self._jit.__name__
        self.args: tuple[Tree, ...] = _abstract(arguments)
        self._fun: Callable[..., Tree] = _abstractly_bound(self._jit.__wrapped__)
        self._signature, partial = Signature.of(self._fun)
        call = self._signature.bind(*partial.with_bound(self.args, {}))
        self._call: Record = with_static(call, self._jit.static)

    def options(self, layouts: LayoutTree) -> dict[str, Any]:
        """Return the options of `ft.jit` for a layout of the arguments.

        If parts of the layout have rules, the first such part is also the `rules` option.

        Raises:
            RuleError: if the layout does not have the structure of the arguments.
        """
        options: dict[str, Any] = {"in_shardings": layouts}
        for part in broadcast(self._layouts(layouts).prefix(self._call), self._call):
            if part.layout.rules is not None:
                options["rules"] = part.layout
                break
        return options

    def plan(self, layouts: LayoutTree, sizes: Any) -> Plan:
        """Plan the arguments without using devices; problems are listed in the plan."""
        leaves, parts = self._layouts(layouts).read(self._call)
        view = agreed_mesh(sizes, own_meshes(parts))
        return plan_leaves(leaves, parts, view, check=False, allow_unspecified=True)

    def jitted(self, options: Mapping[str, Any]) -> Jit[..., Tree]:
        """Return the function with these options of `ft.jit`, which override its own."""
        return self._jit.changed(self._fun, **options)

    def compile(self, options: Mapping[str, Any]) -> Compiled:
        """Compile the function with these options of `ft.jit`, which override its own."""
        return self.jitted(options).lower(*self.args).compile()

    def _layouts(self, layouts: LayoutTree) -> ParameterLayouts:
        return ParameterLayouts("layouts", layouts, self._signature)


def _abstractly_bound(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Make a function's bound arguments abstract, including a method's instance."""
    fun, args, kwargs = Partial.of(fn)
    return functools.partial(fun, *_abstract(args), **_abstract(dict(kwargs)))


def _abstract(tree: T) -> T:
    """Make a tree abstract, without shardings."""
    skeleton, arrays = Skeleton.apart(tree)
    return skeleton.fill([abstract(jax.typeof(array)) for array in arrays])

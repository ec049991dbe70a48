"""A call of a function ─► its stages, traced, lowered and compiled, for trees of modules."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from functree.argument_checks import DEVICES, MAPPING, TEXTS, check
from functree.calls.callbacks import check_callbacks
from functree.calls.compile_events import compile_events
from functree.calls.out_of_memory import check_fits, refusing_too_large
from functree.calls.program import around
from functree.calls.program_ledger import heard_compiling
from functree.calls.signature import Args, Kwargs
from functree.calls.stages.compiled import Compiled
from functree.calls.stages.stage import Stage, StagedCall
from functree.compiled.layouts import Layouts, layouts_of
from functree.devices.placement import is_placed
from functree.errors import FunctreeError, FunctreeTypeError, did_you_mean
from functree.tree.arrays import AnyArray
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


class Traced(Stage[jax.stages.Traced]):
    """A function traced for one call; like `jax.stages.Traced`, for functions of modules.

    Examples:
        >>> traced = ft.jit(lambda x: {"y": 2 * x}).trace(
        ...     jax.ShapeDtypeStruct((3,), "float32")
        ... )
        >>> traced.out_info["y"].shape
        (3,)
    """

    @property
    def paths(self) -> tuple[Path, ...]:
        """The path of each array of the arguments, in JAX's order."""
        return self._program.group.paths

    @property
    def donated(self) -> tuple[Path, ...]:
        """The paths of the donated ones."""
        return tuple(self.paths[i] for i in self._program.body.arguments.donated)

    def arrays(self, args: Args, kwargs: Kwargs) -> list[AnyArray]:
        """The arrays of a call like the traced one, in JAX's order, and placed as that is traced.

        Args:
            args: the arguments by position.
            kwargs: those by keyword.
        """
        _, arrays = Skeleton.apart(self._call.bind(args, kwargs))
        for i, kind in enumerate(self._call.arrays):
            sharding = kind.sharding
            if isinstance(sharding, NamedSharding) and not is_placed(arrays[i], sharding):
                arrays[i] = jax.device_put(arrays[i], sharding)
        return arrays

    def of_arrays(self) -> tuple[jax.stages.Wrapped, list[jax.ShapeDtypeStruct]]:
        """The program as a plain `jax.jit` function of its arrays, for `jax.export`; and these,
        abstract."""
        if self._closes_over_refs:
            raise FunctreeError(
                f"{self._program.name} closes over a `jax.Ref`, which stays in this process: pass "
                "and return the value"
            )
        arrays = list(self._call.arrays)
        for i, array in enumerate(arrays):
            # JAX puts an array that nobody has placed on a single device. What is exported does not
            # depend on that.
            if not isinstance(array.sharding, NamedSharding):
                arrays[i] = array.update(sharding=None)
        return self._program.of_arrays(), arrays

    @property
    def entered(self) -> Mesh | None:
        """The mesh that is entered around a call, if it is not the current one."""
        return self._program.entered

    def lower(
        self, *, lowering_platforms: tuple[str, ...] | None = None, **refused: object
    ) -> "Lowered":
        """Lower the function, for this platform or for others (`("tpu",)`).

        Raises:
            FunctreeError: `lowering_platforms` is not a tuple of names; another option is given, as
                by `jax.export`.
        """
        name = self._program.name
        # Only JAX's own functions, such as `jax.export.export`, have options like this one.
        if any(option.startswith("_") for option in refused):
            raise FunctreeTypeError(
                f"`jax.export.export` takes what `jax.jit` returns, and {name} is a function of "
                f"functree: write `ft.export({name}, *args)`, whose result "
                "`jax.export.deserialize` reads"
            )
        for option in refused:
            raise FunctreeTypeError(
                f"{name} cannot be lowered so: there is no option `{option}`"
                f"{did_you_mean(option, ['lowering_platforms'])}"
            )
        check(
            f"{self._program.name} cannot be lowered so",
            lowering_platforms=(lowering_platforms, TEXTS.or_none()),
        )
        # On the mesh of the calls: otherwise JAX would lower and compile again for a call.
        program = self._program
        shardings = (one.sharding for one in self._call.arrays)
        check_callbacks(program.name, self.jax.jaxpr, shardings)
        with around(program.entered):
            lowered = self.jax.lower(lowering_platforms=lowering_platforms)
        return Lowered(lowered, self._call, self._closes_over_refs)

    @property
    def _closes_over_refs(self) -> bool:
        return any(isinstance(one, jax.Ref) for one in self.jax.jaxpr.consts)


class Lowered(Stage[jax.stages.Lowered]):
    """A function lowered for one call; like `jax.stages.Lowered`, for functions of modules.

    Examples:
        >>> lowered = ft.jit(lambda x: 2 * x).lower(jnp.ones(3))
        >>> "stablehlo.multiply" in lowered.as_text()
        True
    """

    def __init__(self, stage: jax.stages.Lowered, call: StagedCall, closes_over_refs: bool):
        super().__init__(stage, call)
        self._closes_over_refs = closes_over_refs

    def compile(
        self,
        compiler_options: Mapping[str, Any] | None = None,
        *,
        device_assignment: tuple[Any, ...] | None = None,
    ) -> "Compiled":
        """Compile the program.

        Args:
            compiler_options: as in `jax.jit`.
            device_assignment: the devices of a program that was traced on an abstract mesh, in the
                order of that mesh.

        Raises:
            FunctreeError: one of them is something else; or the program does not fit in the memory
                of a target; or the function closes over a `jax.Ref`.
        """
        # JAX cannot describe such a program: its result has the refs among the arrays.
        if self._closes_over_refs:
            raise FunctreeError(
                f"{self._program.name} closes over a `jax.Ref`, and JAX does not tell how such a "
                "program is compiled: call the function itself, or pass and return the value"
            )
        check(
            f"{self._program.name} cannot be compiled so",
            compiler_options=(compiler_options, MAPPING.or_none()),
            device_assignment=(device_assignment, DEVICES.or_none()),
        )
        options = None if compiler_options is None else dict(compiler_options)
        before = compile_events.count
        with heard_compiling() as heard, around(self._program.entered), self._refusing_too_large():
            compiled = self.jax.compile(options, device_assignment=device_assignment)
        # Otherwise JAX had compiled it before, for a call or here.
        if compile_events.have(self._program.body.__name__, before):
            pairs = tuple(sorted((options or {}).items()))
            self._call.log.add(self._call.situation()._replace(options=pairs))
        # On devices that are there, JAX's own error comes when the program is run.
        target = self._target()
        if target is not None:
            check_fits(self._program.name, target, compiled, self._placed_by_path)
        return Compiled(compiled, self._call, self.jax.out_info, heard.warnings, self.layouts)

    def _refusing_too_large(self) -> AbstractContextManager[None]:
        """A context in which a program that is too large for a target is an error with paths."""
        target = self._target()
        if target is None:
            return nullcontext()
        return refusing_too_large(self._program.name, target, self._placed_by_path)

    def _target(self) -> Mesh | None:
        """The mesh, if its devices are only compiled for."""
        mesh = self._program.mesh
        if self._program.missing is None or not isinstance(mesh, Mesh):
            return None
        return mesh

    def _placed_by_path(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """The arrays of the call by path, as the program takes them."""
        return dict(zip(self._program.group.paths, self._call.arrays, strict=True))

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as text: `dialect` is `"stablehlo"` or `"hlo"`."""
        return self.jax.as_text(dialect=dialect, debug_info=debug_info)

    def layouts(self) -> Layouts:
        """How each operation will be laid out, and who has decided so. Nothing is compiled.

        Raises:
            FunctreeError: this version of JAX does not have the passes of Shardy.

        Examples:
            >>> mesh = ft.make_mesh(data=8)
            >>> scale = ft.jit(
            ...     lambda x: 2 * x, in_shardings=ft.P("data"), mesh=mesh
            ... )
            >>> print(scale.lower(jnp.ones((16, 4))).layouts().rows[-1].array)
            f32[16/data, 4]
        """
        return layouts_of(self.jax, self.jax.out_info.paths())

    def cost_analysis(self) -> Any | None:
        """The compiler's estimate of the costs, before compilation."""
        return self.jax.cost_analysis()

"""What a program needs on one device, in words, and what makes it fewer."""

import pytest
from jax.sharding import PartitionSpec as P

import functree as ft
from functree.compiled.memory_need import (
    FEWER_TEMPORARIES,
    MemoryNeed,
    arguments_text,
    decisive,
    others_text,
    remedies,
    shard_more,
    uncut_axes,
)

GIB = 2**30
W = ft.Path(("w",))
UNCUT = {W: ["data"]}
SHARD = "shard the largest arguments over more mesh axes: `w` is not cut over data"
DONATE = (
    "donate the arguments that are not needed afterwards (`donate=`): {} of them are not donated, "
    "and have the shapes and dtypes of results, which take memory of their own"
)
IN = "say how the arguments are sharded (`in_shardings=`), which is left to the compiler now"
OUT = "say how the results are sharded (`out_shardings=`), which is left to the compiler now"


def need(needed: float | None, arguments: float, **others: float) -> MemoryNeed:
    """In GiB, on a device that has 32 of them."""
    sizes = {name: round(size * GIB) for name, size in others.items()}
    size = None if needed is None else round(needed * GIB)
    return MemoryNeed(size, 32 * GIB, round(arguments * GIB))._replace(**sizes)


# A need, what it is besides the arguments, and the remedies in their order.
NEEDS: dict[str, tuple[MemoryNeed, str, list[str]]] = {
    "temporaries": (
        need(40.5, 4),
        "the other 36.5 GiB are its temporaries",
        [FEWER_TEMPORARIES],
    ),
    "temporaries and arguments": (
        need(40.5, 22.5),
        "the other 18 GiB are its temporaries",
        [SHARD, FEWER_TEMPORARIES],
    ),
    "more temporaries than arguments": (
        need(50, 20, results=0.1),
        "the other 30 GiB are its temporaries",
        [FEWER_TEMPORARIES, SHARD],
    ),
    "results": (
        need(44, 22, results=22, kept=21.5),
        "the other 22 GiB are its results (22 GiB)",
        [SHARD, DONATE.format("21.5 GiB")],
    ),
    "results and temporaries": (
        need(60, 12, results=12, kept=11),
        "the other 48 GiB are its results (12 GiB) and temporaries",
        [FEWER_TEMPORARIES, SHARD, DONATE.format("11 GiB")],
    ),
    "results that nobody has sharded": (
        need(40, 4, results=30, loose_results=30),
        "the other 36 GiB are its results and temporaries",
        [FEWER_TEMPORARIES, OUT],
    ),
    "arguments that nobody has sharded": (need(40, 36, loose_arguments=30), "", [IN, FEWER_TEMPORARIES]),
    "a scalar that nobody has sharded": (
        need(40, 4, loose_arguments=1e-9, loose_results=1e-9),
        "the other 36 GiB are its temporaries",
        [FEWER_TEMPORARIES],
    ),
    "arguments alone": (need(50, 48, results=1, kept=1), "the other 2 GiB are its results (1 GiB) and temporaries", [SHARD, DONATE.format("1 GiB"), FEWER_TEMPORARIES]),
    "arguments that do not fit, and more": (need(208, 33), "the other 175 GiB are its temporaries", [SHARD, FEWER_TEMPORARIES]),
    "arguments to the last byte": (need(48.01, 48), "", [SHARD]),
    "no arguments": (need(40, 0), "the other 40 GiB are its temporaries", [FEWER_TEMPORARIES]),
    "more arguments than it needs": (need(33, 33.1), "", [SHARD]),
    "unknown": (need(None, 8, kept=4), "", [SHARD, DONATE.format("4 GiB"), FEWER_TEMPORARIES]),
}  # fmt: skip


@pytest.mark.parametrize("case", NEEDS)
def test_what_is_needed_and_what_helps(case: str) -> None:
    one, others, helps = NEEDS[case]
    assert others_text(one) == others
    assert remedies(one, UNCUT) == helps


def test_padding_is_not_told_from_temporaries() -> None:
    padded = need(40, 4, results=4)._replace(is_padded=True)
    assert (
        others_text(padded) == "the other 36 GiB are its results (4 GiB), temporaries and padding"
    )
    alone = need(40, 20, results=20)._replace(is_padded=True)
    assert others_text(alone) == "the other 20 GiB are its results (20 GiB)"


def test_the_arguments() -> None:
    assert arguments_text(need(40, 22.5)) == "22.5 GiB on each device"
    assert arguments_text(need(40, 36, loose_arguments=30)) == "at most 36 GiB on each device"


# Specs of two arguments, and the remedy.
SPECS: dict[str, tuple[dict[ft.Path, P], str]] = {
    "none": ({}, "shard the largest arguments over more devices"),
    "one axis left": ({W: P("data", None)}, SHARD.replace("over data", "over model")),
    "all axes left": (
        {W: P(), ft.Path(("v",)): P(None, "model")},
        "shard the largest arguments over more mesh axes: `w` is not cut over data and model, "
        "`v` is not cut over data",
    ),
    "alike": (
        {W: P("model"), ft.Path(("v",)): P(None, "model")},
        "shard the largest arguments over more mesh axes: `w` and `v` are not cut over data",
    ),
    "one of two": (
        {W: P("model", "data"), ft.Path(("v",)): P("model")},
        "shard the largest arguments over more mesh axes: `v` is not cut over data",
    ),
    "no axis left": (
        {W: P(("data", "model"))},
        "take more devices, or smaller arguments: the largest are cut over all mesh axes",
    ),
}


@pytest.mark.parametrize("case", SPECS)
def test_the_mesh_axes_that_are_left(case: str) -> None:
    specs, told = SPECS[case]
    assert shard_more(uncut_axes(specs, {"data": 8, "model": 4, "one": 1})) == told


def test_small_arguments_are_not_named() -> None:
    sizes = {ft.Path((name,)): size for name, size in {"a": 5, "b": 100, "c": 11, "d": 90}.items()}
    assert list(map(str, decisive(sizes))) == ["b", "d"]
    assert list(map(str, decisive({ft.Path(("a",)): 5, W: 100}))) == ["w"]
    assert decisive({}) == []

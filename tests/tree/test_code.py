"""Python's source, written line by line ─► a function."""

import gc
import linecache
import traceback

import pytest

from functree.tree.skeleton.code import Code


def test_its_lines_are_in_tracebacks_while_it_lives():
    code = Code()
    code.lines.append(f"return {code.value({})}[key]")
    find, other = (code.function("find(key)", "a dict") for _ in range(2))
    with pytest.raises(KeyError) as caught:
        find("a")
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.name, frame.lineno) == ("find", 2)
    assert frame.line is not None and frame.line.startswith("return x0")
    file = find.__code__.co_filename
    assert frame.filename == file and file.startswith("<functree: find a dict ")
    assert file != other.__code__.co_filename, "so that a profile tells them apart"
    linecache.checkcache(file)
    assert file in linecache.cache
    del find, other, caught, frame, code
    gc.collect()
    assert file not in linecache.cache

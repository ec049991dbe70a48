"""Assertions for users' own tests: layouts, what programs move, compilations, and sharded against unsharded results."""

from functree.testing.budgets import assert_collectives as assert_collectives
from functree.testing.budgets import assert_peak_memory as assert_peak_memory
from functree.testing.closed import assert_closed as assert_closed
from functree.testing.golden import assert_layout as assert_layout
from functree.testing.recompiling import assert_no_recompile as assert_no_recompile
from functree.testing.unsharded import assert_same_as_unsharded as assert_same_as_unsharded

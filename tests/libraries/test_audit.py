"""The names in the ledgers of programs of others: none is wrong, and few are missing; and what is
moved for them."""

import pytest

from tests.lib.covering import whole_tables
from tests.libraries.audit_programs import MESHES
from tests.libraries.name_audit import CELLS, COVERING, audit

# At most this share of the bytes of a program may be without a name, and could have one; of others
# everything has a name. Many could only be named by a reader of the program, such as the gradients of
# two arguments that are alike.
MISSING = {
    "adaptive_steps": 0.53,
    "bare_arrays_alike": 1.0,
    "batch_norm": 0.02,
    "dqn_gradient_only": 0.34,
    "experts": 0.05,
    "gan_both": 0.19,
    "graph": 0.73,
    "lora_merged": 1.0,
    "maml": 0.45,
    "sam": 0.51,
    "shampoo": 0.15,
    "tied_weights": 0.23,
    "two_towers_gradients": 0.22,
    "ulysses": 0.37,
}


@pytest.mark.usefixtures("compiles_anew")  # tables know lines of source
@pytest.mark.filterwarnings("ignore")  # those of the libraries
@pytest.mark.parametrize("layout", MESHES)
def test_no_name_is_wrong(layout: str) -> None:
    for cell in CELLS if whole_tables() else COVERING:
        if cell[1] == layout:
            found = audit([cell])
            assert not found.wrong, "\n".join(found.wrong)
            assert not found.misread, "\n".join(found.misread)
            assert found.missing <= MISSING.get(cell[0], 0), (cell, found)

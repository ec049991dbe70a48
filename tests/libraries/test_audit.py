"""The names in the ledgers of programs of others: none is wrong, and few are missing; and what is
moved for them."""

import pytest

from tests.lib.covering import whole_tables
from tests.libraries.name_audit import CELLS, COVERING, audit

# At most this share of the bytes may be without a name, and could have one, by layout. Many could only
# be named by a reader of the program, such as the gradients of two arguments that are alike.
MISSING = {"dp": 0.14, "fsdp": 0.19, "tp": 0.04, "both": 0.0}


@pytest.mark.usefixtures("compiles_anew")  # tables know lines of source
@pytest.mark.filterwarnings("ignore")  # those of the libraries
@pytest.mark.parametrize("layout", MISSING)
def test_no_name_is_wrong(layout: str) -> None:
    cells = CELLS if whole_tables() else COVERING
    found = audit([cell for cell in cells if cell[1] == layout])
    assert not found.wrong, "\n".join(found.wrong)
    assert not found.misread, "\n".join(found.misread)
    assert found.missing <= MISSING[layout], found

"""The names in the ledgers of programs of others, each under several layouts, judged by
tables that were written by hand.

    python -m tests.audit                           # on eight simulated devices
    python -m tests.audit --target tpu:v5e:2x4      # by the compiler for TPUs
    python -m tests.audit --only sam maml

The tests run a part of it. Any wrong name is a failure; that a name is missing is only counted.
"""

import argparse
import os
import sys
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"  # both are read when jax starts
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
from tests.libraries.name_audit import CELLS, audit


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a target of `ft.make_mesh`")
    parser.add_argument("--only", nargs="*", help="the names of programs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cells = [cell for cell in CELLS if not options.only or cell[0] in options.only]
    found = audit(cells, options.target)
    print(*found.wrong, *found.misread, sep="\n")
    print(
        f"{len(cells)} programs and layouts, {found.arrays} arrays: {len(found.wrong)} wrong names, "
        f"{len(found.misread)} of another kind than is said, "
        f"{found.unnamed} without a name ({found.share:.1%} of the bytes; "
        f"{found.missing:.1%} could have one)"
    )
    return bool(found.wrong or found.misread)


if __name__ == "__main__":
    sys.exit(main())

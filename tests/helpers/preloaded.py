"""What the ranks of tests have imported when they start: the server that they are forked from imports this.

Besides a run, what test modules import: a rank imports the one that its function is from.
"""

import gc

from qlora_fsdp.imports import quick_imports

with quick_imports():
    import pytest  # noqa: F401

    import qlora_fsdp.run  # noqa: F401
    import tests.helpers.classification  # noqa: F401
    from tests.helpers.quick_config import load_config

load_config([])  # what Hydra and its parser make at their first use
gc.freeze()  # the ranks' garbage collector need not look through any of this

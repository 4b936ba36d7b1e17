"""For every family in helpers/packed.py: is it packed, is that right, and how long does it take to find out?

    python -m tests.packing_table [FAMILY ...]

The verdict is that of a run (model/trials/row_trial.py), on a config of real size. It is compared with a plain check
by stock transformers on another small model. Ends with 1 if they differ. No part of CI, which compares some of them
(tests/unit/test_packing.py).
"""

from __future__ import annotations

import logging
import sys
import time

from qlora_fsdp.model.trials.attention_by_starts import BY_STARTS
from qlora_fsdp.model.trials.row_trial import RowTrial
from tests.helpers.packed import SMALL, packed_rows_stay_apart, real_config


def main(families: list[str]) -> int:
    """Prints a line for each family."""
    logging.disable(logging.WARNING)
    num_wrong = 0
    print(f"{'family':18} {'packed':7} {'check':7} {'varlen':7} {'head':5} {'cpu s':>6}  why not")
    for family in families or sorted(SMALL):
        config = real_config(family)
        started = time.process_time()
        trial = RowTrial(config, max_length=2048)
        reason = trial.why_not_packed("eager")
        seconds = time.process_time() - started
        by_starts, head = trial.why_not_packed(BY_STARTS) is None, trial.head_transform() is not None
        is_apart = packed_rows_stay_apart(family)
        num_wrong += (reason is None) != is_apart
        words = [{True: "yes", False: "no"}[value] for value in (reason is None, is_apart, by_starts, head)]
        print(
            f"{family:18} {words[0]:7} {words[1]:7} {words[2]:7} {words[3]:5} {seconds:6.2f}  {reason or ''}",
            flush=True,
        )
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

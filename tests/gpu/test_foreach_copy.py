"""Why codes in bfloat16 storage get corrupted elsewhere: the copy with which FSDP2 gathers changes NaN bit patterns."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_foreach_copy_changes_nan_patterns_of_bfloat16_but_not_bytes() -> None:
    patterns = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.uint16).view(torch.bfloat16)
    copied = torch.empty_like(patterns)
    torch._foreach_copy_([copied], [patterns])
    changed = copied.view(torch.uint16) != patterns.view(torch.uint16)
    assert torch.equal(changed, changed & patterns.isnan()), "only NaN patterns may change"
    if not changed.any():
        pytest.skip("this torch copies them exactly: pytorch#159333 is mended")
    as_bytes = torch.empty_like(patterns)
    torch._foreach_copy_([as_bytes.view(torch.uint8)], [patterns.view(torch.uint8)])  # what a group of two dtypes does
    assert torch.equal(as_bytes.view(torch.uint16), patterns.view(torch.uint16))

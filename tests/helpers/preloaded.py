"""What the ranks of tests have imported when they start: the server that they are forked from imports this."""

from qlora_fsdp.imports import quick_imports

with quick_imports():
    import qlora_fsdp.run  # noqa: F401

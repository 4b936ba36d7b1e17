"""Adapters in use from Python: what `from qlora_fsdp import load` gives (docs/python.md)."""

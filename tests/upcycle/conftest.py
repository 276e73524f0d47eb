"""Profiles of hypothesis: `pytest tests/upcycle/test_upcycle_fuzz.py --hypothesis-profile=fuzz` looks longer."""

from hypothesis import settings

settings.register_profile("fuzz", max_examples=2_000)

"""A server that speaks vLLM's protocol and computes with plain torch: `python -m kite.testing.fake`.

It is a process of its own with a real port, and its answers are really those of the base with the adapter. It keeps
vLLM's faults that matter to a control plane: an adapter that matches no module is accepted and the base is served,
reasons of refusals are sentences or nothing, and a paused engine lets its clients hang. Its prefix
cache counts as vLLM's does, and saves no time; it evicts no adapter (`--max-loras` is taken and not enforced). It sends
the readings of vLLM's stat logger plugin.
"""

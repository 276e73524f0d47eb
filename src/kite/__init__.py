"""What every part of KITE stands on: bus, ledger, engine, orders, proof, tracing."""

from importlib.metadata import version

__version__ = version("kite-control-plane")

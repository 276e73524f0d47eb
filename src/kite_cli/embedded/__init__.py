"""The embedded fleet: bus, ledger and the four services of one node, as processes of this machine."""

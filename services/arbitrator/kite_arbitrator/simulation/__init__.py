"""The seeded simulation of `kite.testing.simulation` with the arbitrator's core as the decider. For tests."""

"""Telemetry of one node: readings of its engines, folded into one window every 100 ms."""

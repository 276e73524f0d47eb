"""What the engineer on call sees: the ledger replayed, explained and told as a timeline. Nothing here has effects."""

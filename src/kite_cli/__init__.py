"""The `kite` command: one module a noun; `embedded` runs a fleet, `asking` asks one, `demo` shows the whole job."""

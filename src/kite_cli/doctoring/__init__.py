"""What `kite doctor` looks at: facts that are gathered, and checks that turn them into verdicts without any look."""

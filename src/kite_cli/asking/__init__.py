"""Asking a fleet for something: publish one request, follow what it brings about, return how it ended."""

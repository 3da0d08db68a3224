"""Checkpoints written in the release's own format, of any geometry: random ones for tests, trained ones for demos."""

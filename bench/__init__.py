"""Benchmarks as commands: `evrun bench NAME`. Every figure stands beside its floor, measured in the same run."""

"""Benchmarks behind ``gdn-ops bench``."""

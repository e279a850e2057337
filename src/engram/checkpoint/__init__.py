"""Snapshots on disk: the commit protocol, and reading in which nothing is believed before it is verified."""

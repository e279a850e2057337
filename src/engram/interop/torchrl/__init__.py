"""Directories that TorchRL's `dumps` wrote."""

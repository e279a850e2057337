"""Packed rows in memory or in a file: lanes, layout, tables, locks, episodes. It knows no buffer."""

"""What the examples need besides engram, a concept a file."""

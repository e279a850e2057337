"""What encodes the rows of a storage for disk, in one form each."""

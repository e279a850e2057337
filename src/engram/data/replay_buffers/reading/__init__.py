"""From a draw to a batch: reading rows, joining members, collating, preparing batches ahead."""

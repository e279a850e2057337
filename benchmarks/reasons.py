"""Why rows fall short of their targets, where that is known: by the key of a row."""

from __future__ import annotations

REASONS = {
    key: reason
    for reason, keys in {
        "Two threads that make the tensors of new batches wait for each other's GIL; with `reuse_batches=True` and an "
        "`engram.Generator` they do not": ["sample_small_at_once"],
        "A clone copies in one piece what a batch gathers from all over memory; the floor, which gathers, takes longer "
        "than the batch": ["sample_pixels", "sample_pixels_threads"],
        "A thousand tensors are made for each batch, which costs more than to copy them": ["sample_wide"],
        "Nodes of the sum tree are in no cache, and rows that were appended are entered into it before the next draw": [
            "prioritized_loop_10000000",
            "prioritized_cycle",
        ],
        "Each row is in another page of memory, for the floor too": ["epochs_60000000"],
        "A collector draws and checks actions, and keeps every step; the bare loop keeps nothing": [
            "collect_serial",
            "collect_vector",
            "program_random_32",
            "program_random_128",
            "program_pool_8",
            "program_pool_64",
        ],
        "A collector checks actions and values at each step, numbers trajectories, and stores more columns than a loop "
        "by hand keeps": ["program_dqn", "program_dqn_16"],
        "Batches also have next observations, flags and trajectory ids, and one environment lies after the other": [
            "program_collect_8",
            "program_collect_64",
            "program_collect_native_8",
            "program_collect_native_64",
        ],
        "Rows are read and verified; this floor only writes a file of that size": ["load_warm_mapped"],
    }.items()
    for key in keys
}

"""The kernel's edge: the names of its inside that satellites use.

The kernel is what makes, fills, samples and saves a replay buffer. Its satellites are `cli`, `compat`, `data.datasets`,
`distributed`, `interop` and `testing`: they use what users import (`engram.data`, `engram.envs`, `engram.collectors`,
`engram.errors`, `engram.pytree`, `engram.specs`) and the names listed in these modules, nothing else of the kernel,
which imports none of them (`tests/test_layering.py`). A name that is added here is an interface from then on.

    tools       files, memory, texts, warnings, without torch
    disk        checkpoint directories, mapped stores and their locks, without torch
    rows        rows: their layout, lanes, episodes; snapshots of them
    hdf5        reading HDF5 files that nobody vouches for, and writing them
    spaces      spaces of environments; texts as bytes of a row
    replay      what stands behind a buffer: storages' tables, readers, adapters of users' parts
    collecting  arguments and counts of collectors
    advice      names of TorchRL's that are missing here
"""

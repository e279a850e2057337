"""The kernel's edge: the names of its inside that satellites use.

The kernel is what makes, fills, samples and saves a replay buffer. Its satellites are `cli`, `compat`, `datasets`,
`distributed`, `interop` and `testing`. Of the kernel they use what users import and the names that these modules list;
the kernel imports none of them (`tests/test_layering.py`). A name that is added here is an interface from then on.

    tools       files, memory, texts, warnings, without torch
    disk        checkpoint directories, mapped stores and their locks, without torch
    rows        rows: their layout, lanes, episodes; snapshots of them
    hdf5        reading HDF5 files of unknown origin
    spaces      spaces of the steps of environments
    replay      what stands behind a buffer: readers of batches, adapters of users' parts
    collecting  collectors whose workers run elsewhere, and the pool of these
    advice      names of TorchRL's that are missing here
"""

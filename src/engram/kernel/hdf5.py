"""HDF5 files: reading those that nobody vouches for, and writing."""

from engram._hdf5 import (
    H5Dataset,
    H5Reader,
    H5RowWriter,
    H5Source,
    check_options,
    create_plain,
    import_h5py,
    is_ours,
    open_checked,
    open_foreign,
    text_dtype,
)

__all__ = [
    "H5Dataset",
    "H5Reader",
    "H5RowWriter",
    "H5Source",
    "check_options",
    "create_plain",
    "import_h5py",
    "is_ours",
    "open_checked",
    "open_foreign",
    "text_dtype",
]

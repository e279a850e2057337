"""HDF5 files of unknown origin: reading them safely."""

from engram._hdf5 import H5Dataset, H5File, H5Reader, check_options, import_h5py

__all__ = ["H5Dataset", "H5File", "H5Reader", "check_options", "import_h5py"]

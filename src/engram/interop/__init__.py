"""Directories of other libraries, which `loads` reads."""

from engram.interop.torchrl.load import is_torchrl, open_torchrl

#: Of each form: a function that says whether a path has it, and one that opens it for the buffer that loads it (None: a
#: storage loads its rows alone).
FORMS = ((is_torchrl, open_torchrl),)
